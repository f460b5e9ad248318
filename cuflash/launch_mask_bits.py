"""Masks on the GPU as mask_bits.py would have them: lengths, ids with lists of blocks, or bits and
the kernel in front of those that read them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import cupy
import numpy as np

from . import launch_steps as steps
from . import mask_bits
from .blockmap import MapView
from .families import portable, sm90
from .launch_block_map import Spans
from .launch_extras import Operands
from .launch_steps import Step
from .plan import ITEM_BYTES
from .score_text import Options

class Masked(NamedTuple):
    """A call as its kernels see it, and what must run before them."""

    problem: Any
    operands: Any
    step: Step | None = None
    words: tuple = ()  # of the step: what each launch writes

    def launch(self, device_id: int) -> None:
        if self.step is None:
            return
        steps.kept(self.operands.args[-1])
        self.step.launch(device_id, *self.words)


class _Ready(NamedTuple):
    """What equal calls share."""

    problem: Any  # with bits in its masks' place
    kept: tuple[int, ...]  # the arguments that it still reads
    shape: tuple[int, ...]  # of the bits
    step: Step
    options: Options  # of the step


def as_bits(problem, operands, inputs, by_key: bool, tile=None) -> Masked:
    """A call with its masks as bits, or less, where that pays, else as it is. ``by_key``: words hold
    the queries of a key, as backward reads them; ``inputs``: what tensor maps would describe.
    """
    program = problem.program
    if program is None or program.visible is None:
        return Masked(problem, operands)
    device_id = inputs[0].data.device_id
    shapes = steps.key_of(inputs, steps.starts_of(inputs))
    key = ("mask bits", problem, device_id, by_key, tile is None, shapes, operands.key())

    def make():
        steps.check_aligned(**operands.arrays)
        found = tile is None and _unmasked(problem, inputs, by_key)
        return found or _prepare(problem, operands, device_id, by_key)

    ready = steps.prepared(key, make)
    if not ready:
        return Masked(problem, operands)
    if not isinstance(ready, _Ready):
        return _spanned(*ready, operands)
    bits = cupy.empty(ready.shape, np.uint32)
    shared = cupy.broadcast_to(bits, (*problem.batch, problem.num_heads, *ready.shape[-2:]))
    numbers = {n: place for place, n in enumerate(ready.kept)}
    then = replace(
        operands,
        args=(*(operands.args[n] for n in ready.kept), shared),
        sums={numbers[n]: replace(x, number=numbers[n]) for n, x in operands.sums.items()},
    )
    words = (bits.data.ptr, *operands.words(ready.options))
    return Masked(ready.problem, then, ready.step, words)


def _unmasked(problem, inputs, by_key: bool):
    """As mask_bits.unmasked; False also where Hopper's family does not run it, which alone can."""
    found = mask_bits.unmasked(problem, by_key)
    access = steps.access_of(True, **dict(zip("qkvd", inputs)))
    device = steps.device_facts(inputs[0].data.device_id)
    return found and sm90.reject(found[0], device, access) is None and found


def _spanned(problem, numbers, operands) -> Masked:
    ends = problem.seqlen_q, problem.seqlen_k
    if problem.lengths:
        found = (steps.kept(cupy.full(problem.batch, most, np.int32)) if n is None
                 else _as_int32(operands.args[n][..., 0, 0, 0], 0, most)
                 for n, most in zip(numbers, ends))  # fmt: skip
        return Masked(problem, Operands(lengths=tuple(found)))
    q, k = operands.args
    q, k = (_as_int32(x, -(2**31), 2**31 - 1) for x in (q[..., 0, :, 0], k[..., 0, 0, :]))
    spans, grid = Spans(q, k, []), (*problem.batch, problem.num_heads, *ends)
    args = tuple(cupy.broadcast_to(x, grid) for x in (q[..., None, :, None], spans.kinds))
    return Masked(problem, replace(operands, args=args, block_map=MapView(spans.kinds, spans)))


def _as_int32(x, least: int, most: int):
    """Its numbers between the two, contiguous and on 8 bytes."""
    if x.dtype == np.int32 and x.flags.c_contiguous and x.data.ptr % 8 == 0:
        return x  # whose users look at the limits themselves
    found = steps.kept(cupy.empty(x.shape, np.int32))
    cupy.clip(x, least, most, found)
    return found


def _prepare(problem, operands, device_id: int, by_key: bool):
    """A _Ready, or False where bits do not pay."""
    hopper = steps.device_facts(device_id).capability == 90 and ITEM_BYTES[problem.dtype] == 2
    if not hopper or not mask_bits.pays(problem, operands.args):
        return False
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
