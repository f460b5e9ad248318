"""A block of query rows on the NumPy path: its scores, its softmax, and the tasks over all."""

from __future__ import annotations

import math

import numpy as np

from .cpu_tiles import (
    Slab,
    hidden_pairs,
    key_range,
    key_tiles,
    row_blocks,
    slab_size,
    split_scale,
)

# Scores up to this are exponentiated as they are: exp(16) is 9e6, far from float32's limits.
_FLAT = 16.0


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

    Both are (n, M, 1). Any value may be taken out as long as nothing overflows and a row's largest
    weight does not vanish. The maximum always does. Where each row's maximum is within _FLAT of 0
    in the first tile, 0 does too, as long as no score exceeds _FLAT: the rows are *flat*, and a
    tile needs no pass for its rows' maxima and none to subtract them.
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


def computing_dtype(problem):
    return np.dtype(np.float64 if problem.dtype == "float64" else np.float32)


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
        for begin, end in reversed(row_blocks(problem.seqlen_q)):
            yield slab, begin, end
