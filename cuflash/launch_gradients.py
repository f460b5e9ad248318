"""Gradients of the score's array arguments and of the sinks, around the backward kernels.

Kernels add integers, multiples of a unit, which is exact in any order (attn/score_gradients.cuh).
The unit follows, on the device, from a bound on the terms p * (dp - delta) * g, where g is the
derivative of the score by an entry: a row's p add up to 1, |dp| <= |dout| |v| / keep, and
|delta| <= |dout| |out| + |dlse|, all norms of rows. Where g depends on what arrays hold, the kernel
runs once before and finds the largest term.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import cupy
import numpy as np

from . import launch_steps as steps
from .families import portable
from .launch_extras import STEPS_OF_KEEP
from .launch_steps import BATCH_DIMS, Step
from .plan import ITEM_BYTES
from .score import constant
from .score_bounds import largest
from .score_text import Gradient, depends

SUM_BITS = 59  # of 63: what rounding adds to a term and to the bound stays below
LOW_BITS = 40  # kLowBits in attn/score_gradients.cuh
LARGEST_EXPONENT = {"float32": 120, "float64": 1000}  # of a unit, which kernels hold as such


@dataclass(frozen=True)
class Sums:
    """Where the gradient of one argument is summed."""

    number: int  # of the argument
    shape: tuple[int, ...]  # of its gradient
    strides: list[int]  # of a grid's entries, by axis; 0 where it has one
    sums: Any  # cupy.ndarray of int64, once or twice as many as entries
    notes: Any  # a byte an entry: the kinds of what was not finite
    unit: Any  # one float64: units in 1
    largest: Any  # one uint64, the bits of the largest term; or None
    bound: float  # a term is at most this times p (|dp| + |delta|); nan where it is measured
    terms: int  # how many may meet
    measuring: bool = False
    first_entry: int = 0

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def words(self) -> list[int]:
        """As score_text.rows has them."""
        place = self.largest.data.ptr if self.measuring else 0
        return [
            self.sums.data.ptr, self.notes.data.ptr, self.unit.data.ptr, place, self.first_entry
        ]  # fmt: skip

    def key(self) -> tuple:
        return self.number, self.count, *self.strides

    def rest(self, problem) -> list[int]:
        """The values that stay from launch to launch."""
        missing = BATCH_DIMS - len(problem.batch) if self.strides else 0
        return [self.count, *[0] * missing, *self.strides]

    def at(self, index) -> Sums:
        """Seen from one of several launches, which ``index`` numbers."""
        if not self.strides:
            return self
        first = sum(n * stride for n, stride in zip(index, self.strides))
        return replace(
            self, strides=self.strides[len(index) :], first_entry=self.first_entry + first
        )

    def choose_unit(self, bound, dtype: str) -> None:
        """``bound``: one float64 on the device, the largest term."""
        exponent = SUM_BITS - cupy.ceil(cupy.log2(cupy.maximum(bound * self.terms, 1e-300)))
        limit = LARGEST_EXPONENT[dtype]
        exponent = cupy.clip(exponent, -limit, limit).astype(np.int32)
        self.unit[...] = cupy.ldexp(cupy.ones(1, np.float64), exponent)

    def finish(self, gradient) -> None:
        """The sums as numbers, into ``gradient``."""
        count = self.count
        total = self.sums[:count].astype(np.float64)
        if self.sums.size > count:
            total += self.sums[count:].astype(np.float64) * 2.0**-LOW_BITS
        total /= self.unit
        kinds = self.notes[:count]  # 1: NaN, 2: inf, 4: -inf
        total = cupy.where(kinds == 0, total, np.nan)
        total = cupy.where(kinds == 2, np.inf, cupy.where(kinds == 4, -np.inf, total))
        # Rounded twice where there may be no cast of doubles.
        dtype = np.float32 if gradient.dtype.itemsize == 2 else gradient.dtype
        gradient[...] = total.reshape(self.shape).astype(dtype)


@dataclass(frozen=True)
class Squares:
    """The same as floats, where the gradient is dS (attn/backward_sm90.cuh)."""

    number: int
    shape: tuple[int, ...]
    problem: Any
    squares: Any  # cupy.ndarray of float32 (entries, blocks of queries, blocks of keys, 64 * 64)
    flags: Any  # of turns, or None
    measuring, largest = False, math.nan

    def words(self) -> list[int]:
        return steps.starts_of((self.squares, self.flags))

    def key(self) -> tuple:
        return self.number, self.shape

    def rest(self, problem) -> list[int]:
        *batch, heads = self.shape[:-2]
        return [heads if math.prod(batch) > 1 else 0, int(heads > 1)]

    def step(self, gradient) -> Step:
        *batch, heads = self.shape[:-2]
        its = replace(self.problem, batch=tuple(batch), num_heads=heads, num_kv_heads=heads)
        entries, rows, columns, _ = self.squares.shape
        return Step.of(
            portable.pair_gradient_plan(gradient.dtype.name, its.band is not None),
            entries * rows * columns,
            *steps.all_strides(its, gradient),
            *steps.shape_values(its, rows),
            *steps.band_values(its),
            columns,
        )

    def finish(self, gradient) -> None:
        starts = steps.starts_of((self.squares, gradient))
        self.step(gradient).launch(gradient.data.device_id, *starts)


def is_ds(problem, wanted, dargs) -> bool:
    """Whether a single gradient is wanted, and is dS, pair by pair; its array's batch axes are all
    shared, or none.
    """
    plain = ITEM_BYTES[problem.dtype] == 2 and not problem.packed and problem.block_map is None
    if not plain or len(wanted) != 1 or not all(wanted[0].along):
        return False
    n, node, term = problem.program.gradients[wanted[0].number]
    shared = {a < b for a, b in zip(dargs[n].shape[:-3], problem.batch) if b > 1}
    return node.op == "element" and term is constant(1.0) and len(shared) < 2


def gradients_of(problem, dargs) -> tuple[Gradient, ...]:
    """How a kernel sums those of the program's gradients that are asked for.

    Parameters
    ----------
    problem : Problem
    dargs : sequence of array or None, or None
        By the program's arguments; grids with an axis of 1 where they have one entry.
    """
    if dargs is None or problem.program is None:
        return ()
    program, found = problem.program, []
    measured = {
        n: any(largest(term, problem) is None for m, _, term in program.gradients if m == n)
        for n, _, _ in program.gradients
    }
    for number, (n, node, _) in enumerate(program.gradients):
        if dargs[n] is None:
            continue
        if program.args[n].kind == "grid":
            along = dargs[n].shape[-2] > 1, dargs[n].shape[-1] > 1
        else:
            along = tuple(_varies(node, axis, problem.packed) for axis in "ij")
        words = 2 if measured[n] or problem.dtype == "float64" else 1
        found.append(Gradient(number, along, measured[n], words))
    return tuple(found)


def _varies(node, axis, packed=False) -> bool:
    """Whether an entry's place does along i or j; b does along both where sequences are packed."""
    causes = (axis, "s", "b") if packed else (axis, "s")
    return any(depends(index, cause) for index in node.operands for cause in causes)


