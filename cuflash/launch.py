"""Runs plans on CuPy arrays: outputs, workspaces and the order of kernels, on the current device and stream.

Arrays come as (*batch, H, L, D) views of any strides. What does not change between two calls on arrays of the same
shapes and strides, all of the choice and nearly all of the parameters, is prepared once and kept (`_prepared`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import cupy
import numpy as np

from . import jit
from .families import Access, Device, choose
from .params import BATCH_DIMS, layout
from .plan import ITEM_BYTES, Plan, round_up

MAX_BLOCKS = 2**31 - 1  # of a grid
LOG2E = 1.4426950408889634

# Where |lse| is above this, float rounding of lse would cost exp(s - lse) accuracy that the dtype has: backward then
# computes the row's maximum and sum again (kStats in fwd_portable.cu). Half an ulp of lse is |lse| * 2**-25.
# With the wide types that is every row.
LSE_THRESHOLD = {"float16": 512.0, "bfloat16": 512.0, "float32": -1.0, "float64": -1.0}

# Below this many scores a kernel that reads elements one by one costs less than packing its inputs first.
PACK_SCORES = 1 << 20


@lru_cache(maxsize=None)
def device_facts(device_id: int) -> Device:
    """The facts of a device that plans depend on."""
    attributes = cupy.cuda.Device(device_id).attributes
    capability = int(cupy.cuda.Device(device_id).compute_capability)
    name = cupy.cuda.runtime.getDeviceProperties(device_id)["name"].decode()
    return Device(
        capability,
        attributes["MaxSharedMemoryPerBlockOptin"],
        attributes["MaxSharedMemoryPerMultiprocessor"],
        attributes["MultiProcessorCount"],
        attributes["L2CacheSize"],
        name,
    )


def _width(array) -> int:
    """Widest piece (16, 8 or 4 bytes) at which every row of the array can be read; 0 when none fits."""
    item = array.itemsize
    if array.shape[-1] > 1 and array.strides[-1] != item:
        return 0
    bits = array.data.ptr
    for size, stride in zip(array.shape[:-1], array.strides[:-1]):
        if size > 1:
            bits |= stride
    for width in (16, 8, 4):
        if bits % width == 0 and width >= item:
            return width
    return 0


def _packed(array):
    """A copy whose rows start on 16 bytes; broadcast axes stay broadcast."""
    head = tuple(slice(0, 1) if stride == 0 and size > 1 else slice(None)
                 for size, stride in zip(array.shape[:-1], array.strides[:-1]))
    small = array[head]
    per_piece = 16 // array.itemsize
    room = cupy.empty((*small.shape[:-1], round_up(array.shape[-1], per_piece)), array.dtype)
    room[..., : array.shape[-1]] = small
    return cupy.broadcast_to(room[..., : array.shape[-1]], array.shape)


def _strides(array, batch_axes: int) -> list[int]:
    """Element strides as the struct Strides: batch axes, head, row, col; missing batch axes first, as 0."""
    item = array.itemsize
    strides = [0 if size == 1 else stride // item for size, stride in zip(array.shape, array.strides)]
    strides = [0] * (BATCH_DIMS - batch_axes) + strides
    return strides + [0] * (BATCH_DIMS + 3 - len(strides))  # an lse has no col


def _shape_values(problem, blocks: int) -> list[int]:
    sizes = [1] * (BATCH_DIMS - len(problem.batch)) + list(problem.batch)
    return [*sizes, problem.num_heads, problem.group, problem.seqlen_q, problem.seqlen_k, problem.head_dim,
            problem.head_dim_v, blocks]


def _band_values(problem) -> list[int]:
    return [0, 0] if problem.band is None else [problem.band.lo, problem.band.hi]


def _section_values(problem, device, heads: int, head_bytes: int) -> list[int]:
    """How many heads start their blocks together, and how many of all heads make whole sections (attn/work.cuh)."""
    if problem.band is None:
        return [1, heads]
    section = min(heads, max(1, device.l2_bytes * 3 // 4 // max(1, head_bytes)))
    return [section, heads // section * section]


def _scale_log2(problem) -> float:
    """|scale| * log2(e); never 0, since 0 times a hidden score's -inf is NaN. The sign is in the plan."""
    if problem.scale == 0:
        return 1.0
    tiny = float(np.finfo(problem.lse_dtype).tiny)
    return max(abs(problem.scale) * LOG2E, tiny)


