"""Builds kernels ahead of their first call, on machines with or without a GPU."""

from __future__ import annotations

import itertools
import re

from . import jit, tensormap
from .families import Access, Device, choose, device_of, portable
from .plan import CPP_TYPES, ITEM_BYTES, Plan
from .prebuild import Record, build_all
from .problem import Band, Problem

# Lengths that every tile divides, and that none does, with many keys and with few (families/sm90.py
# has tiles for these): without a band it is compiled in whether a sequence ends inside a block.
LENGTHS = (16 * 720_720, 16 * 720_720 + 1, 768, 1000, 384)


def _parse(arch: str | None) -> tuple[str, Device]:
    if arch is None:
        import cupy

        from .launch_steps import device_facts

        device = device_facts(cupy.cuda.runtime.getDevice())
        return jit.architecture(device.capability // 10, device.capability % 10), device
    match = re.fullmatch(r"sm_(\d{2,3})a?", arch) if isinstance(arch, str) else None
    if match is None:
        raise ValueError(
            f"arch: {arch!r} is not the name of an architecture, such as 'sm_80' or 'sm_90a'"
        )
    device = device_of(int(match.group(1)))
    # As the device itself would ask for: no call looks for files of another name.
    return jit.architecture(*divmod(device.capability, 10)), device


def contiguous_accesses(problem: Problem, backward: bool) -> list[Access]:
    """How launch.py reaches contiguous arrays, the widest loads last. Narrow inputs are packed
    where there are many scores, so that both occur.
    """
    item = ITEM_BYTES[problem.dtype]

    def width(dim: int) -> int:
        return next((w for w in (16, 8, 4) if dim * item % w == 0 and w >= item), 0)

    rows, rows_v = width(problem.head_dim), width(problem.head_dim_v)
    store = 16 if rows_v == 16 and (rows == 16 or not backward) else 0
    accesses = [Access(16, store, tensormap.missing())]
    if min(rows, rows_v) < 16:
        accesses.insert(0, Access(min(rows, rows_v), store, "rows that do not start on 16 bytes"))
    return accesses


def plans_of(problem: Problem, device: Device, backward: bool) -> list[Plan]:
    """Every kernel of a problem's contiguous arrays; backward in both orders, for all gradients."""
    plans = []
    for access in contiguous_accesses(problem, False):
        family, _ = choose(problem, device, access, "forward")
        plans.append(family.forward_plan(problem, device, access))
    if not backward:
        return plans
    item = ITEM_BYTES[problem.dtype]
    vector = problem.head_dim_v * item % 16 == 0
    plans.append(portable.delta_plan(problem, vector=vector, dlse=False))
    whole = problem.head_dim * item % 16 == 0
    for access in contiguous_accesses(problem, True):
        family, _ = choose(problem, device, access, "backward")
        plans.append(portable.forward_plan(problem, device, access, stats=True))
        for deterministic in (True, False):
            main = family.backward_plan(
                problem, device, access, need_dq=True, need_dkv=True, deterministic=deterministic
            )
            plans += [main, portable.cast_plan(problem, main, whole=whole)]
    return plans


def _check(dtypes, head_dims, head_dims_v, causal) -> None:
    """The arguments of :func:`cuflash.compile`, already sequences."""
    if len(head_dims_v) != len(head_dims):
        counts = f"{len(head_dims_v)} values for {len(head_dims)} head_dims"
        raise ValueError(f"head_dims_v: {counts}; one for each is needed")
    for dtype in dtypes:
        if dtype not in CPP_TYPES:
            raise ValueError(f"dtypes: {dtype!r} is not one of {', '.join(CPP_TYPES)}")
    for which, dims in (("head_dims", head_dims), ("head_dims_v", head_dims_v)):
        for dim in dims:
            if not isinstance(dim, int) or isinstance(dim, bool):
                raise TypeError(f"{which}: {dim!r} is not an int")
            if not 1 <= dim <= 256:
                raise ValueError(f"{which}: {dim} is not from 1 to 256")
    for banded in causal:
        if not isinstance(banded, bool):
            raise TypeError(f"causal: {banded!r} is not a bool")


def _sequence(name: str, value) -> list:
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name}={value!r}: it must be a sequence, such as ({value!r},)")
    return list(value)


def compile_ahead(
    arch, dtypes, head_dims, head_dims_v, causal, backward, progress, jobs=1
) -> list[Record]:
    """See :func:`cuflash.compile`, which has the defaults.

    More than one of ``jobs``, the processes that build, is for programs whose main module may be
    imported again, as that of the command line.
    """
    dtypes, head_dims = _sequence("dtypes", dtypes), _sequence("head_dims", head_dims)
    values = head_dims if head_dims_v is None else _sequence("head_dims_v", head_dims_v)
    causal = _sequence("causal", causal)
    _check(dtypes, head_dims, values, causal)
    name, device = _parse(arch)
    plans = []
    for dtype, (head_dim, head_dim_v), banded in itertools.product(
        dtypes, zip(head_dims, values), causal
    ):
        for length in LENGTHS:
            problem = Problem(
                dtype=dtype,
                batch=(1,),
                num_heads=1,
                num_kv_heads=1,
                seqlen_q=length,
                seqlen_k=length,
                head_dim=head_dim,
                head_dim_v=head_dim_v,
                scale=head_dim**-0.5,
                band=Band(-length, 0) if banded else None,
            )
            plans += plans_of(problem, device, backward)
    records = []
    for outcome in build_all(plans, name, jobs):
        if isinstance(outcome, Exception):
            raise outcome
        records.append(outcome)
        if progress is not None:
            progress(outcome)
    return records
