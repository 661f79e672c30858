"""Settings shared by all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import processor_time
import pytest
from hypothesis import settings

# Examples are timed on machines that other work shares, so no example has a deadline of its own;
# a fixed seed keeps a failure reproducible and a pass meaningful from one run to the next.
settings.register_profile("project", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("project")
pytest.register_assert_rewrite("hazards")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(processor_time.Watch(config))


@pytest.fixture(scope="session", autouse=True)
def no_models_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests see the models that ship with the package, not those that `confpred retrain` made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONFPRED_MODELS_DIR", str(tmp_path_factory.mktemp("models") / "none"))
        yield


@pytest.fixture(scope="session", autouse=True)
def interrupts_are_heard() -> None:
    """A shell has what it runs in the background ignore Ctrl-C, and so would all processes that
    tests start: confpred leaves a signal alone that is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of the repository."""
    return Path(__file__).parents[1]
