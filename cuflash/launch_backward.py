"""Backward by recomputation on CuPy arrays: up to four kernels in a row.

delta   statistics of each row: rowsum(dout * out) - dlse, and lse
stats   the same statistics anew where float rounding of lse would spoil exp(s - lse)
main    dk, dv, and dq summed in accumulators
cast    dq from its accumulators
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cupy
import numpy as np

from . import launch_gradients as gradients
from . import launch_steps as steps
from .families import choose, portable, sm90_backward
from .launch_block_map import list_plans, list_rest, list_words
from .launch_extras import Operands
from .launch_mask_bits import as_bits
from .launch_steps import BATCH_DIMS, Step
from .plan import ITEM_BYTES, Plan, round_up
from .score_text import Options
from .tensormap import Encoder

# Where |lse| is above this, float rounding of lse would cost exp(s - lse) accuracy that the dtype
# has: backward then computes the row's maximum and sum again (kStats in fwd_portable.cu). Half an
# ulp of lse is |lse| * 2**-25. With the wide types that is every row.
LSE_THRESHOLD = {"float16": 512.0, "bfloat16": 512.0, "float32": -1.0, "float64": -1.0}


class _Arrays(NamedTuple):
    """What a backward pass reads and writes; dlse, dq, dk and dv may be None."""

    dout: Any
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    dlse: Any
    dq: Any
    dk: Any
    dv: Any


@dataclass(frozen=True)
class _Backward:
    """The kernels of one backward pass and the sizes of their workspaces."""

    delta: Step
    stats: Step
    main: Step
    cast: Step | None
    rows: int  # batch * heads
    stats_pitch: int
    accum_values: int
    accum_zeroed: bool  # whether sums begin with zero, not with a first write
    flag_count: int  # and the counter
    options: Options  # what the scores of the main kernel know of

    @property
    def steps(self) -> list[Step]:
        """In the order of their launches."""
        return [step for step in (self.delta, self.stats, self.main, self.cast) if step is not None]


def _delta_step(problem, a: _Arrays, rows: int, stats_pitch: int, num_flags: int) -> Step:
    vector = all(steps.whole_rows(x, problem.head_dim_v) for x in (a.out, a.dout))
    plan = portable.delta_plan(problem, vector=vector, dlse=a.dlse is not None)
    blocks = -(-stats_pitch // plan["kBlockRows"])
    return Step.of(
        plan,
        blocks * rows,
        *steps.all_strides(problem, a.out, a.dout, a.lse, a.dlse),
        *steps.shape_values(problem, blocks),
        stats_pitch,
        num_flags,
    )


def _stats_step(problem, plan: Plan, a: _Arrays, rows: int, stats_pitch: int, operands) -> Step:
    options = Options.of(problem, stats=True)
    blocks = -(-problem.seqlen_q // plan["kBlockM"])
    return Step.of(
        plan,
        blocks * plan["kSlices"] * rows,
        *steps.all_strides(problem, a.q, a.k, a.v, None, a.lse),
        *steps.shape_values(problem, blocks),
        1,  # every head is a section
        rows,
        *steps.band_values(problem),
        steps.scale_log2(problem, options),
        stats_pitch,
        LSE_THRESHOLD[problem.dtype],
        *operands.rest(problem, options, forward=True),
        *list_rest(problem, plan, operands),
    )


def _main_step(
    problem, device, plan: Plan, a: _Arrays, rows, stats_pitch, accum_pitch, options, operands, tile
) -> Step:
    item = ITEM_BYTES[problem.dtype]
    heads = rows // problem.group
    blocks = -(-problem.seqlen_k // plan["kBlockN"])
    # What the blocks of one key/value head stream through: q, dout and dq_accum of its group.
    row_bytes = (problem.head_dim + problem.head_dim_v) * item + problem.head_dim * max(item, 4)
    query_bytes = problem.group * problem.seqlen_q * row_bytes
    # Blocks that take turns at the rows of one head follow each other at the distance of a turn,
    # with no slack: what delays one delays all behind it. Blocks in flight that belong to several
    # heads are as many shorter queues. (Hopper's kernel starts them at different rows instead, but
    # not with a block map.)
    hopper = plan.params == "backward_sm90"
    turns = plan["kDeterministic"] and (plan["kNeedDq"] or options.squared)
    spread = hopper and problem.block_map is None
    num_m_blocks = -(-problem.seqlen_q // plan["kBlockM"])
    section = steps.section_values(problem, device, heads, query_bytes, turns and not spread)
    groups = [min(blocks, device.num_sms)] * 2
    if spread and turns and not problem.bounded:
        tile = tile or sm90_backward.tile_of(problem, options)
        size, *groups = sm90_backward.turn_groups(
            problem, tile, device.num_sms, heads, options.squared
        )
        section = [size, heads // size * size]
    elif options.squared:  # blocks of the same keys wait for each other
        size = min(section[0], device.num_sms)
        section = [size, heads // size * size]
    values = (
        *steps.shape_values(problem, blocks),
        *section,
        *steps.band_values(problem),
        steps.scale_log2(problem, options),
        problem.scale,
        stats_pitch,
        accum_pitch,
        num_m_blocks,
    )
    if hopper:
        block_m, block_n = plan["kBlockM"], plan["kBlockN"]
        return Step.of(
            plan,
            blocks * heads,
            *steps.all_strides(problem, a.q, a.k, a.dout, a.dk, a.dv),
            *values,
            *groups,
            *operands.rest(problem, options, forward=False),
            *list_rest(problem, plan, operands, backward=True),
            encoders=(
                Encoder(a.q, block_m),
                Encoder(a.k, block_n),
                Encoder(a.v, block_n),
                Encoder(a.dout, block_m),
            ),
        )
    return Step.of(
        plan,
        blocks * plan["kSlices"] * heads,
        *steps.all_strides(problem, a.q, a.k, a.v, a.dout, a.dk, a.dv),
        *values,
        *operands.rest(problem, options, forward=False),
        *list_rest(problem, plan, operands, backward=True),
    )


def _cast_step(problem, main: Plan, dq, rows: int, accum_pitch: int) -> Step:
    whole = steps.whole_rows(dq, problem.head_dim)
    plan = portable.cast_plan(problem, main, whole=whole)
    blocks = -(-problem.seqlen_q // plan["kBlockRows"])
    return Step.of(
        plan,
        blocks * rows,
        *steps.all_strides(problem, dq),
        *steps.shape_values(problem, blocks),
        *steps.band_values(problem),
        problem.scale,
        accum_pitch,
    )


def _steps(problem, device, a: _Arrays, deterministic, wanted, operands, tile) -> _Backward:
    options = Options.of(problem, gradients=wanted)
    results = ((a.dk, problem.head_dim), (a.dv, problem.head_dim_v))
    whole = all(x is None or steps.whole_rows(x, dim) for x, dim in results)
    access = steps.access_of(whole, q=a.q, k=a.k, v=a.v, dout=a.dout)
    family, _ = choose(problem, device, access, "backward", tile)
    main = family.backward_plan(
        problem,
        device,
        access,
        need_dq=a.dq is not None,
        need_dkv=a.dk is not None,
        deterministic=deterministic,
        tile=tile,
        **({"gradients": wanted} if wanted else {}),
    )
    stats = portable.forward_plan(problem, device, access, stats=True)
    block_m = main["kBlockM"]
    num_m_blocks = -(-problem.seqlen_q // block_m)
    rows = math.prod(problem.batch) * problem.num_heads
    stats_pitch = round_up(problem.seqlen_q, max(block_m, 32))
    accum_pitch = num_m_blocks * block_m * main["kAccumTiles"] * 8
    cast = None
    if a.dq is not None:
        cast = _cast_step(problem, main, a.dq, rows, accum_pitch)
    # Flags of a block of queries: one where one thread adds all of it.
    flags = 1
    if family is portable:
        flags = main["kSlices"] * main["kDqWarpsM"] * main["kDqWarpsD"]
    flag_count = rows * num_m_blocks * flags + 1 if cast else 1
    zeroed = family is portable or not main["kStoreFirst"]
    return _Backward(
        delta=_delta_step(problem, a, rows, stats_pitch, 0 if zeroed else flag_count),
        stats=_stats_step(problem, stats, a, rows, stats_pitch, operands),
        main=_main_step(
            problem, device, main, a, rows, stats_pitch, accum_pitch, options, operands, tile
        ),
        cast=cast,
        rows=rows,
        stats_pitch=stats_pitch,
        accum_values=rows * accum_pitch if cast else 0,
        accum_zeroed=zeroed,
        flag_count=flag_count,
        options=options,
    )


def backward(
    problem, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, tile=None,
    extras=None, dargs=None, dsinks=None,
) -> None:  # fmt: skip
    """Attention backward by recomputation.

    Parameters
    ----------
    problem : Problem
    dout, out : cupy.ndarray (*batch, Hq, L, Dv)
    q, k, v : as in :func:`cuflash.launch.forward`
    lse, dlse : cupy.ndarray (*batch, Hq, L); dlse may be None
    dq, dk, dv : cupy.ndarray or None
        Shaped as q, k, v; written fully where given.
    deterministic : bool
        Sum dq over blocks of keys in a fixed order.
    tile : families' Tile, optional
        In place of the one the family would choose for the main kernel.
    extras : Extras, optional
        What the problem's program, sinks, dropout and block map read.
    dargs : sequence of cupy.ndarray or None, optional
        Gradients of the program's arguments, written fully: shaped as the argument, with an axis of
        1 where a grid's entries are shared.
    dsinks : cupy.ndarray (*batch, Hq), optional
        The same for the sinks.

    Raises
    ------
    ValueError, NotImplementedError, CompileError, OSError
        As :func:`cuflash.launch.forward`.
    """
    given = _complete(dout, q, k, v, out, lse, dlse, dq, dk, dv)
    operands = Operands.of(problem, extras)
    wanted = _wanted(problem, given, dargs, tile)
    if not wanted and dsinks is None:
        _backward(problem, given, None, deterministic, wanted, operands, tile)
        return
    sums = gradients.sums_of(problem, wanted, dargs, deterministic)
    operands = replace(operands, sums=sums)
    gradients.choose_bounded_units(problem, sums, given, operands.keep_limit)
    by_sink = None
    if dsinks is not None:
        by_sink = cupy.empty(lse.shape[:-1], np.float64)
    if any(x.measuring for x in sums.values()):
        _backward(problem, given, None, deterministic, wanted, operands, tile)
        gradients.choose_measured_units(problem, sums)
        gradients.forget_bounded(sums)
        sums = {n: replace(x, measuring=False) for n, x in sums.items()}
        operands = replace(operands, sums=sums)
    _backward(problem, given, by_sink, deterministic, wanted, operands, tile)
    for n, x in sums.items():
        x.finish(dargs[n])
    if dsinks is not None:
        gradients.reduce_to(dsinks, by_sink)


def _wanted(problem, given: _Arrays, dargs, tile) -> tuple:
    """The gradients of arguments as the main kernel sums them."""
    wanted = gradients.gradients_of(problem, dargs)
    if not gradients.is_ds(problem, wanted, dargs):
        return wanted
    inputs, device_id = (given.q, given.k, given.v, given.dout), given.q.data.device_id

    def is_hoppers():
        access = steps.access_of(True, **dict(zip(("q", "k", "v", "dout"), inputs)))
        device = steps.device_facts(device_id)
        return choose(problem, device, access, "backward", tile)[0] is sm90_backward

    key = "squares", problem, device_id, tile, steps.key_of(inputs, steps.starts_of(inputs))
    return (replace(wanted[0], words=0),) if steps.prepared(key, is_hoppers) else wanted


def _backward(problem, given, by_sink, deterministic, wanted, operands, tile) -> None:
    """Every launch of a pass. ``by_sink``: what each head's sink receives, or None."""
    if len(problem.batch) > BATCH_DIMS:
        for inner, arrays, its in steps.outer(problem, (*given, by_sink), operands):
            some = _Arrays(*arrays[:-1])
            _backward(inner, some, arrays[-1], deterministic, wanted, its, tile)
        return
    device_id = given.q.data.device_id
    if problem.program is not None:
        masked = as_bits(problem, operands, given[:4], True, tile)
        masked.launch(device_id)
        problem, operands = masked.problem, masked.operands
    kernels, narrow = _ready(problem, given, deterministic, wanted, operands, tile)
    a = _packed(problem, given) if narrow else given
    _run(problem, device_id, kernels, a, operands, by_sink)


