"""Backward on the NumPy path: one task is a chunk of keys, past which it streams the queries.

A task owns its keys' dk and dv. The rows of dq are shared by all chunks, which add to them in the
chunks' order, so nothing depends on which thread is faster and no partial dq is kept.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np

from .cpu_rows import Queries, RunningSoftmax, attend, row_parts, row_tasks, slabs, work_size
from .cpu_tiles import BLOCK_N, key_range, key_tiles, row_blocks, run, split_scale, weighted_sum

# Keys whose dk and dv one task accumulates; a multiple of BLOCK_N, so tiles do not depend on it.
_CHUNK = 4 * BLOCK_N
# Above this |lse|, its own rounding would show in p, and the rows are normalised again.
_LSE_TRUSTED = 16.0


def backward(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic):
    """Write those of dq, dk and dv that are not None, shaped as q, k and v.

    out and lse are `cpu.forward`'s; dlse None is zero. deterministic has no effect: this path
    repeats bit by bit at no cost.
    """
    if dq is None and dk is None and dv is None:
        return
    *narrow, main = row_parts(problem, backward=True)
    early = []
    for part in (*narrow, main):
        at = (..., part.rows, slice(None))
        kv = [x[..., part.keys, :] for x in (k, v)]
        numbers = [None if x is None else x[..., part.rows] for x in (lse, dlse)]
        rows = _Rows(part, dout[at], q[at], *kv, out[at], *numbers)
        dq_part = None if dq is None else dq[at]
        if part is main:
            _backward(rows, *kv, dq_part, dk, dv, early)
        else:
            given = zip((dk, dv), kv)
            sums = [None if x is None else np.empty(y.shape, part.dtype) for x, y in given]
            _backward(rows, *kv, dq_part, *sums, [])
            early.append((part.keys, *sums))


def _backward(rows, k, v, dq, dk, dv, early):
    """The gradients of one part's rows; early has (slice of keys, dk, dv) of the parts before,
    which are added before dk and dv are rounded.
    """
    problem, dtype = rows.problem, rows.dtype
    run(row_tasks(problem), rows.measure, dtype, work_size(problem) // 64)

    dq_sum = dq if dq is None or dq.dtype == dtype else np.empty(dq.shape, dtype)
    if dq is not None:
        dq_sum[...] = 0
    turns = _Turns()

    def work(task, scratch):
        slab, first, last = task
        try:
            chunk = _Chunk(problem, slab, first, last, k, v, scratch)
            chunk.dk = None if dk is None else scratch.zeros("dk", *chunk.k.shape)
            chunk.dv = None if dv is None else scratch.zeros("dv", *chunk.v_ones[..., 1:].shape)
            for head in range(problem.group):
                index = slab.with_heads(slab.head_index * problem.group + head)
                for begin, end in row_blocks(problem.seqlen_q, problem.band):
                    keys = chunk.keys_seen(begin, end)
                    if keys[0] >= keys[1]:
                        continue
                    block = rows.block(index, begin, end, scratch)
                    part = chunk.add(block, keys, dq is not None)
                    if part is None:
                        continue
                    place = index + (slice(begin, end),)
                    with turns.take((slab.start, head, begin), chunk.order(begin, end)):
                        dq_sum[place] += part.reshape(dq_sum[place].shape)
            chunk.store(dk, dv, early)
        except BaseException:
            turns.cancel()
            raise

    tasks = (
        (slab, first, min(first + _CHUNK, problem.seqlen_k))
        for slab in slabs(problem, problem.num_kv_heads)
        for first in range(0, problem.seqlen_k, _CHUNK)
    )
    run(tasks, work, dtype, work_size(problem) * 2)
    if dq_sum is not dq:
        with np.errstate(all="ignore"):
            dq[...] = dq_sum


class _Rows:
    """What backward needs of each query row, beside q and dout: shift, norm and delta.

    p is exp(s - shift) / norm, and norm is inf where the row sees nothing. Where the part says so,
    the digits that out and lse lost to their dtypes are computed again.
    """

    def __init__(self, part, dout, q, k, v, out, lse, dlse):
        self.problem, self.dtype, self.restores = part.problem, part.dtype, part.restores
        self.dout, self.q, self.k, self.v = dout, q, k, v
        self.out, self.lse, self.dlse = out, lse, dlse
        shape = self.problem.batch + (self.problem.num_heads, self.problem.seqlen_q, 1)
        self.shift, self.norm, self.delta = (np.empty(shape, self.dtype) for _ in range(3))

    def measure(self, task, scratch):
        """Fill in a block of rows; a task of the pool."""
        slab, begin, end = task
        rows = slab.index + (slice(begin, end),)
        shift, norm, out = self._normaliser(slab, begin, end, scratch)
        self.shift[rows], self.norm[rows] = shift, norm
        dout = scratch.load("dout", self.dout, slab.index, begin, end)
        product = np.multiply(dout, out, out=scratch.take("product", *out.shape))
        delta = product.sum(axis=-1, keepdims=True)
        if self.dlse is not None:
            delta -= self.dlse[rows].reshape(delta.shape)
        self.delta[rows] = delta

    def _normaliser(self, slab, begin, end, scratch):
        """shift and norm of a block, each (n, M, 1), and its out.

        That is lse and 1 while lse is small. A large lse has lost the digits that normalise the
        row (near 1e5 a float32 is rounded to 1/128, so p would be off by 0.4 %): the row's maximum
        and sum are then computed again. They may be of fewer keys than lse, in the backward of one
        part of a merged result; the difference, if more than lse's rounding, goes into norm.
        """
        problem = self.problem
        given = self.lse[slab.index + (slice(begin, end),)]
        given = given.reshape(slab.count, end - begin, 1).astype(scratch.dtype)
        out = scratch.load("out", self.out, slab.index, begin, end)
        unseeing = given == -np.inf
        shift = np.where(unseeing, 0, given)
        norm = np.where(unseeing, np.inf, 1).astype(scratch.dtype)
        large = np.abs(shift) > (-1 if self.restores else _LSE_TRUSTED)
        if not large.any():
            return shift, norm, out
        block = Queries(problem, self.q, slab.index, begin, end, scratch)
        if self.restores:
            softmax, acc = attend(block, self.k, self.v, slab, may_be_flat=False)
            out = self._restored(out, np.divide(acc, softmax.total, out=acc))
        else:
            softmax = RunningSoftmax(slab.count, end - begin, scratch, may_be_flat=False)
            for s, *_ in block.scores(self.k, slab.with_heads(slab.head_index // problem.group)):
                softmax.update(s)
        share = (softmax.top - shift) + np.log(softmax.total)
        rounding = 2 * np.finfo(self.lse.dtype).eps * np.abs(shift)
        share = np.where(np.abs(share) <= rounding, 0, share)
        top = np.where(softmax.unseeing, 0, softmax.top)
        total = np.where(softmax.unseeing, np.inf, softmax.total / np.exp(share))
        return np.where(large, top, shift), np.where(large, total, norm), out

    def _restored(self, given, again):
        """The rows of again, computed anew in float64, where they are given's up to a few of its
        roundings: that of a part's own keys does not replace the out of a merged result.
        """
        size = np.abs(given).max(axis=-1, keepdims=True)
        dtype = self.problem.dtype
        eps = 2.0**-7 if dtype == "bfloat16" else float(np.finfo(dtype).eps)
        near = np.abs(again - given) <= 4 * eps * size
        return np.where(near.all(axis=-1, keepdims=True), again, given)

    def block(self, index, begin, end, scratch):
        """The rows [begin, end) with their gradient, for `_Chunk.add`."""
        block = Queries(self.problem, self.q, index, begin, end, scratch)
        rows = index + (slice(begin, end),)
        dout = scratch.load("grad", self.dout, index, begin, end)
        block.load_gradient(dout, self.shift[rows], self.norm[rows], self.delta[rows])
        return block


class _Chunk:
    """Up to _CHUNK keys of one slab of kv heads, with their dk and dv."""

    def __init__(self, problem, slab, first, last, k, v, scratch):
        self.problem, self.slab, self.scratch = problem, slab, scratch
        self.first, self.last = first, last
        self.k = scratch.load("k", k, slab.index, first, last)
        v = scratch.load("v", v, slab.index, first, last)
        self.v_ones = scratch.take("v_ones", *v.shape[:2], v.shape[2] + 1)
        self.v_ones[..., :-1] = v
        self.v_ones[..., -1] = 1

    def keys_seen(self, begin, end):
        """The chunk's keys [first, last) that query rows [begin, end) see."""
        first, last = key_range(self.problem.band, begin, end, self.problem.seqlen_k)
        return max(first, self.first), min(last, self.last)

    def order(self, begin, end):
        """This chunk's place among those that query rows [begin, end) see."""
        first, _ = key_range(self.problem.band, begin, end, self.problem.seqlen_k)
        return self.first // _CHUNK - first // _CHUNK

    def add(self, block, keys, need_dq):
        """Add a block of queries to dk and dv; return the block's dq, or None."""
        dq = self.scratch.zeros("dq", *block.q.shape) if need_dq else None
        for first, last in key_tiles(*keys):
            here = slice(first - self.first, last - self.first)
            self._add_tile(block, here, block.hidden(first, last), dq)
        if need_dq:
            dq *= dq.dtype.type(self.problem.scale)
        return dq

    def _add_tile(self, block, here, hidden, dq):
        k = self.k[:, here]
        p = block.product(k)
        p -= block.shift
        np.exp(p, out=p)
        if hidden is not None:
            hidden = np.broadcast_to(hidden, p.shape)
            np.copyto(p, 0, where=hidden)
        seen_from_key = None if hidden is None else hidden.mT
        if self.dv is not None:
            dv = self.dv[:, here]
            out = self.scratch.take("product", *dv.shape)
            dv += weighted_sum(p.mT, block.dout, seen_from_key, out)
        if self.dk is None and dq is None:
            return
        ds = self.scratch.take("ds", *p.shape)
        np.matmul(block.dout_delta, self.v_ones[:, here].mT, out=ds)
        ds *= p
        if hidden is not None:
            np.copyto(ds, 0, where=hidden)
        if dq is not None:
            dq += weighted_sum(ds, k, hidden, self.scratch.take("product", *dq.shape))
        if self.dk is not None:
            out = self.scratch.take("product", *k.shape)
            self.dk[:, here] += weighted_sum(ds.mT, block.q, seen_from_key, out)

    def store(self, dk, dv, early):
        """Write dk and dv, with what `_backward` calls early."""
        if dk is not None:
            # block.q already holds the scale's power of two.
            self.dk *= self.dk.dtype.type(split_scale(self.problem.scale)[1])
        rows = self.slab.index + (slice(self.first, self.last),)
        for keys, *parts in early:
            first, last = max(keys.start, self.first), min(keys.stop, self.last)
            if first >= last:
                continue
            theirs = self.slab.index + (slice(first - keys.start, last - keys.start),)
            for own, part in zip((self.dk, self.dv), parts):
                if own is not None:
                    own = own[:, first - self.first : last - self.first]
                    own += part[theirs].reshape(own.shape)
        if dk is not None:
            dk[rows] = self.dk
        if dv is not None:
            dv[rows] = self.dv


class _Turns:
    """Lets chunks add to one block's dq in the chunks' order, whichever is ready first.

    Tasks start in that order and visit blocks in the same order: the earliest unfinished one never
    waits, so every wait ends.
    """

    def __init__(self):
        self.changed = threading.Condition()
        self.next = {}
        self.cancelled = False

    @contextmanager
    def take(self, place, order):
        with self.changed:
            self.changed.wait_for(lambda: self.cancelled or self.next.get(place, 0) == order)
        yield
        with self.changed:
            self.next[place] = order + 1
            self.changed.notify_all()

    def cancel(self):
        """Another task has failed: end every wait."""
        with self.changed:
            self.cancelled = True
            self.changed.notify_all()
