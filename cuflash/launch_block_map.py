"""Block maps on the GPU: made from masks by a kernel, and the lists that kernels walk along.

A map keeps the lists that were made of it, so that only the first call with a kernel's tile makes
them. Calls on other streams wait for that, on the GPU.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import cupy
import numpy as np

from . import launch_steps as steps
from .block_lists import Cut, lists, row_length
from .families import portable
from .launch_extras import Operands
from .launch_steps import BATCH_DIMS, Step
from .score_text import Options

_LARGEST_BLOCK = 1 << 30  # longer than any sequence; kernels have 32 bits

class _Made(NamedTuple):
    lists: Any  # cupy.ndarray of int32
    stream: int
    event: Any


class Spans(NamedTuple):
    """In place of a map, for one call: ids of segments, contiguous arrays of int32."""

    q: Any  # (*batch, L)
    k: Any  # (*batch, S)
    made: list  # lists, until the call is over

    @property
    def kinds(self):
        """As a map's, for its leading axes."""
        return self.k[..., None, None, :]

    def step(self, cut: Cut, backward: bool) -> Step:
        """The kernel that writes lists."""
        rows, count = cut.blocks[backward], self.k.size // cut.seqlen_k

        def make():
            plan = portable.span_lists_plan(cut, backward)
            band = cut.band or (-cut.seqlen_q, cut.seqlen_k)
            return Step.of(plan, count * rows, *cut[:2], *band, rows, row_length(cut, backward))

        return steps.prepared(("span lists", cut, backward, count), make)

    def lists(self, cut: Cut, backward: bool):
        shape = self.k.size // cut.seqlen_k * cut.blocks[backward], row_length(cut, backward)
        array = cupy.empty(shape, np.int32)
        self.made.append(steps.kept(array))
        given = (x.data.ptr for x in (self.q, self.k, array))
        self.step(cut, backward).launch(array.data.device_id, *given)
        return array


def cut_of(problem, plan, backward=False) -> Cut:
    """How a plan's kernel cuts a problem."""
    band, program = problem.band, problem.program
    return Cut(
        problem.seqlen_q,
        problem.seqlen_k,
        plan["kBlockM"],
        plan["kBlockN"],
        None if band is None else (band.lo, band.hi),
        program is not None and program.visible is not None,
        backward and not (plan["kDeterministic"] and plan["kNeedDq"]),
    )


# Of the two rows of block_lists.rows: what each launch writes, and the rest.


def list_words(problem, plan, operands, backward=False) -> tuple[int, ...]:
    """Where the lists are that a launch walks along; nothing without a map."""
    view = operands.block_map
    if view is None:
        return ()
    cut = cut_of(problem, plan, backward)
    array = _lists(view.owner, cut, backward)
    strides = _strides(view, cut, backward)
    skipped = sum(n * stride for n, stride in zip(view.index, strides))
    return (array.data.ptr + skipped * array.itemsize,)


def list_plans(problem, plan, operands, backward=False) -> list:
    """The kernel that writes a launch's lists, if one does."""
    owner = operands.block_map and operands.block_map.owner
    cut = cut_of(problem, plan, backward)
    return [owner.step(cut, backward).plan] if isinstance(owner, Spans) else []


def list_rest(problem, plan, operands, backward=False) -> list[int]:
    """The strides of the lists, as Strides."""
    view = operands.block_map
    if view is None:
        return []
    strides = _strides(view, cut_of(problem, plan, backward), backward)[len(view.index) :]
    return [0] * (BATCH_DIMS - len(problem.batch)) + strides


def _strides(view, cut: Cut, backward: bool) -> list[int]:
    """Of (*batch, head, block, 1) over the map's own lists, in front of the index, too."""
    own = view.owner.kinds.shape[:-2]
    axes = len(view.index) + view.kinds.ndim - 2
    row = row_length(cut, backward)
    strides, stride = [row, 1], row * cut.blocks[1 if backward else 0]
    for size in reversed((1,) * (axes - len(own)) + own):
        strides.insert(0, stride if size > 1 else 0)
        stride *= size
    return strides


def _lists(block_map, cut: Cut, backward: bool):
    """A map's lists for a kernel, made now or before."""
    if isinstance(block_map, Spans):
        return block_map.lists(cut, backward)
    stream = cupy.cuda.get_current_stream()
    number, capturing = steps.stream_id(stream), stream.is_capturing()
    found = block_map._made.get((cut, backward))
    if found is not None and found.stream == number:
        return found.lists
    if found is not None and not capturing:
        stream.wait_event(found.event)
        return found.lists
    array = steps.kept(lists(cupy, block_map.kinds, block_map.block, cut, backward))
    if not capturing:
        block_map._made[cut, backward] = _Made(array, number, stream.record())
    return array


def block_kinds(problem, extras, block, kinds) -> None:
    """Write the kinds of a call's blocks.

    Parameters
    ----------
    problem : Problem
        Its band and program hide pairs.
    extras : Extras
    block : tuple (int, int)
        Queries and keys of a block.
    kinds : cupy.ndarray of uint8 (*batch or 1, Hq or 1, query blocks, key blocks)
        Contiguous, written fully. Where it has one entry for all of an axis, the masks are the same
        along it.

    Raises
    ------
    NotImplementedError
        More blocks than a launch can have.
    """
    problem = replace(problem, sinks=False, dropout=False)  # what it has of them is not given
    inner, operands = Operands.of(problem, extras).part(problem, kinds.shape[:-2])
    _block_kinds(inner, kinds, operands, block)


def _block_kinds(problem, kinds, operands, block) -> None:
    if len(problem.batch) > BATCH_DIMS:
        for inner, (part,), its in steps.outer(problem, (kinds,), operands):
            _block_kinds(inner, part, its, block)
        return
    options = Options.of(problem)
    plan = portable.block_map_plan(problem)
    rows, columns = kinds.shape[-2:]
    step = Step.of(
        plan,
        math.prod(kinds.shape),
        *steps.shape_values(problem, rows),
        *steps.band_values(problem),
        *(min(size, _LARGEST_BLOCK) for size in block),
        columns,
        *operands.rest(problem, options, forward=True),
    )
    steps.check_aligned(**operands.arrays)
    step.launch(kinds.data.device_id, kinds.data.ptr, *operands.words(options))
