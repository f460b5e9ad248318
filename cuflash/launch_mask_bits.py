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

# A graph writes its bits anew whenever it is launched, so that nobody else may have their memory.
_held_by_graphs: list = []


class Masked(NamedTuple):
    """A call as its kernels see it, and what must run before them."""

    problem: Any
    operands: Any
    step: Step | None = None
    words: tuple = ()  # of the step: what each launch writes

    def launch(self, device_id: int) -> None:
        if self.step is None:
            return
        if cupy.cuda.get_current_stream().is_capturing():
            _held_by_graphs.append(self.operands.args[-1])
        self.step.launch(device_id, *self.words)


def as_bits(problem, operands, device_id: int, by_key: bool) -> Masked:
    """A call with its masks as bits where that pays, else as it is. ``by_key``: words hold the
    queries of a key, as backward reads them.
    """
    args = operands.args
    hopper = steps.device_facts(device_id).capability == 90 and ITEM_BYTES[problem.dtype] == 2
    if not hopper or not mask_bits.pays(problem, args):
        return Masked(problem, operands)
    changed, kept = mask_bits.rewritten(problem, by_key)
    own = mask_bits.own_axes(problem, args)
    lengths = problem.seqlen_q, problem.seqlen_k
    rows, words = lengths[by_key], mask_bits.row_words(lengths[not by_key])
    bits = cupy.empty((*own, rows, words), np.uint32)
    shared = cupy.broadcast_to(bits, (*problem.batch, problem.num_heads, rows, words))
    numbers = {n: place for place, n in enumerate(kept)}
    sums = {numbers[n]: replace(x, number=numbers[n]) for n, x in operands.sums.items()}
    then = replace(operands, args=(*(args[n] for n in kept), shared), sums=sums)
    step, options = _ready(problem, operands, own, words, by_key)
    return Masked(changed, then, step, (bits.data.ptr, *operands.words(options)))


def _ready(problem, operands, own, words: int, by_key: bool):
    """(step, options): prepared now or kept from an equal call."""
    inner = replace(
        problem, batch=own[:-1], num_heads=own[-1], num_kv_heads=own[-1], sinks=False,
        dropout=False, block_map=None,
    )  # fmt: skip

    def make():
        steps.check_aligned(**operands.arrays)
        options = Options.of(inner)
        plan = portable.mask_bits_plan(inner, by_key)
        blocks = [-(-n // mask_bits.TILE) for n in (problem.seqlen_q, problem.seqlen_k)]
        # Rows are written to their ends, behind the sequence's.
        blocks[not by_key] = words * 32 // mask_bits.TILE
        part = tuple(slice(n) for n in own)
        args = tuple(
            x[part] if spec.kind == "grid" else x
            for spec, x in zip(problem.program.args, operands.args)
        )
        step = Step.of(
            plan,
            math.prod(own) * math.prod(blocks),
            *steps.shape_values(inner, blocks[0]),
            *steps.band_values(inner),
            blocks[1],
            words,
            *replace(operands, args=args, sums={}).rest(inner, options, forward=True),
        )
        return step, options

    return steps.prepared((inner, words, by_key, operands.key()), make)
