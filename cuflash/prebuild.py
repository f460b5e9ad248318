"""Kernels built several at a time, by processes of their own, and those of a call listed.

NVRTC compiles a kernel on one core in a second or more, holding Python's lock. Workers are spawned,
as CUDA does not survive a fork; they need no GPU and leave nothing but the files of the cache.
"""

from __future__ import annotations

import multiprocessing
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from . import edge, jit
from .arrays import home_of
from .plan import Plan

_MOST_WORKERS = 61  # Windows waits for no more


@dataclass(frozen=True)
class Record:
    """What became of one kernel: print it, or read its fields."""

    plan: Plan
    arch: str
    path: str
    seconds: float
    cached: bool
    registers: int | None  # None when the compiler was not asked, or only for PTX
    spilled_bytes: int | None

    def __str__(self) -> str:
        values = dict(self.plan.constants)
        if self.cached:
            how = "cached"
        elif self.registers is None:
            how = "PTX, which the driver compiles when it is loaded"
        else:
            how = f"{self.registers} registers, {self.spilled_bytes} bytes spilled"
        dims = "any head_dim"
        if "kHeadDim" in values:
            dims = f"head_dim {values['kHeadDim']}, {values['kHeadDimV']}"
        band = ", band" if values.get("kBand") else ""
        kernel = f"{self.plan.kernel} {self.arch} {values['Element']} {dims}{band}"
        return f"{kernel}: {how}, {self.seconds:.2f} s"


def build(plan: Plan, arch: str) -> Record:
    """Build one plan into the cache."""
    start = time.perf_counter()
    built = jit.build(plan, arch)
    registers = re.search(r"Used (\d+) registers", built.log)
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", built.log))
    return Record(
        plan,
        arch,
        str(built.path),
        time.perf_counter() - start,
        built.cached,
        int(registers.group(1)) if registers else None,
        None if built.cached else spilled,
    )


def build_all(plans, arch: str, jobs: int, worker=build) -> Iterator[Record | Exception]:
    """Build plans in up to ``jobs`` processes, in this one if that is 1.

    Yields the Record of each different plan, or the exception that `jit.build` raised, as it is
    done: the cached ones first, then in any order. A worker that is killed (by a machine short of
    memory, say) takes its pool with it: what is missing then goes to a new pool of half the size,
    in the end to this process.
    """
    plans = list(dict.fromkeys(plans))
    missing = [plan for plan in plans if not jit.is_built(plan, arch)]
    for plan in plans:
        if plan not in missing:
            yield _outcome(worker, plan, arch)
    jobs = min(jobs, len(missing), _MOST_WORKERS)
    while jobs > 1:
        done = set()
        for plan, outcome in _pooled(missing, arch, jobs, worker):
            done.add(plan)
            yield outcome
        missing = [plan for plan in missing if plan not in done]
        jobs = min(jobs // 2, len(missing))
    for plan in missing:
        yield _outcome(worker, plan, arch)


def _outcome(worker, plan: Plan, arch: str):
    try:
        return worker(plan, arch)
    except Exception as error:
        return error


def _pooled(plans, arch: str, jobs: int, worker):
    """(plan, outcome) of the plans that a pool finishes: all, unless one of its workers dies."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_ignore_interrupt)
    try:
        futures = {pool.submit(_outcome, worker, plan, arch): plan for plan in plans}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        pass
    finally:
        pool.shutdown(cancel_futures=True)


def _ignore_interrupt() -> None:
    # Ctrl-C reaches workers, too: they end their kernel.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Listing:
    """A home of arrays whose backend lists kernels instead of launching them."""

    def __init__(self, home):
        self._home, self.plans = home, []
        self.backend = self

    def __getattr__(self, name):
        return getattr(self._home, name)

    def forward(self, *arguments, **keywords) -> None:
        from . import launch

        self.plans += launch.plans_of(*arguments, **keywords)

    def backward(self, *arguments, **keywords) -> None:
        from . import launch_backward

        self.plans += launch_backward.plans_of(*arguments, **keywords)


def plans_of_call(
    dout, q, k, v, options: dict, need=edge.GRADIENTS, deterministic=True
) -> list[Plan]:
    """The kernels of `cuflash.attention` and of its gradients; the arrays' contents do not matter.

    options are the keywords of `cuflash.attention`, except `out` and `return_lse`.
    """
    shaping, scores = edge.split_options("plans_of_call", options)
    operands = {"dout": dout, "q": q, "k": k, "v": v}
    home = home_of(list(operands.items()))
    with home.scope():
        listing = _Listing(home)
        edge.forward(listing, q, k, v, None, False, shaping, scores)
        out, lse = edge.forward(listing, q, k, v, None, True, shaping, scores)
        operands |= {"out": out, "lse": lse}
        wanted = [name in need for name in edge.ALL_GRADIENTS]
        edge.backward(listing, operands, wanted, deterministic, shaping, scores)
    return listing.plans
