"""``confpred`` as it is, for a GPU that is not there: times are made up (`sampler_jobs`)."""

import secrets
from functools import partial

import sampler_jobs
from sampler_run import runs

from confpred.cli import main
from confpred.client import transfer
from confpred.sampler import run, store

if __name__ == "__main__":
    run.find_gpus = lambda gpus: runs(secrets.token_hex(4), "h100")
    run.Sampling = partial(run.Sampling, measure=sampler_jobs.ONCE_SENT)
    store.FLUSH_SECONDS = transfer._LOOK_S = 0.1
    main()
