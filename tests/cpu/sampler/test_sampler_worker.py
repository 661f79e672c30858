"""One worker process: every way that a job can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from confpred.sampler.worker import Done, Failed, JobProcess


def double(job, report):
    report(job)
    return 2 * job


def crash(job, report):
    report(job)
    os.kill(os.getpid(), job)


def leave(job, report):
    os._exit(job)


def hang(job, report):
    report(job)
    time.sleep(3600)


def chatter(job, report):
    for value in range(job):
        time.sleep(0.2)
        report(value)
    return "said"


def fail(job, report):
    raise ValueError(f"bad {job}")


def pid(job, report):
    return os.getpid()


@pytest.fixture
def worker_of():
    workers = []

    def make(function, silence_s=30.0):
        workers.append(JobProcess(f"{__name__}:{function.__name__}", silence_s))
        return workers[-1]

    yield make
    for worker in workers:
        worker.stop(kill=True)


def run(worker, job):
    worker.start(job)
    deadline = time.monotonic() + 60
    while (ended := worker.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return ended


def test_a_job_ends_with_its_result(worker_of):
    worker = worker_of(double)
    for job in (21, 4):
        ended = run(worker, job)
        assert isinstance(ended, Done)
        assert ended.result == 2 * job
        assert worker.job is None


def test_one_process_serves_many_jobs_until_it_is_stopped(worker_of):
    worker = worker_of(pid)
    first, second = run(worker, 1).result, run(worker, 2).result
    assert first == second != os.getpid()
    worker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert run(worker, 3).result != first


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGKILL, "SIGKILL")]
)
def test_a_crash_names_the_signal_and_the_last_report(worker_of, number, name):
    ended = run(worker_of(crash), int(number))
    assert ended == Failed("died", f"the worker process died ({name})", int(number))


def test_an_exit_names_its_code(worker_of):
    assert run(worker_of(leave), 3) == Failed("died", "the worker process died (exit code 3)", None)


def test_an_exception_ends_the_process_too(worker_of):
    worker = worker_of(fail)
    for job in (1, 2):
        assert run(worker, job) == Failed("error", f"ValueError: bad {job}", None)
        assert worker.connection is None


def test_silence_is_taken_for_a_hang(worker_of):
    ended = run(worker_of(hang, silence_s=5.0), 5)
    assert ended == Failed("silent", "no sign of life for 5 s: killed", 5)


@pytest.mark.slow(reason="it waits longer than the silence")
def test_a_job_that_reports_may_last_longer_than_the_silence(worker_of):
    ended = run(worker_of(chatter, silence_s=5.0), 30)
    assert isinstance(ended, Done)
    assert ended.result == "said"
    assert ended.seconds > 5.9


def test_a_script_without_a_guard_does_not_begin_again_in_the_worker(tmp_path):
    """`multiprocessing` runs the program's ``__main__`` in a spawned process."""
    lines = (
        "import time",
        "print('begun', flush=True)",
        "from confpred.sampler.worker import JobProcess",
        "worker = JobProcess('os:strerror', 30.0)",  # fails: it takes no second argument
        "worker.start(1)",
        "while (ended := worker.poll()) is None: time.sleep(0.01)",
        "print(ended.message)",
    )
    (tmp_path / "script.py").write_text("\n".join(lines))
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout.count("begun"), done.stdout.count("TypeError")) == (1, 1), done


def test_an_idle_worker_ends_at_once_beside_a_forked_process(worker_of):
    """Which holds the worker's pipe open too: by its end alone, the worker would never notice."""
    worker = worker_of(double)
    run(worker, 1)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        begun = time.monotonic()
        worker.stop()
        assert time.monotonic() - begun < 3.0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