def plans_of(
    problem, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic, tile=None,
    extras=None, dargs=None, dsinks=None,
) -> list[Plan]:  # fmt: skip
    """The kernels that :func:`backward` would launch; none is built or launched.

    It takes what `backward` takes, and raises ValueError and NotImplementedError as that does.
    """
    given = _complete(dout, q, k, v, out, lse, dlse, dq, dk, dv)
    wanted = _wanted(problem, given, dargs, tile)
    operands = Operands.of(problem, extras)
    if wanted:
        sums = gradients.sums_of(problem, wanted, dargs, deterministic)
        operands = replace(operands, sums=sums)
    found = _plans_of(problem, given, operands, deterministic, wanted, tile)
    if Options.of(problem, gradients=wanted).squared:
        found += [x.step(dargs[n]).plan for n, x in operands.sums.items()]
    return found


def _plans_of(problem, given, operands, deterministic, wanted, tile):
    if len(problem.batch) > BATCH_DIMS:
        return steps.plans_of_outer(
            _plans_of, problem, given, operands, deterministic, wanted, tile
        )
    given = _Arrays(*given)
    problem, operands, first, _ = as_bits(problem, operands, given[:4], True, tile)
    kernels, _ = _ready(problem, given, deterministic, wanted, operands, tile)
    plans = [step.plan for step in kernels.steps]
    plans += list_plans(problem, kernels.stats.plan, operands)
    plans += list_plans(problem, kernels.main.plan, operands, backward=True)
    return plans if first is None else [*plans, first.plan]


