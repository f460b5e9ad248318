"""What hides keys, in the form that costs a call's kernels least: lengths (spans.py), else masks as
bits or as they are.
"""

from __future__ import annotations

import math
from dataclasses import replace

import cupy
import numpy as np

from . import launch_steps as steps
from . import spans
from .families import Access, portable, sm90
from .launch_extras import Operands
from .launch_mask_bits import Masked, as_bits
from .launch_steps import Step
from .tensormap import missing, unfit


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
    key = ("spans", problem, device_id, type(tile), shapes, operands.key())
    ready = steps.prepared(key, lambda: _prepare(problem, operands, inputs, device_id, tile))
    if not ready:
        return as_bits(problem, operands, device_id, by_key)
    numbers, changed, step = ready
    made = cupy.empty((math.prod(problem.batch), 2), np.int32)
    given = [0 if n is None else operands.args[n].data.ptr for n in numbers]
    return Masked(changed, Operands(lengths=made), ((step, (*given, made.data.ptr)),), made)


def _prepare(problem, operands, inputs, device_id: int, tile):
    """(arguments, the problem without them, the kernel in front), or False where masks stay."""
    numbers = spans.lengths(problem)
    if not numbers or spans.pairs(problem) < spans.LENGTH_PAIRS:
        return False
    changed = replace(problem, program=None, lengths=True)
    if isinstance(tile, portable.Tile) or _rejected(changed, inputs, device_id):
        return False
    steps.check_aligned(**operands.arrays)
    given = [None if n is None else operands.args[n] for n in numbers]
    plan = portable.lengths_plan(*("int32" if x is None else x.dtype.name for x in given))
    count = math.prod(problem.batch)
    sizes = steps.shape_values(problem, 0)[: steps.BATCH_DIMS]
    step = Step.of(
        plan, -(-count // plan["kThreads"]), *steps.all_strides(problem, *given), *sizes,
        problem.seqlen_q, problem.seqlen_k, count,
    )  # fmt: skip
    return numbers, changed, step


def _rejected(problem, inputs, device_id: int) -> bool:
    """Whether another family than Hopper's runs the call: the only one that can do without masks."""
    packed = spans.pairs(problem) >= steps.PACK_SCORES
    unmapped = [x for x in inputs if unfit(x) and not (packed and steps.width(x) != 16)]
    access = Access(16, 16, "some" if unmapped else missing())
    return sm90.reject(problem, steps.device_facts(device_id), access) is not None