@dataclass(frozen=True)
class Step:
    """One kernel with everything but its pointers."""

    plan: Plan
    table: str
    rest: bytes
    blocks: int

    def __post_init__(self):
        if self.blocks > MAX_BLOCKS:
            raise NotImplementedError(
                f"{self.plan.kernel} would need {self.blocks} thread blocks; a launch has at most {MAX_BLOCKS}")

    def launch(self, device_id: int, *pointers: int) -> None:
        function = jit.kernel(self.plan, device_id)
        scalar = layout(self.table).scalar(self.rest, *pointers)
        function((self.blocks,), (self.plan.threads,), (scalar,), self.plan.smem_bytes)


def _key(arrays) -> tuple:
    """What two calls must share to share their preparation: strides, and how well pointers are aligned."""
    return tuple([None if a is None else (a.strides, a.data.ptr & 15) for a in arrays])


_prepared: dict = {}
_PREPARED_LIMIT = 4096


def _prepare(key, make):
    found = _prepared.get(key)
    if found is None:
        if len(_prepared) >= _PREPARED_LIMIT:
            _prepared.clear()
        found = _prepared[key] = make()
    return found


def _pack_narrow(problem, *arrays):
    """The arrays, those that kernels could only read in narrow pieces packed where that pays."""
    scores = math.prod(problem.batch) * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    if scores < PACK_SCORES:
        return arrays
    return tuple(a if _width(a) == 16 else _packed(a) for a in arrays)


def _outer(problem, arrays):
    """Calls with more leading axes than a kernel takes run once for each index of the first ones."""
    from dataclasses import replace

    extra = len(problem.batch) - BATCH_DIMS
    inner = replace(problem, batch=problem.batch[extra:])
    for index in np.ndindex(*problem.batch[:extra]):
        yield inner, [None if a is None else a[index] for a in arrays]


# ---- forward ---------------------------------------------------------------------------------------------------------


