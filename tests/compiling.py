"""Many kernels through the compiler at once, on two processes; no GPU is needed."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from cuflash import jit

WORKERS = 2


def _log(job):
    plan, arch = job
    return jit.compile_text(jit.translation_unit(plan), plan.kernel, arch)[1]


def logs_of(jobs: dict) -> dict:
    """What the compiler said: {name: log} of {name: (plan, architecture)}."""
    # spawn: a process that has started CUDA must not be forked.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        return dict(zip(jobs, pool.map(_log, jobs.values())))
