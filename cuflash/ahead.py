"""Builds kernels ahead of their first call, on machines with or without a GPU."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from . import jit
from .families import Access, Device, choose, device_of
from .plan import CPP_TYPES, Plan
from .problem import Band, Problem


@dataclass(frozen=True)
class Record:
    """What became of one kernel: print it, or read its fields."""

    plan: Plan
    arch: str
    path: str
    seconds: float
    cached: bool
    registers: int | None  # None when the cubin was cached: the compiler was not asked
    spilled_bytes: int | None

    def __str__(self) -> str:
        how = "cached" if self.cached else f"{self.registers} registers, {self.spilled_bytes} bytes spilled"
        values = dict(self.plan.constants)
        dims = f"head_dim {values['kHeadDim']}, {values['kHeadDimV']}" if "kHeadDim" in values else "any head_dim"
        band = ", band" if values.get("kBand") else ""
        return f"{self.plan.kernel} {self.arch} {values['Element']} {dims}{band}: {how}, {self.seconds:.2f} s"


def _parse(arch: str | None) -> tuple[str, Device]:
    if arch is None:
        import cupy

        from .launch import device_facts

        device = device_facts(cupy.cuda.runtime.getDevice())
        return jit.architecture(device.capability // 10, device.capability % 10), device
    match = re.fullmatch(r"sm_(\d{2,3})a?", arch) if isinstance(arch, str) else None
    if match is None:
        raise ValueError(f"arch: {arch!r} is not the name of an architecture, such as 'sm_80' or 'sm_90a'")
    device = device_of(int(match.group(1)))
    return ("sm_90a" if device.capability == 90 else arch), device


def plans_of(problem: Problem, device: Device, backward: bool) -> list[Plan]:
    """Every kernel that contiguous arrays of a problem use, forward and backward, the latter in both orders."""
    piece = 16 // {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[problem.dtype]
    aligned = problem.head_dim % piece == 0 and problem.head_dim_v % piece == 0
    access = Access(16, 16) if aligned else Access(0, 0)
    family, _ = choose(problem, device)
    plans = [family.forward_plan(problem, device, access)]
    if backward:
        plans.append(family.forward_plan(problem, device, access, stats=True))
        plans.append(family.delta_plan(problem, vector=aligned, dlse=False))
        for deterministic in (True, False):
            plans.append(family.backward_plan(problem, device, access, need_dq=True, need_dkv=True,
                                              deterministic=deterministic))
        plans.append(family.cast_plan(problem, plans[-1], pair_store=aligned))
    return plans


def build(plan: Plan, arch: str) -> Record:
    """Build one plan into the cache."""
    start = time.perf_counter()
    built = jit.build(plan, arch)
    registers = re.search(r"Used (\d+) registers", built.log)
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", built.log))
    return Record(plan, arch, str(built.path), time.perf_counter() - start, built.cached,
                  int(registers.group(1)) if registers else None, None if built.cached else spilled)


def compile_ahead(arch=None, dtypes=("float16", "bfloat16"), head_dims=(64, 128), head_dims_v=None,
                  causal=(False, True), backward=True, progress=None) -> list[Record]:
    """See :func:`cuflash.compile`."""
    name, device = _parse(arch)
    head_dims = list(head_dims)
    values = head_dims if head_dims_v is None else list(head_dims_v)
    if len(values) != len(head_dims):
        raise ValueError(f"head_dims_v: {len(values)} values for {len(head_dims)} head_dims; one for each is needed")
    for dtype in dtypes:
        if dtype not in CPP_TYPES:
            raise ValueError(f"dtypes: {dtype!r} is not one of {', '.join(CPP_TYPES)}")
    for which, dims in (("head_dims", head_dims), ("head_dims_v", values)):
        for dim in dims:
            if not isinstance(dim, int) or isinstance(dim, bool):
                raise TypeError(f"{which}: {dim!r} is not an int")
            if not 1 <= dim <= 256:
                raise ValueError(f"{which}: {dim} is not from 1 to 256")
    records, seen = [], set()
    for dtype in dtypes:
        for head_dim, head_dim_v in zip(head_dims, values):
            for banded in causal:
                band = Band(-1024, 0) if banded else None
                problem = Problem(dtype, (1,), 1, 1, 1024, 1024, head_dim, head_dim_v, head_dim**-0.5, band)
                for plan in plans_of(problem, device, backward):
                    if plan in seen:
                        continue
                    seen.add(plan)
                    records.append(build(plan, name))
                    if progress is not None:
                        progress(records[-1])
    return records