def sums_of(problem, gradients, dargs, deterministic=True) -> dict[int, Sums | Squares]:
    """Zeros, for each argument whose gradient is summed."""
    program, sums = problem.program, {}
    pairs = math.prod(problem.batch) * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    for gradient in gradients:
        n = program.gradients[gradient.number][0]
        if n in sums:
            continue
        bounds = [largest(term, problem) for m, _, term in program.gradients if m == n]
        shape = tuple(dargs[n].shape)
        count = math.prod(shape)
        if gradient.words == 0:
            blocks = -(-problem.seqlen_q // 64), -(-problem.seqlen_k // 128) * 2
            entries = math.prod(shape[:-2])
            # In turns the first writes, else all are added.
            squares = (cupy.empty if deterministic else cupy.zeros)((entries, *blocks, 4096), "f")
            shared = entries < math.prod(problem.batch) * problem.num_heads
            flags = cupy.zeros(squares.shape[:3], "I") if deterministic and shared else None
            sums[n] = Squares(n, shape, problem, squares, flags)
            continue
        bound = math.nan if None in bounds else max(bounds)
        terms = pairs if gradient.measured else pairs // problem.seqlen_k
        sums[n] = Sums(
            n,
            shape,
            _entry_strides(shape) if program.args[n].kind == "grid" else [],
            cupy.zeros(gradient.words * count, np.int64),
            cupy.zeros(-(-count // 4) * 4, np.uint8),
            cupy.zeros(1, np.float64),
            cupy.zeros(1, np.uint64) if gradient.measured else None,
            bound,
            terms * len(bounds),
            measuring=gradient.measured,
        )
    return sums


def _entry_strides(shape) -> list[int]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.insert(0, stride if size > 1 else 0)
        stride *= size
    return strides


def choose_bounded_units(problem, sums, a, keep_limit: int) -> None:
    """The units of the arguments whose terms have a bound. ``a``: the arrays of the pass."""
    bounded = [x for x in sums.values() if x.largest is None]
    if not bounded:
        return
    norms = cupy.zeros(4, np.uint64)
    values = replace(problem, num_heads=problem.num_kv_heads, seqlen_q=problem.seqlen_k)
    _add_norms(problem, a.dout, norms[0:1])
    _add_norms(problem, a.out, norms[1:2])
    _add_norms(values, a.v, norms[2:3])
    if a.dlse is not None:
        _add_norms(problem, a.dlse[..., None], norms[3:4])
    dout, out, v, dlse = (norms.view(np.float64)[n : n + 1] for n in range(4))
    ds = dout * (v * (STEPS_OF_KEEP / keep_limit) + out) + dlse
    for x in bounded:
        x.choose_unit(ds * x.bound, problem.lse_dtype)


def choose_measured_units(problem, sums) -> None:
    """The units of the others, once their largest terms are known."""
    for x in sums.values():
        if x.largest is not None:
            x.choose_unit(x.largest.view(np.float64), problem.lse_dtype)


def forget_bounded(sums) -> None:
    """Begin again with the arguments whose terms have a bound: the run that measured the others
    summed theirs, too.
    """
    for x in sums.values():
        if x.largest is None:
            x.sums.fill(0)
            x.notes.fill(0)


def _add_norms(problem, x, most) -> None:
    """Raise ``most``, the bits of a double, to the largest norm of x's rows."""
    if len(problem.batch) > BATCH_DIMS:
        for inner, (part,), _ in steps.outer(problem, (x,)):
            _add_norms(inner, part, most)
        return
    plan = portable.row_norm_plan(x.dtype.name)
    blocks = -(-problem.seqlen_q // plan["kBlockRows"])
    heads = math.prod(problem.batch) * problem.num_heads
    facts = replace(problem, head_dim=x.shape[-1])
    step = Step.of(
        plan, blocks * heads, *steps.all_strides(problem, x), *steps.shape_values(facts, blocks)
    )
    step.launch(x.data.device_id, x.data.ptr, most.data.ptr)


def sink_gradient(sinks, lse, delta):
    """The gradient of each sink, (*batch, Hq): its p is exp(sink - lse), its dp 0.

    Parameters
    ----------
    sinks : cupy.ndarray (*batch, Hq)
    lse, delta : cupy.ndarray (*batch, Hq, L)
    """
    sinks = sinks[..., None]
    whole = lse == sinks  # p is 1, of infinities too, which have no difference
    gap = cupy.where(whole, 0.0, sinks) - cupy.where(whole, 0.0, lse)
    # A row without a key has an lse of -inf only where the sink is -inf, too; a row behind the
    # packed sequences has any delta. The sink is part of neither.
    return -cupy.where(lse == -np.inf, 0.0, cupy.exp(gap) * delta).sum(axis=-1)


def reduce_to(gradient, total) -> None:
    """Write ``total``, summed over the axes that ``gradient`` has one entry of."""
    missing = total.ndim - gradient.ndim
    axes = (*range(missing), *(n for n, size in enumerate(gradient.shape, missing) if size == 1))
    total = total.sum(axis=axes, keepdims=True) if axes else total
    gradient[...] = total.reshape(gradient.shape).astype(gradient.dtype)
