"""The compile gates' common part: which kernels a run builds, on two processes, and what the
compiler may say about them. No GPU is needed, only NVRTC.

Every gate lists the kernels that it stands for. By default a run builds a sample of each list, so
that the suite takes minutes; `--gate=lists` builds every kernel of every list (about ten minutes on
two cores), `--gate=product` the whole product of test_compile.py besides (hours).
"""

from __future__ import annotations

import multiprocessing
import random
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest

from cuflash import jit
from cuflash.plan import Plan

WORKERS = 2
CPU_SECONDS = 10  # of the compiler for one kernel; most take 1 to 4
EXTENTS = ("sample", "lists", "product")

Job = tuple[str, Plan, str]  # a name for reports, what to build, the architecture


@dataclass(frozen=True)
class Built:
    """What the compiler said about one kernel."""

    name: str
    registers: int
    spilled: int
    warnings: tuple[str, ...]
    cpu_seconds: float
    error: str = ""

    def faults(self, may_spill: bool = False, excused: str | None = None) -> list[str]:
        """``excused``: what notes may say that are no faults."""
        found = [x for x in self.warnings if excused is None or excused not in x]
        found = [self.error] if self.error else found
        if self.spilled > 0 and not may_spill:
            found.append(f"{self.spilled} bytes spilled at {self.registers} registers")
        if self.cpu_seconds > CPU_SECONDS:
            found.append(f"{self.cpu_seconds:.1f} s to compile")
        return found


def compile_one(job: Job) -> Built:
    """In a worker process. The cache is not used: a file in it has no log."""
    name, plan, arch = job
    text = jit.translation_unit(plan)
    start = time.process_time()
    try:
        log = jit.compile_text(text, plan.kernel, arch)[1]
    except jit.CompileError as error:
        return Built(name, 0, 0, (), time.process_time() - start, f"{plan}: {error}"[:2000])
    seconds = time.process_time() - start
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        return Built(name, 0, 0, (), seconds, f"the compiler's log names no registers: {log[:500]}")
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", log))
    lines = [line.strip() for line in log.splitlines()]
    warnings = tuple(x for x in lines if re.search(r"warning|performance|C75\d\d", x, re.IGNORECASE))
    return Built(name, int(registers.group(1)), spilled, warnings, seconds)


class Gate:
    """Builds kernels; its processes start with the first and serve every gate of a run."""

    def __init__(self, extent: str):
        self.extent = extent
        self._pool = None

    def build(self, jobs: Iterable[Job], sample: int | None = None,
              progress: Callable | None = None) -> list[Built]:  # fmt: skip
        """Build equal kernels once. ``sample``: how many of them a run builds that is not asked for
        more, the same in every run.
        """
        once = {}
        for name, plan, arch in jobs:
            once.setdefault((plan, arch), (name, plan, arch))
        chosen = list(once.values())
        if sample is not None and self.extent == "sample":
            chosen = random.Random(0).sample(chosen, min(sample, len(chosen)))
        if self._pool is None:
            # spawn: a process that has started CUDA must not be forked.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(WORKERS, mp_context=context)
        results = []
        for built in self._pool.map(compile_one, chosen):
            results.append(built)
            if progress is not None:
                progress(built, len(results), len(chosen))
        return results

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def check(results: list[Built], may_spill: bool = False, excused: str | None = None) -> None:
    """Fail if the compiler found fault with any, and say which and why."""
    assert results
    slowest = sorted(results, key=lambda built: -built.cpu_seconds)[:5]
    total = sum(built.cpu_seconds for built in results)
    print(f"{len(results)} kernels in {total:.0f} s of CPU time; the slowest:")
    for built in slowest:
        print(f"  {built.cpu_seconds:5.1f} s  {built.registers} registers  {built.name}")
    found = [(built.name, built.faults(may_spill, excused)) for built in results]
    bad = [f"{name}: {'; '.join(faults)}" for name, faults in found if faults]
    if bad:
        pytest.fail(f"{len(bad)} of {len(results)} kernels:\n" + "\n".join(bad), pytrace=False)
