"""Attention on NumPy arrays: the definition, block by block, forward and backward.

A tile is a block of queries by a block of keys. Forward streams the tiles past a block of queries
and keeps, for each row, the running maximum m of the scores, the sum l of exp(s - m) and the
unnormalised output acc (Milakov and Gimelshein, "Online normalizer calculation for softmax",
2018; Dao et al., "FlashAttention", 2022):

    m' = max(m, max_j s)
    l = l * exp(m - m') + sum_j exp(s - m');  acc = acc * exp(m - m') + exp(s - m') @ v
    out = acc / l;  lse = m + log(l)

Backward computes the tiles' scores again and holds nothing of size L x S either:

    p  = exp(s - lse)
    dv = p.T @ dout;  dp = dout @ v.T;  ds = p * (dp - delta), delta = sum_d(dout * out) - dlse
    dq = scale * ds @ k;  dk = scale * ds.T @ q

float16 and bfloat16 are computed in float32, and in float64 what single roundings would decide
(`cpu_rows.row_parts`). Every sum has one order, fixed by the shapes, so both directions repeat bit
by bit for any number of threads.
"""

from __future__ import annotations

import numpy as np

from . import cpu_scores
from .cpu_backward import backward as plain_backward
from .cpu_rows import Queries, attend, row_parts, row_tasks, work_size
from .cpu_scores import block_kinds
from .cpu_tiles import heads_per_tile, run

__all__ = ["backward", "block_kinds", "forward", "merge"]


def forward(problem, q, k, v, out, lse, extras=None):
    """Write attention's out (*batch, Hq, L, Dv), and lse (*batch, Hq, L) unless it is None.

    q, k and v are (*batch, Hq, L, D), (*batch, Hkv, S, D) and (*batch, Hkv, S, Dv), with any
    strides; extras has the operands of the problem's options.
    """
    if extras is not None:
        cpu_scores.forward(problem, q, k, v, out, lse, extras)
        return
    for part in row_parts(problem):
        rows = (..., part.rows, slice(None))
        k_part, v_part = (x[..., part.keys, :] for x in (k, v))
        lse_part = None if lse is None else lse[..., part.rows]
        _forward(part.problem, part.dtype, q[rows], k_part, v_part, out[rows], lse_part)


def backward(
    problem, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic,
    extras=None, dargs=None, dsinks=None,
):  # fmt: skip
    """As `cpu_backward.backward`, with the options' operands and their gradients.

    dargs has for each of the program's arguments None or an array of the shape of its view; dsinks
    is None or has that of the sinks' view.
    """
    if extras is None:
        plain_backward(problem, dout, q, k, v, out, lse, dlse, dq, dk, dv, deterministic)
        return
    cpu_scores.backward(problem, dout, q, k, v, out, dlse, (dq, dk, dv), extras, dargs, dsinks)


def _forward(problem, dtype, q, k, v, out, lse):
    # Only where a slab is one head: a row must not depend on the other heads of its slab.
    may_be_flat = heads_per_tile(problem.seqlen_q, problem.seqlen_k) == 1

    def work(task, scratch):
        slab, begin, end = task
        block = Queries(problem, q, slab.index, begin, end, scratch)
        softmax, acc = attend(block, k, v, slab, may_be_flat)
        if softmax.flat and not np.isfinite(acc).all():
            # Weights above 1 can overflow where v is huge; weights of at most 1 cannot.
            softmax, acc = attend(block, k, v, slab, may_be_flat=False)
        np.divide(acc, softmax.total, out=acc)
        np.copyto(acc, 0, where=softmax.unseeing)
        rows = slab.index + (slice(begin, end),)
        out[rows] = acc
        if lse is not None:
            lse[rows] = softmax.lse()[..., 0]

    run(row_tasks(problem), work, dtype, work_size(problem))


def merge(outs, lses, out, lse):
    """Write out and lse of the union of the key sets that outs (..., Dv) and lses (...) came from.

    ``lse = log(sum_n exp(lse_n))`` and ``out = sum_n exp(lse_n - lse) * out_n``; a part with lse
    -inf saw nothing and adds nothing.
    """
    dtype = np.promote_types(lse.dtype, np.float32)
    with np.errstate(all="ignore"):
        top = np.full(lse.shape, -np.inf, dtype)
        for part in lses:
            np.maximum(top, part, out=top)
        shift = np.where(top == -np.inf, 0, top)
        total = np.zeros(lse.shape, dtype)
        acc = np.zeros(out.shape, dtype)
        for part, part_lse in zip(outs, lses):
            weight = np.exp(part_lse.astype(dtype) - shift)
            total += weight
            term = part.astype(dtype)
            term *= weight[..., None]
            np.copyto(term, 0, where=(part_lse == -np.inf)[..., None])
            acc += term
        acc /= total[..., None]
        np.copyto(acc, 0, where=(top == -np.inf)[..., None])
        out[...] = acc
        lse[...] = shift + np.log(total)