def _complete(dout, q, k, v, out, lse, dlse, dq, dk, dv) -> _Arrays:
    """The arrays of a pass: one kernel writes both dk and dv, so neither is there alone; and it
    writes these where nothing of q, k and v is asked for.
    """
    if (dk is None) != (dv is None) or dq is dk is None:
        dk = cupy.empty(k.shape, k.dtype) if dk is None else dk
        dv = cupy.empty(v.shape, v.dtype) if dv is None else dv
    return _Arrays(dout, q, k, v, out, lse, dlse, dq, dk, dv)


def _packed(problem, given: _Arrays) -> _Arrays:
    return _Arrays(*steps.pack_narrow(problem, *given[:4]), *given[4:])


def _ready(problem, given: _Arrays, deterministic, wanted, operands, tile) -> tuple:
    """The kernels of a pass, prepared now or kept from an equal call, and whether inputs are packed
    first.
    """
    device_id = given.q.data.device_id

    def make():
        steps.check_aligned(**given._asdict(), **operands.arrays)
        a = _packed(problem, given)
        device = steps.device_facts(device_id)
        kernels = _steps(problem, device, a, deterministic, wanted, operands, tile)
        return kernels, any(x is not y for x, y in zip(a, given))

    shapes = steps.key_of(given, steps.starts_of(given))
    key = (problem, device_id, tile, deterministic, wanted, shapes, operands.key())
    return steps.prepared(key, make)


