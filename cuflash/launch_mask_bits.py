"""Masks as bits on the GPU: the kernel in front of those that read them (mask_bits.py)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import cupy
import numpy as np

from . import launch_steps as steps
from . import mask_bits
from .families import portable
from .launch_steps import Step
from .plan import ITEM_BYTES
from .score_text import Options

# A graph writes these anew whenever it is launched, so that nobody else may have their memory.
_held_by_graphs: list = []


class Masked(NamedTuple):
    """A call as its kernels see it, and what must run before them."""

    problem: Any
    operands: Any
    steps: tuple = ()  # kernels in front, each with what a launch writes
    made: Any = None  # the memory that they fill

    @property
    def plans(self) -> list:
        return [step.plan for step, _ in self.steps]

    def launch(self, device_id: int) -> None:
        if self.steps and cupy.cuda.get_current_stream().is_capturing():
            _held_by_graphs.append(self.made)
        for step, words in self.steps:
            step.launch(device_id, *words)


class _Ready(NamedTuple):
    """What equal calls share."""

    problem: Any  # with bits in its masks' place
    kept: tuple[int, ...]  # the arguments that it still reads
    shape: tuple[int, ...]  # of the bits
    step: Step
    options: Options  # of the step


def as_bits(problem, operands, device_id: int, by_key: bool) -> Masked:
    """A call with its masks as bits where that pays, else as it is. ``by_key``: words hold the
    queries of a key, as backward reads them.
    """
    program = problem.program
    if program is None or program.visible is None:
        return Masked(problem, operands)
    key = ("mask bits", problem, device_id, by_key, operands.key())
    ready = steps.prepared(key, lambda: _prepare(problem, operands, device_id, by_key))
    if not ready:
        return Masked(problem, operands)
    bits = cupy.empty(ready.shape, np.uint32)
    shared = cupy.broadcast_to(bits, (*problem.batch, problem.num_heads, *ready.shape[-2:]))
    numbers = {n: place for place, n in enumerate(ready.kept)}
    then = replace(
        operands,
        args=(*(operands.args[n] for n in ready.kept), shared),
        sums={numbers[n]: replace(x, number=numbers[n]) for n, x in operands.sums.items()},
    )
    words = (bits.data.ptr, *operands.words(ready.options))
    return Masked(ready.problem, then, ((ready.step, words),), bits)


def _prepare(problem, operands, device_id: int, by_key: bool):
    """A _Ready, or False where bits do not pay."""
    hopper = steps.device_facts(device_id).capability == 90 and ITEM_BYTES[problem.dtype] == 2
    if not hopper or not mask_bits.pays(problem, operands.args):
        return False
    steps.check_aligned(**operands.arrays)
    own = mask_bits.own_axes(problem, operands.args)
    inner, part = operands.part(replace(problem, block_map=None), own)
    options = Options.of(inner)
    lengths = problem.seqlen_q, problem.seqlen_k
    rows, words = lengths[by_key], mask_bits.row_words(lengths[not by_key])
    blocks = [-(-n // mask_bits.TILE) for n in lengths]
    blocks[not by_key] = words * 32 // mask_bits.TILE  # to the ends of rows, behind the sequence's
    step = Step.of(
        portable.mask_bits_plan(inner, by_key),
        math.prod(own) * math.prod(blocks),
        *steps.shape_values(inner, blocks[0]),
        *steps.band_values(inner),
        blocks[1],
        words,
        *part.rest(inner, options, forward=True),
    )
    return _Ready(*mask_bits.rewritten(problem, by_key), (*own, rows, words), step, options)
