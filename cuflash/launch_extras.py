"""A call's operands beside q, k and v, as kernels take them: the values of the rows that
score_text.py adds to their parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from . import launch_steps as steps
from . import score_rows, tensormap
from .score_text import Options

_MASK = 2**64 - 1
STEPS_OF_KEEP = 256  # the probability that dropout keeps a weight is a multiple of their inverse


@dataclass(frozen=True)
class Operands:
    """What one launch reads, and where it sums gradients."""

    args: tuple = ()  # arrays, or the 64 bits of numbers
    sinks: Any = None
    seed: int = 0
    seed_array: Any = None
    keep_limit: int = STEPS_OF_KEEP
    first_batch: int = 0  # of all leading axes, where a call runs in several launches
    sums: dict = field(default_factory=dict)  # argument -> launch_gradients.Sums
    packing: Any = None  # of packed sequences
    block_map: Any = None  # a blockmap.MapView
    lengths: tuple = ()  # of the queries, of the keys of each batch entry: int32, or None

    @classmethod
    def of(cls, problem, extras) -> Operands:
        """Those of a call; numbers become words, sinks take the scores' dtype."""
        if not Options.of(problem):
            if not problem.packed and problem.block_map is None:
                return NONE
            return cls(packing=extras.packing, block_map=extras.block_map)
        specs = () if problem.program is None else problem.program.args
        args = tuple(_operand(spec, x) for spec, x in zip(specs, extras.args, strict=True))
        sinks, seed, seed_array = extras.sinks, 0, None
        if problem.sinks:
            sinks = sinks.astype(problem.lse_dtype, copy=False)
        if problem.dropout:
            if isinstance(extras.seed, (int, np.integer)):
                seed = int(extras.seed) & _MASK
            else:
                seed_array = extras.seed
                if seed_array.itemsize != 8:
                    seed_array = seed_array.astype(np.int64)
        limit = min(max(round(extras.keep * STEPS_OF_KEEP), 1), STEPS_OF_KEEP)
        return cls(
            args, sinks, seed, seed_array, limit, extras.first_batch, packing=extras.packing,
            block_map=extras.block_map,
        )  # fmt: skip

    def at(self, problem, index) -> Operands:
        """Those of one of the launches of `launch_steps.outer`, which are numbered by ``index``."""
        inner = math.prod(problem.batch[len(index) :])
        number = int(np.ravel_multi_index(index, problem.batch[: len(index)]))
        specs = () if problem.program is None else problem.program.args
        args = tuple(
            x[index] if spec.kind == "grid" else x for spec, x in zip(specs, self.args)
        )
        return replace(
            self,
            args=args,
            sinks=None if self.sinks is None else self.sinks[index],
            first_batch=self.first_batch + number * inner,
            sums={n: sums.at(index) for n, sums in self.sums.items()},
            block_map=None if self.block_map is None else self.block_map.at(index),
        )

    def part(self, problem, own) -> tuple:
        """(problem, operands) of a call's masks and scores for the first ``own`` of its leading axes,
        (*batch, heads): all of them where they are the same along the others.
        """
        *batch, heads = own
        inner = replace(
            problem, batch=tuple(batch), num_heads=heads, num_kv_heads=heads, sinks=False,
            dropout=False,
        )  # fmt: skip
        entries = tuple(map(slice, own))
        specs = () if problem.program is None else problem.program.args
        args = tuple(x[entries] if s.kind == "grid" else x for s, x in zip(specs, self.args))
        return inner, replace(self, args=args, sinks=None, sums={})

    @property
    def arrays(self) -> dict:
        """By the names of their rows."""
        found = {f"arg{n}": x for n, x in enumerate(self.args) if not isinstance(x, int)}
        found.update(sinks=self.sinks, seed=self.seed_array)
        if self.block_map is not None:
            found["block_map"] = self.block_map.kinds
        return {name: x for name, x in found.items() if x is not None}

    def paired(self, problem) -> tuple[int, ...]:
        """The program's arguments whose elements for keys 2n and 2n + 1 are one aligned read."""
        specs = () if problem.program is None else problem.program.args
        return tuple(
            n for n, (spec, x) in enumerate(zip(specs, self.args)) if _is_paired(spec, x)
        )

    def staged(self, problem) -> int | None:
        """Of these the first whose blocks of queries and keys a tensor map can describe."""
        specs = () if problem.program is None else problem.program.args
        for n in self.paired(problem):
            if score_rows.stageable(specs[n]) and not problem.packed:
                if tensormap.unfit(self.args[n]) is None:
                    return n
        return None

    def shared_by_heads(self, problem) -> bool:
        """Whether heads read the same matrix of queries and keys, so that they had better meet."""
        specs = () if problem.program is None else problem.program.args
        return problem.num_heads > 1 and any(
            spec.kind == "grid" and all(spec.along) and x.strides[-3] == 0
            for spec, x in zip(specs, self.args)
        )

    def key(self) -> tuple:
        """What two calls must share to share their preparation."""
        if self is NONE:
            return ()
        arrays = self.arrays.values()
        strides = tuple((x.shape, x.strides, x.data.ptr % 16) for x in arrays)
        return (*strides, self.keep_limit, tuple(s.key() for s in self.sums.values()))

    # The next two go through the rows of score_text.rows, in its order.

    def words(self, options: Options) -> list:
        """The values of the rows that each launch writes."""
        found = [x.data.ptr for x in self.packing.intervals] if options.packed else []
        if options.lengths:
            found = steps.starts_of(self.lengths)
        if not options:
            return found
        found += [self.first_batch]
        if options.packed:
            found += [x.data.ptr for x in self.packing.places]
        found += [x if isinstance(x, int) else x.data.ptr for x in self.args]
        if options.sinks:
            found += [self.sinks.data.ptr]
        if options.dropout:
            found += [self.seed, 0 if self.seed_array is None else self.seed_array.data.ptr]
        for n in options.summed:
            found += self.sums[n].words()
        if options.map_block:
            found += [self.block_map.kinds.data.ptr]
        return found

    def rest(self, problem, options: Options, forward: bool) -> tuple | list:
        """The values of the others."""
        if not options:
            return ()
        found = []
        for spec, x in zip(options.args, self.args):
            if spec.kind == "grid":
                found += steps.all_strides(problem, x)
            elif spec.kind == "free":
                found += [
                    value
                    for size, stride in zip(x.shape, x.strides)
                    for value in (size, stride // x.itemsize)
                ]
        if options.sinks:
            found += steps.all_strides(problem, self.sinks)
        if options.dropout:
            found += [self.keep_limit]
        for n in options.summed:
            found += self.sums[n].rest(problem)
        if options.map_block:
            found += steps.all_strides(problem, self.block_map.kinds)
        found += [problem.scale]
        if options.dropout and not forward:
            found += [STEPS_OF_KEEP / self.keep_limit]
        return found


NONE = Operands()


def _is_paired(spec, x) -> bool:
    if not score_rows.pairable(spec):
        return False
    places = [stride for size, stride in zip(x.shape[:-1], x.strides) if size > 1]
    whole = all(place % (2 * x.itemsize) == 0 for place in (x.data.ptr, *places))
    return whole and x.strides[-1] == x.itemsize and x.shape[-1] % 2 == 0


def _operand(spec, x):
    if spec.kind != "scalar":
        return x
    if spec.dtype.startswith("int"):
        return int(x) & _MASK
    number = np.float64(x)
    if spec.dtype != "float64":  # it and its inverse: each half is an operand of instructions
        with np.errstate(over="ignore", divide="ignore"):
            halves = np.array([number, 1 / number], np.float64).astype(np.float32)
        return int(halves.view(np.uint64)[0])
    return int(number.view(np.uint64))
