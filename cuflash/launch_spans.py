"""What hides keys, in the form that costs a call's kernels least: lengths and segments (spans.py), else
masks as bits or as they are.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import cupy
import numpy as np

from . import launch_steps as steps
from . import spans
from .blockmap import MapView
from .families import Access, portable, sm90
from .launch_block_map import Spans
from .launch_extras import Operands
from .launch_mask_bits import Masked, as_bits
from .launch_steps import Step
from .plan import round_up
from .score_text import MAP_UNIT
from .tensormap import missing, unfit


class _Ready(NamedTuple):
    """What equal calls share."""

    problem: Any  # as its kernels see it
    numbers: tuple  # the arguments that the kernel in front reads; None for none
    step: Step
    values: tuple = ()  # of segments: as Spans has them


def hidden(problem, operands, inputs, by_key: bool, tile=None) -> Masked:
    """A call as its kernels see it.

    Parameters
    ----------
    problem : Problem
    operands : Operands
    inputs : sequence of cupy.ndarray
        All that tensor maps must describe.
    by_key : bool
        Whether backward asks.
    tile : a family's Tile, optional
        The one that was asked for.
    """
    device_id = inputs[0].data.device_id
    if problem.program is None:
        return Masked(problem, operands)
    shapes = steps.key_of(inputs, steps.starts_of(inputs))
    key = ("spans", problem, device_id, by_key, type(tile), shapes, operands.key())
    ready = steps.prepared(key, lambda: _prepare(problem, operands, inputs, by_key, tile))
    if not ready:
        return as_bits(problem, operands, device_id, by_key)
    given = [0 if n is None else operands.args[n].data.ptr for n in ready.numbers]
    if ready.problem.lengths:
        made = (cupy.empty((math.prod(problem.batch), 2), np.int32),)
        changed = Operands(lengths=made[0])
    else:
        seqlen_q, seqlen_k, _, first_key, pitch = ready.values
        ids = cupy.empty((*problem.batch, 1, pitch), np.int32)
        kinds = cupy.empty((*problem.batch, 1, pitch // 32, 2), np.int32)
        made = ids, kinds
        pairs = (*problem.batch, problem.num_heads, seqlen_q, seqlen_k)
        sides = ids[..., :seqlen_q, None], ids[..., None, first_key : first_key + seqlen_k]
        changed = Operands(
            tuple(cupy.broadcast_to(x, pairs) for x in sides),
            first_batch=operands.first_batch,
            block_map=MapView(kinds, Spans(kinds, ready.values)),
        )
    words = (*given, *(x.data.ptr for x in made))
    return Masked(ready.problem, changed, ((ready.step, words),), made)


def _prepare(problem, operands, inputs, by_key: bool, tile):
    """A _Ready, or False where masks stay."""
    numbers, name = spans.lengths(problem), "lengths"
    values = problem.seqlen_q, problem.seqlen_k, math.prod(problem.batch)
    if numbers and spans.pairs(problem) >= spans.LENGTH_PAIRS:
        changed, threads = replace(problem, program=None, lengths=True), values[-1]
    elif spans.segments(problem, by_key):
        first_key = round_up(problem.seqlen_q, 32)
        values += first_key, first_key + round_up(problem.seqlen_k, 32)
        args = tuple(replace(arg, dtype="int32") for arg in problem.program.args)
        program = replace(problem.program, args=args)
        changed = replace(problem, program=program, block_map=(MAP_UNIT, MAP_UNIT))
        numbers, name, threads = (0, 1), "spans", values[2] * values[-1]
    else:
        return False
    if isinstance(tile, portable.Tile) or _rejected(changed, inputs):
        return False
    steps.check_aligned(**operands.arrays)
    given = [None if n is None else operands.args[n] for n in numbers]
    plan = portable.given_plan(name, *("int32" if x is None else x.dtype.name for x in given))
    sizes = steps.shape_values(problem, 0)[: steps.BATCH_DIMS]
    step = Step.of(
        plan, -(-threads // plan["kThreads"]), *steps.all_strides(problem, *given), *sizes, *values
    )
    return _Ready(changed, numbers, step, values)


def _rejected(problem, inputs) -> bool:
    """Whether another family than Hopper's runs the call: the only one that can do without masks."""
    packed = spans.pairs(problem) >= steps.PACK_SCORES
    unmapped = [x for x in inputs if unfit(x) and not (packed and steps.width(x) != 16)]
    access = Access(16, 16, "some" if unmapped else missing())
    device = steps.device_facts(inputs[0].data.device_id)
    return sm90.reject(problem, device, access) is not None
