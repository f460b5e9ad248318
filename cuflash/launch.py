"""Runs plans on CuPy arrays: forward, merge and explain here, backward in launch_backward.py.

Outputs, workspaces and the order of kernels, all on the current device and its current stream.
Workspaces come from CuPy's pool, which hands memory out again on the stream that freed it: so it
may be freed here while kernels are still to run.
"""

from __future__ import annotations

import math

import cupy

from . import jit
from .families import Access, choose
from .launch_backward import backward
from .launch_steps import (
    BATCH_DIMS,
    Step,
    all_strides,
    band_values,
    check_aligned,
    device_facts,
    key_of,
    outer,
    pack_narrow,
    pointer,
    prepared,
    scale_log2,
    section_values,
    shape_values,
    width,
)
from .plan import round_up

__all__ = ["backward", "device_facts", "explain", "forward", "merge"]

MAX_COMBINE_BLOCKS = 65536  # each loops over its rows


def _forward_step(problem, device, q, k, v, out, lse, tile=None) -> Step:
    whole = width(out) == 16 and problem.head_dim_v % (16 // out.itemsize) == 0
    access = Access(min(width(a) for a in (q, k, v)), 16 if whole else 0)
    family, _ = choose(problem, device)
    plan = family.forward_plan(problem, device, access, tile=tile)
    blocks = -(-problem.seqlen_q // plan["kBlockM"])
    heads = problem.num_heads * math.prod(problem.batch)
    key_bytes = (
        problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * q.itemsize // problem.group
    )
    return Step.of(
        plan,
        blocks * plan["kSlices"] * heads,
        *all_strides(problem, q, k, v, out, lse),
        *shape_values(problem, blocks),
        *section_values(problem, device, heads, key_bytes),
        *band_values(problem),
        scale_log2(problem),
        0,  # stats_pitch and lse_threshold: of the statistics pass
        0.0,
    )


def forward(problem, q, k, v, out, lse, tile=None) -> None:
    """Attention forward.

    Parameters
    ----------
    problem : Problem
    q, k, v : cupy.ndarray (*batch, Hq, L, D), (*batch, Hkv, S, D), (*batch, Hkv, S, Dv)
    out : cupy.ndarray (*batch, Hq, L, Dv)
    lse : cupy.ndarray (*batch, Hq, L) or None
    tile : families' Tile, optional
        In place of the one the family would choose.

    Raises
    ------
    ValueError
        Elements that do not lie on multiples of their size.
    NotImplementedError
        No kernel for this device, or more thread blocks than a launch can have.
    CompileError, OSError
        As :func:`cuflash.jit.build`.
    """
    if len(problem.batch) > BATCH_DIMS:
        for inner, arrays in outer(problem, (q, k, v, out, lse)):
            forward(inner, *arrays, tile)
        return
    device_id = q.data.device_id

    def make():
        check_aligned(q=q, k=k, v=v, out=out, lse=lse)
        read = pack_narrow(problem, q, k, v)
        step = _forward_step(problem, device_facts(device_id), *read, out, lse, tile)
        return step, any(a is not b for a, b in zip(read, (q, k, v)))

    key = (problem, device_id, tile, key_of((q, k, v, out, lse)))
    step, narrow = prepared(key, make)
    read = pack_narrow(problem, q, k, v) if narrow else (q, k, v)
    step.launch(device_id, *(pointer(a) for a in (*read, out, lse)), 0)


def merge(outs, lses, out, lse) -> None:
    """Attention over the union of the keys from attention over parts of them.

    Parameters
    ----------
    outs : list of cupy.ndarray (..., Dv)
    lses : list of cupy.ndarray (...)
    out, lse : cupy.ndarray of the same shapes
    """
    from .families import portable

    if out.size == 0:
        return
    plan = portable.combine_plan(out.dtype.name)
    all_outs = cupy.empty((len(outs), *out.shape), out.dtype)
    all_lses = cupy.empty((len(lses), *lse.shape), lse.dtype)
    for n, (part, part_lse) in enumerate(zip(outs, lses)):
        all_outs[n], all_lses[n] = part, part_lse
    whole_out = out if out.flags.c_contiguous else cupy.empty(out.shape, out.dtype)
    whole_lse = lse if lse.flags.c_contiguous else cupy.empty(lse.shape, lse.dtype)
    blocks = min(-(-lse.size // plan["kWarps"]), MAX_COMBINE_BLOCKS)
    step = Step.of(plan, blocks, lse.size, len(outs), out.shape[-1])
    step.launch(
        out.data.device_id, *(a.data.ptr for a in (all_outs, all_lses, whole_out, whole_lse))
    )
    if whole_out is not out:
        out[...] = whole_out
    if whole_lse is not lse:
        lse[...] = whole_lse


def explain(problem, q, k, v):
    """Which kernel forward would run and why: an :class:`cuflash.explanation.Explanation`, or a str
    where none runs.
    """
    from .explanation import Explanation

    device_id = q.data.device_id
    device = device_facts(device_id)
    family, rejections = choose(problem, device)
    rows = math.prod(problem.batch) * problem.num_heads * problem.seqlen_q
    if rows == 0 or problem.seqlen_k == 0:
        return f"no kernel on {device.name}: without queries or keys the result is a constant"
    if len(problem.batch) > BATCH_DIMS:  # one of the launches that run in turn
        problem, (q, k, v) = next(outer(problem, (q, k, v)))
    check_aligned(q=q, k=k, v=v)
    read = pack_narrow(problem, q, k, v)
    shape = (*problem.batch, problem.num_heads, problem.seqlen_q, problem.head_dim_v)
    step = _forward_step(problem, device, *read, cupy.empty(shape, q.dtype), None)
    attributes = jit.attributes(jit.kernel(step.plan, device_id))
    item = 8 if problem.dtype == "float64" else 4
    return Explanation(
        device.name,
        family.NAME,
        step.plan,
        step.blocks,
        attributes["registers"],
        attributes["local_bytes"],
        tuple(name for name, a, b in zip("qkv", read, (q, k, v)) if a is not b),
        tuple(rejections),
        rows * item * (3 + round_up(problem.head_dim, 16)),
    )