def _run(problem, device_id: int, kernels: _Backward, a: _Arrays, operands, by_sink) -> None:
    accum_type = np.float64 if problem.dtype == "float64" else np.float32
    workspace = cupy.empty(3 * kernels.rows * kernels.stats_pitch, accum_type)
    stats = workspace.data.ptr
    accum = flags = ticket = 0
    if kernels.cast is not None or kernels.options.squared:
        accum_bytes = kernels.accum_values * workspace.itemsize
        # Where sums begin with a write, delta sets the flags and the counter to 0.
        make = cupy.zeros if kernels.accum_zeroed else cupy.empty
        sums = make(accum_bytes // 4 + kernels.flag_count, np.uint32)
        accum = sums.data.ptr
        flags, ticket = accum + accum_bytes, accum + accum_bytes + 4 * (kernels.flag_count - 1)

    dout, q, k, v, out, lse, dlse, dq, dk, dv = steps.starts_of(a)
    kernels.delta.launch(device_id, out, dout, lse, dlse, stats, flags)
    words = operands.words(Options.of(problem, stats=True))
    words = (*words, *list_words(problem, kernels.stats.plan, operands))
    kernels.stats.launch(device_id, q, k, v, 0, lse, stats, *words)
    words = operands.words(kernels.options)
    words = (*words, *list_words(problem, kernels.main.plan, operands, backward=True))
    written = (dk, dv, accum, flags, ticket, stats, *words)
    if kernels.main.encoders:
        kernels.main.launch(device_id, q, k, dout, *written, mapped=(q, k, v, dout))
    else:
        kernels.main.launch(device_id, q, k, v, dout, *written)
    if kernels.cast is not None:
        words = steps.starts_of(operands.lengths) if kernels.cast.plan["kLengths"] else ()
        kernels.cast.launch(device_id, accum, dq, *words)
    if by_sink is not None:
        delta = workspace.reshape(kernels.rows, 3, kernels.stats_pitch)[:, 2, : problem.seqlen_q]
        by_sink[...] = gradients.sink_gradient(operands.sinks, a.lse, delta.reshape(a.lse.shape))