def _forward_step(problem, device, q, k, v, out, lse, tile=None) -> Step:
    whole = _width(out) == 16 and problem.head_dim_v % (16 // out.itemsize) == 0
    access = Access(min(_width(a) for a in (q, k, v)), 16 if whole else 0)
    family, _ = choose(problem, device)
    plan = family.forward_plan(problem, device, access, tile=tile)
    batch_axes = len(problem.batch)
    blocks = -(-problem.seqlen_q // plan["kBlockM"])
    values = []
    for array in (q, k, v, out):
        values += _strides(array, batch_axes)
    values += [0] * (BATCH_DIMS + 3) if lse is None else _strides(lse, batch_axes)
    heads = problem.num_heads * math.prod(problem.batch)
    key_bytes = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * q.itemsize // problem.group
    values += _shape_values(problem, blocks) + _section_values(problem, device, heads, key_bytes)
    values += _band_values(problem) + [_scale_log2(problem), 0, 0.0]
    total = blocks * plan["kSlices"] * heads
    return Step(plan, "forward", layout("forward").rest(*values), total)


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
    """
    if len(problem.batch) > BATCH_DIMS:
        for inner, arrays in _outer(problem, (q, k, v, out, lse)):
            forward(inner, *arrays, tile)
        return
    device_id = q.data.device_id
    key = (problem, device_id, tile, _key((q, k, v, out, lse)))
    entry = _prepared.get(key)
    if entry is None:
        packed = _pack_narrow(problem, q, k, v)
        step = _forward_step(problem, device_facts(device_id), *packed, out, lse, tile)
        entry = _prepare(key, lambda: (step, any(a is not b for a, b in zip(packed, (q, k, v)))))
    step, narrow = entry
    if narrow:
        q, k, v = _pack_narrow(problem, q, k, v)
    step.launch(device_id, q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr, 0 if lse is None else lse.data.ptr, 0)


# ---- backward --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Backward:
    """The kernels of one backward pass and their workspaces."""

    delta: Step
    stats: Step
    main: Step
    cast: Step | None
    rows: int  # batch * heads
    stats_pitch: int
    accum_values: int
    flag_count: int


def _backward_steps(problem, device, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, tile) -> _Backward:
    family, _ = choose(problem, device)
    item = ITEM_BYTES[problem.dtype]
    batch_axes, rows = len(problem.batch), math.prod(problem.batch) * problem.num_heads
    piece = 16 // item

    def wide(array, dim):
        return array is None or (_width(array) == 16 and dim % piece == 0)

    load = Access(min(_width(a) for a in (q, k, v, dout)),
                  16 if wide(dk, problem.head_dim) and wide(dv, problem.head_dim_v) else 0)
    need_dkv = dk is not None or dv is not None
    plan = family.backward_plan(problem, device, load, need_dq=dq is not None, need_dkv=need_dkv,
                                deterministic=deterministic, tile=tile)
    block_m, block_n = plan["kBlockM"], plan["kBlockN"]
    num_m_blocks, num_n_blocks = -(-problem.seqlen_q // block_m), -(-problem.seqlen_k // block_n)
    stats_pitch = round_up(problem.seqlen_q, max(block_m, 32))
    accum_pitch = num_m_blocks * block_m * plan["kAccumTiles"] * 8

    def strides(*arrays):
        none = [0] * (BATCH_DIMS + 3)
        return [x for a in arrays for x in (none if a is None else _strides(a, batch_axes))]

    delta_plan = family.delta_plan(problem, vector=wide(out, problem.head_dim_v) and wide(dout, problem.head_dim_v),
                                   dlse=dlse is not None)
    delta_blocks = -(-stats_pitch // delta_plan["kBlockRows"])
    delta = Step(delta_plan, "delta", layout("delta").rest(
        *strides(out, dout, lse, dlse), *_shape_values(problem, delta_blocks), stats_pitch), delta_blocks * rows)

    stats_plan = family.forward_plan(problem, device, load, stats=True)
    stats_blocks = -(-problem.seqlen_q // stats_plan["kBlockM"])
    stats = Step(stats_plan, "forward", layout("forward").rest(
        *strides(q, k, v, None, lse), *_shape_values(problem, stats_blocks), 1, rows, *_band_values(problem),
        _scale_log2(problem), stats_pitch, LSE_THRESHOLD[problem.dtype]), stats_blocks * stats_plan["kSlices"] * rows)

    # What the blocks of one key/value head stream through: q, dout and dq_accum of its group.
    query_bytes = problem.group * problem.seqlen_q * (
        (problem.head_dim + problem.head_dim_v) * item + problem.head_dim * max(item, 4))
    main = Step(plan, "backward", layout("backward").rest(
        *strides(q, k, v, dout, dk, dv), *_shape_values(problem, num_n_blocks),
        *_section_values(problem, device, rows // problem.group, query_bytes), *_band_values(problem),
        _scale_log2(problem), problem.scale, stats_pitch, accum_pitch, num_m_blocks),
        num_n_blocks * plan["kSlices"] * (rows // problem.group))

    cast = None
    if dq is not None:
        pairs = _width(dq) >= 2 * item or (_width(dq) == 4 and item == 2)
        cast_plan = family.cast_plan(problem, plan, pair_store=pairs)
        cast_blocks = -(-problem.seqlen_q // cast_plan["kBlockRows"])
        cast = Step(cast_plan, "cast", layout("cast").rest(
            *strides(dq), *_shape_values(problem, cast_blocks), problem.scale, accum_pitch), cast_blocks * rows)
    warps = plan["kDqWarpsM"] * plan["kDqWarpsD"]
    return _Backward(delta, stats, main, cast, rows, stats_pitch, rows * accum_pitch,
                     rows * plan["kSlices"] * num_m_blocks * warps)


def backward(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, tile=None) -> None:
    """Attention backward by recomputation.

    Parameters
    ----------
    problem : Problem
    dout, out : cupy.ndarray (*batch, Hq, L, Dv)
    q, k, v : as in :func:`forward`
    lse, dlse : cupy.ndarray (*batch, Hq, L); dlse may be None
    dq, dk, dv : cupy.ndarray or None
        Shaped as q, k, v; written fully where given.
    deterministic : bool
        Sum dq over blocks of keys in a fixed order.
    tile : families' Tile, optional
    """
    if len(problem.batch) > BATCH_DIMS:
        for inner, arrays in _outer(problem, (dout, q, k, v, out, lse, dlse, dq, dk, dv)):
            backward(inner, *arrays, deterministic, tile)
        return
    device_id = q.data.device_id
    if (dk is None) != (dv is None):  # one kernel writes both
        dk = cupy.empty(k.shape, k.dtype) if dk is None else dk
        dv = cupy.empty(v.shape, v.dtype) if dv is None else dv
    arrays = (dout, q, k, v, out, lse, dlse, dq, dk, dv)
    dout, q, k, v = _pack_narrow(problem, dout, q, k, v)
    key = (problem, device_id, tile, deterministic, _key(arrays))
    steps = _prepare(key, lambda: _backward_steps(
        problem, device_facts(device_id), dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, tile))

    accum_type = np.float64 if problem.dtype == "float64" else np.float32
    workspace = cupy.empty(3 * steps.rows * steps.stats_pitch, accum_type)
    stats = workspace.data.ptr
    accum = flags = ticket = 0
    if dq is not None:
        accum_bytes = steps.accum_values * workspace.itemsize
        zeroed = cupy.zeros(accum_bytes // 4 + steps.flag_count + 1, np.uint32)
        accum = zeroed.data.ptr
        flags, ticket = accum + accum_bytes, accum + accum_bytes + 4 * steps.flag_count

    def pointer(array):
        return 0 if array is None else array.data.ptr

    steps.delta.launch(device_id, out.data.ptr, dout.data.ptr, lse.data.ptr, pointer(dlse), stats)
    steps.stats.launch(device_id, q.data.ptr, k.data.ptr, v.data.ptr, 0, lse.data.ptr, stats)
    steps.main.launch(device_id, q.data.ptr, k.data.ptr, v.data.ptr, dout.data.ptr, pointer(dk), pointer(dv), accum,
                      flags, ticket, stats)
    if dq is not None:
        steps.cast.launch(device_id, accum, dq.data.ptr)


# ---- merging, explaining ---------------------------------------------------------------------------------------------


def merge(outs, lses, out, lse) -> None:
    """Attention over the union of the keys from attention over parts of them.

    Parameters
    ----------
    outs : list of cupy.ndarray (..., Dv)
    lses : list of cupy.ndarray (...)
    out, lse : cupy.ndarray of the same shapes
    """
    from .families import portable

    dtype = "bfloat16" if out.dtype.name == "bfloat16" else out.dtype.name
    plan = portable.combine_plan(dtype)
    all_outs = cupy.empty((len(outs), *out.shape), out.dtype)
    all_lses = cupy.empty((len(lses), *lse.shape), lse.dtype)
    for n, (o, l) in enumerate(zip(outs, lses)):
        all_outs[n], all_lses[n] = o, l
    whole_out = out if out.flags.c_contiguous else cupy.empty(out.shape, out.dtype)
    whole_lse = lse if lse.flags.c_contiguous else cupy.empty(lse.shape, lse.dtype)
    rows = lse.size
    if rows == 0:
        return
    step = Step(plan, "combine", layout("combine").rest(rows, len(outs), out.shape[-1]),
                min(-(-rows // plan["kWarps"]), 65536))
    step.launch(out.data.device_id, all_outs.data.ptr, all_lses.data.ptr, whole_out.data.ptr, whole_lse.data.ptr)
    if whole_out is not out:
        out[...] = whole_out
    if whole_lse is not lse:
        lse[...] = whole_lse


def explain(problem, q, k, v):
    """Which kernel forward would run and why: an :class:`cuflash.explanation.Explanation`."""
    from .explanation import Explanation

    device_id = q.data.device_id
    device = device_facts(device_id)
    packed = _pack_narrow(problem, q, k, v)
    out = cupy.empty((*problem.batch, problem.num_heads, problem.seqlen_q, problem.head_dim_v), q.dtype)
    family, rejections = choose(problem, device)
    step = _forward_step(problem, device, *packed, out, None)
    function = jit.kernel(step.plan, device_id)
    attributes = jit.attributes(function)
    item = 8 if problem.dtype == "float64" else 4
    rows = math.prod(problem.batch) * problem.num_heads * problem.seqlen_q
    return Explanation(
        device.name, family.NAME, step.plan, step.blocks, attributes["registers"], attributes["local_bytes"],
        tuple(name for name, a, b in zip("qkv", packed, (q, k, v)) if a is not b), tuple(rejections),
        rows * item * (3 + round_up(problem.head_dim, 16)))
