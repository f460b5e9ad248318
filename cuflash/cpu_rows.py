"""A block of query rows on the NumPy path: its scores, its softmax, and the tasks over all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .cpu_tiles import Slab, hidden_pairs, key_range, key_tiles, row_blocks
from .cpu_tiles import slab_size, split_scale, weighted_sum
from .problem import Band, Problem

# Scores up to this are exponentiated as they are: exp(16) is 9e6, far from float32's limits.
_FLAT = 16.0
# Below one of these, float32 sums are so short, or so few, that a result's largest error is one
# rounding's luck, maybe many times that of the score matrix. Most of all ds = p * (dp - delta) of a
# row with few visible keys: it cancels, and the rounding of the given out is in delta.
_FEW_KEYS, _FEW_DIMS = 128, 32
# In float32 also because two products round the same scores differently: of scores with deviation
# 4 to 16, 64 to 200 rows had up to 5 % of the heads over twice the score matrix's error.
_FEW_ROWS = {"float16": 64, "bfloat16": 64, "float32": 256}
# From here on backward in float64 may take the float32 out and lse as they are: their one rounding
# is then small beside the many of the score matrix's sums. With fewer dims up to 18 % of the heads
# were over.
_GIVEN_DIMS, _GIVEN_ROWS = 8, 64


class Queries:
    """A block of query rows of one slab: makes the scores of its tiles."""

    def __init__(self, problem, q, index, begin, end, scratch):
        self.problem, self.begin, self.end, self.scratch = problem, begin, end, scratch
        power, self.factor = split_scale(problem.scale)
        self.q = scratch.load("q", q, index, begin, end, scale=power)

    def scores(self, k, kv_index):
        """Yield (s, hidden, first key, last key) over the visible tiles; s is -inf where hidden."""
        problem, scratch = self.problem, self.scratch
        keys = key_range(problem.band, self.begin, self.end, problem.seqlen_k)
        for first, last in key_tiles(*keys):
            s = self.product(scratch.load("k", k, kv_index, first, last))
            hidden = hidden_pairs(problem.band, self.begin, self.end, first, last)
            if hidden is not None:
                np.copyto(s, -np.inf, where=hidden)
            yield s, hidden, first, last

    def product(self, keys):
        """scale * q @ keys.T in the scratch tile."""
        n, rows, _ = self.q.shape
        s = np.matmul(self.q, keys.mT, out=self.scratch.take("s", n, rows, keys.shape[1]))
        if self.factor != 1:
            s *= s.dtype.type(self.factor)
        return s

    def load_gradient(self, dout, shift, norm, delta):
        """dout and delta divided by the rows' norm, so that exp(s - shift) stands for p.

        -delta is one more column of dout: against a column of ones in v, the product is dp - delta.
        """
        column = self.q.shape[:2] + (1,)
        self.shift, norm, delta = (x.reshape(column) for x in (shift, norm, delta))
        self.unseeing = norm == np.inf
        if not self.unseeing.any():
            self.unseeing = None
        n, rows, width = dout.shape
        self.dout_delta = self.scratch.take("dout_delta", n, rows, width + 1)
        self.dout = np.divide(dout, norm, out=self.dout_delta[..., :width])
        self.dout_delta[..., width:] = -delta / norm

    def hidden(self, first, last):
        """What `hidden_pairs` says of keys [first, last), with the rows that see nothing at all."""
        hidden = hidden_pairs(self.problem.band, self.begin, self.end, first, last)
        if self.unseeing is None:
            return hidden
        return self.unseeing if hidden is None else hidden | self.unseeing


class RunningSoftmax:
    """A block's rows: the value taken out of their scores, and the sum of the exponentials.

    Both are (n, M, 1). The value is the maximum, or 0 where each row's maximum is within _FLAT of 0
    in the first tile, as long as no score exceeds _FLAT: the rows are *flat*, and a tile needs no
    pass for its rows' maxima and none to subtract them.
    """

    def __init__(self, count, rows, scratch, may_be_flat):
        self.top = np.full((count, rows, 1), -np.inf, scratch.dtype)
        self.total = np.zeros((count, rows, 1), scratch.dtype)
        self.ones = scratch.ones
        self.untouched, self.flat, self.may_be_flat = True, False, may_be_flat

    def update(self, s, acc=None):
        """Turn a tile of scores into exp(s - top) in place, add it to the sum and rescale acc."""
        if self.flat:
            self.flat = bool(s.max() <= _FLAT)
        if not self.flat:
            self._raise_top(s, acc)
        np.exp(s, out=s)
        # A product with ones, not np.sum: BLAS adds twice as fast.
        self.total += np.matmul(s, self.ones[: s.shape[-1]])

    def _raise_top(self, s, acc):
        top = np.maximum(self.top, s.max(axis=-1, keepdims=True))
        if self.untouched and self.may_be_flat and (np.abs(top) <= _FLAT).all():
            self.top[...] = 0
            self.flat = True
        else:
            shift = np.where(top == -np.inf, 0, top)
            fade = np.exp(self.top - shift)
            self.top = top
            s -= shift
            if not self.untouched and (fade != 1).any():
                self.total *= fade
                if acc is not None:
                    acc *= fade
        self.untouched = False

    @property
    def unseeing(self):
        """(n, M, 1): rows all of whose scores were -inf, or that had none."""
        return self.top == -np.inf

    def lse(self):
        return self.top + np.log(self.total)


def attend(block, k, v, slab, may_be_flat):
    """Stream the visible tiles past a block of queries: its softmax and unnormalised output."""
    problem, scratch = block.problem, block.scratch
    count, rows = block.q.shape[:2]
    kv_index = slab.with_heads(slab.head_index // problem.group)
    softmax = RunningSoftmax(count, rows, scratch, may_be_flat)
    acc = scratch.zeros("acc", count, rows, problem.head_dim_v)
    for s, hidden, first, last in block.scores(k, kv_index):
        softmax.update(s, acc)
        values = scratch.load("v", v, kv_index, first, last)
        acc += weighted_sum(s, values, hidden, scratch.take("product", *acc.shape))
    return softmax, acc


@dataclass(frozen=True)
class Part:
    """Query rows of a problem and the keys they may see, as a problem of their own, computed in
    dtype; restores: backward computes out and lse again.
    """

    problem: Problem
    rows: slice
    keys: slice
    dtype: np.dtype
    restores: bool = False


def row_parts(problem, backward=False):
    """The parts of a problem's rows, each with the dtype it is computed in; the last has all keys.

    float32 calls compute in float64 the rows that see few keys and all rows of a problem that is
    small in one direction; the 16-bit dtypes do in backward only, where out comes rounded to 16
    bits, and for any head_dim.
    """
    single, double = np.dtype(np.float32), np.dtype(np.float64)
    rows, keys = problem.seqlen_q, problem.seqlen_k
    all_rows, all_keys = slice(0, rows), slice(0, keys)
    if problem.dtype == "float64":
        return [Part(problem, all_rows, all_keys, double)]
    if problem.dtype != "float32" and not backward:
        return [Part(problem, all_rows, all_keys, single)]
    begin, end = _rows_of_many_keys(problem)
    dims = min(problem.head_dim, problem.head_dim_v)
    few_rows = end - begin < _FEW_ROWS[problem.dtype]
    if few_rows or (dims < _FEW_DIMS and problem.dtype == "float32"):
        given = dims >= _GIVEN_DIMS and end - begin == rows >= _GIVEN_ROWS
        restores = problem.dtype != "float32" or not given
        return [Part(problem, all_rows, all_keys, double, restores)]
    parts = []
    for first, last in ((0, begin), (end, rows)):
        if first < last:
            seen = key_range(problem.band, first, last, keys)
            if seen[0] >= seen[1]:
                seen = 0, 0
            parts.append(_part(problem, (first, last), seen, double, restores=True))
    return [*parts, _part(problem, (begin, end), (0, keys), single)]


def _rows_of_many_keys(problem):
    """The rows [begin, end) that see at least _FEW_KEYS keys each."""
    rows, keys, band = problem.seqlen_q, problem.seqlen_k, problem.band
    if band is None:
        return 0, rows if keys >= _FEW_KEYS else 0
    if min(keys, band.hi - band.lo + 1) < _FEW_KEYS:
        return 0, 0
    begin = min(max(0, _FEW_KEYS - 1 - band.hi), rows)
    return begin, min(max(begin, keys - _FEW_KEYS - band.lo + 1), rows)


def _part(problem, rows, keys, dtype, restores=False):
    band = problem.band
    if band is not None:
        moved = rows[0] - keys[0]
        band = Band(band.lo + moved, band.hi + moved)
    lengths = {"seqlen_q": rows[1] - rows[0], "seqlen_k": keys[1] - keys[0]}
    moved_problem = replace(problem, band=band, **lengths)
    return Part(moved_problem, slice(*rows), slice(*keys), dtype, restores)


def work_size(problem):
    """Multiply-adds of forward, were every pair visible."""
    rows = math.prod(problem.batch) * problem.num_heads * problem.seqlen_q
    return rows * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)


def slabs(problem, heads):
    """The slabs of an array with that many heads: query heads or kv heads."""
    count = math.prod(problem.batch) * heads
    size = slab_size(count, problem.seqlen_q, problem.seqlen_k)
    for start in range(0, count, size):
        yield Slab(problem.batch, heads, start, min(start + size, count))


def row_tasks(problem):
    """(slab of query heads, row begin, row end); a causal mask's longest rows come first."""
    for slab in slabs(problem, problem.num_heads):
        for begin, end in reversed(row_blocks(problem.seqlen_q, problem.band)):
            yield slab, begin, end
