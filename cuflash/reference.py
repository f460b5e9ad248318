"""Attention and its gradients, dense and in float64, written straight from the definition.

This module is what everything else is compared with, so it shares no code with the rest of the
package: it builds the whole score matrix, keeps every step of the definition visible, and has no
fast path. Letters: leading batch axes ``...``, Hq query heads, Hkv key/value heads, L queries,
S keys, D head dim, Dv value head dim; ``i`` is a query's and ``j`` a key's index in its own
sequence.

    s   = scale * q @ k.T
    s   = what softcap, bias, alibi_slopes and score_mod make of it (`reference_scores`)
    s   = -inf  where j is hidden from i
    p   = exp(s - lse),  lse = log(sum_j exp(s) [+ exp(sink)])
    out = (m * p) @ v                                m is 1, or what dropout keeps over 1 - dropout

    dv  = (m * p).T @ dout
    dp  = m * (dout @ v.T)
    ds  = p * (dp - sum_d(dout * out) + dlse)        and so dbias; times d score / d s for q and k
    dq  = scale * ds @ k
    dk  = scale * ds.T @ q

Two rules complete the formulas where floating point would spoil them. A hidden pair (i, j)
contributes exactly nothing, whatever q, k, v or dout hold (in floating point 0 * NaN is NaN). A
query whose scores are all -inf, hidden or not, sees nothing: out 0, lse -inf, no gradient. A
visible score that is NaN or +inf makes its row NaN: out, lse and all that the row touches in
backward.
"""

from __future__ import annotations

import math
import operator

import numpy as np

from .reference_scores import Scores

__all__ = ["attention", "attention_backward"]

def attention(
    q, k, v, /, *, scale=None, causal=False, causal_offset=None, window=None, layout="bhsd",
    **options,
):
    """Exact attention in float64, by the dense formula.

    Parameters
    ----------
    q, k, v : array_like
        Shapes (..., Hq, L, D), (..., Hkv, S, D) and (..., Hkv, S, Dv), any real dtype NumPy can
        convert to float64 (bfloat16 from ml_dtypes included), any strides. Leading axes broadcast;
        Hq is a multiple of Hkv. A 2-D array (L, D) is one head.
    scale : float, optional
        Factor of the scores, ``1/sqrt(D)`` by default. 0.0 and negative values are valid.
    causal : bool, "bottom_right" or "top_left"
        True is "bottom_right": key j is visible to query i when ``j <= i + offset``, offset
        ``S - L``; for "top_left" the offset is 0.
    causal_offset : int, optional
        The offset itself, with ``causal=True`` or with `window`.
    window : (left, right), optional
        Inclusive bounds of ``j - i - offset``; None or -1 is unlimited.
    layout : {"bhsd", "bshd"}
        "bshd" takes (..., L, H, D) and returns out and lse that way.
    **options
        The remaining options of `cuflash.attention`.

    Returns
    -------
    out : ndarray of float64
        (..., Hq, L, Dv); without the head axis when q, k and v are all 2-D.
    lse : ndarray of float64
        out's shape without its last axis: the natural log of the sum of exp(s).

    Raises
    ------
    ValueError
        For shapes, windows or layouts that do not fit.
    TypeError
        For an unknown option.

    Notes
    -----
    The formula is Vaswani et al., "Attention Is All You Need" (2017), equation 1.
    """
    dense = _Dense(q, k, v, scale, causal, causal_offset, window, layout, options)
    return dense.give(dense.out), dense.give_rows(dense.lse)


def attention_backward(
    dout, q, k, v, /, *, dlse=None, scale=None, causal=False, causal_offset=None, window=None,
    layout="bhsd", need=(), **options,
):
    """Gradients of ``sum(out * dout) + sum(lse * dlse)`` in float64, by the dense formulas.

    Parameters
    ----------
    dout : array_like
        Shape of `attention`'s out.
    q, k, v : array_like
        As in `attention`, with the same options.
    dlse : array_like, optional
        Shape of `attention`'s lse; None is zero.
    need : tuple of str
        Further gradients, out of "bias", "alibi_slopes" and "sinks".

    Returns
    -------
    dq, dk, dv, ... : ndarray of float64
        Each in the shape of q, k and v: summed over broadcast axes and over the heads of a group;
        then those of `need`, in its order.

    Raises
    ------
    ValueError, TypeError
        As in `attention`, and when dout or dlse has another shape than out or lse.

    Notes
    -----
    ``ds = p * (dp - sum(dout * out) + dlse)`` is the derivative of the softmax (Dao et al.,
    "FlashAttention", 2022, appendix B.2) with the lse's own gradient added, d lse / d s being p.
    """
    dense = _Dense(q, k, v, scale, causal, causal_offset, window, layout, options)
    dout = dense.take("dout", dout, dense.give(dense.out).shape, rows=False)
    if dlse is None:
        dlse = np.zeros(dense.lse.shape)
    else:
        dlse = dense.take("dlse", dlse, dense.give_rows(dense.lse).shape, rows=True)
    p, visible = dense.p, dense.visible
    with np.errstate(all="ignore"):
        dp = np.where(dense.kept > 0, dense.kept * (dout @ dense.v.mT), 0.0)
        delta = np.sum(dout * dense.out, axis=-1, keepdims=True)
        # A row that sees nothing has out 0 whatever dout holds.
        delta = np.where(visible.any(axis=-1, keepdims=True), delta, 0.0) - dlse[..., None]
        dx = np.where(visible, p * (dp - delta), 0.0)
        ds = np.where(visible, dx * dense.scores.slope(dense.raw), 0.0)
        dsink = dense.sink_weight * -delta
        more = [dense.scores.gradient(name, dx, dsink, dense.raw) for name in need]
        dq = dense.scale * _weighted_sum(ds, dense.k, visible)
        dk = dense.scale * _weighted_sum(ds.mT, dense.q, visible.mT)
        dv = _weighted_sum((p * dense.kept).mT, dout, visible.mT)
        grads = dense.to_input(0, dq), dense.to_input(1, dk), dense.to_input(2, dv)
    return (*grads, *more)


class _Dense:
    """One forward pass with every intermediate kept; K and V are repeated to Hq heads."""

    def __init__(self, q, k, v, scale, causal, causal_offset, window, layout, options):
        if layout not in ("bhsd", "bshd"):
            raise ValueError(f'layout must be "bhsd" or "bshd", got {layout!r}')
        self.layout = layout
        arrays = [np.asarray(x).astype(np.float64) for x in (q, k, v)]
        self.shapes = [x.shape for x in arrays]
        for name, x in zip("qkv", arrays):
            if x.ndim < 2:
                raise ValueError(f"{name} must have at least 2 axes, got shape {x.shape}")
        self.one_head = all(x.ndim == 2 for x in arrays)
        arrays = [self.head_first(x, absent=x.ndim == 2) for x in arrays]
        _check_shapes(*arrays)
        batch = np.broadcast_shapes(*(x.shape[:-3] for x in arrays))
        q, k, v = (np.broadcast_to(x, batch + x.shape[-3:]) for x in arrays)
        self.kv_heads = k.shape[-3]
        self.group = q.shape[-3] // self.kv_heads if self.kv_heads else 1
        self.q = q
        self.k, self.v = (np.repeat(x, self.group, axis=-3) for x in (k, v))
        self.scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
        lengths = q.shape[-2], k.shape[-2]
        offset = lengths[1] - lengths[0] if causal_offset is None else causal_offset
        offset = 0 if isinstance(causal, str) and causal == "top_left" else offset
        self.scores = Scores((*batch, q.shape[-3], *lengths), offset, options)
        seen = _visible(*lengths, causal, causal_offset, window) & self.scores.visible()
        with np.errstate(all="ignore"):
            self.forward(seen)

    def forward(self, seen):
        """Fill raw, p, visible, kept, sink_weight, lse and out from q, k, v, given what is seen."""
        self.raw = self.scale * (self.q @ self.k.mT)
        s = np.where(seen, self.scores.value(self.raw), -np.inf)
        sink = self.scores.sinks()[..., None, None]
        row_max = np.maximum(np.max(s, axis=-1, keepdims=True, initial=-np.inf), sink)
        sees_something = row_max != -np.inf
        self.visible = seen & sees_something
        # The maximum is taken out so that exp cannot overflow; a row that sees nothing has none.
        row_max = np.where(sees_something, row_max, 0.0)
        weights = np.exp(s - row_max)
        sink_weight = np.exp(sink - row_max)
        total = np.sum(weights, axis=-1, keepdims=True) + sink_weight
        self.sink_weight = np.where(sees_something, sink_weight / total, 0.0)
        self.lse = (row_max + np.log(total))[..., 0]
        self.p = np.where(self.visible, weights / total, 0.0)
        self.kept = self.scores.kept()
        self.out = _weighted_sum(self.p * self.kept, self.v, self.visible)

    def head_first(self, x, absent):
        """The caller's layout to (..., H, L, D), with a head axis where it is absent."""
        if absent:
            return x[None]
        return x if self.layout == "bhsd" else np.swapaxes(x, -3, -2)

    def give(self, x):
        """(..., H, L, D) to the caller's layout."""
        if self.one_head:
            return x[0]
        return x if self.layout == "bhsd" else np.ascontiguousarray(np.swapaxes(x, -3, -2))

    def give_rows(self, x):
        """(..., H, L) to the caller's layout."""
        return self.give(x[..., None])[..., 0]

    def take(self, name, x, shape, rows):
        """An argument of the given shape in the caller's layout, to (..., H, L[, D])."""
        x = np.asarray(x).astype(np.float64)
        if x.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
        if rows:
            return self.head_first(x[..., None], absent=self.one_head)[..., 0]
        return self.head_first(x, absent=self.one_head)

    def to_input(self, index, grad):
        """A gradient of (*batch, Hq, rows, D) summed to the shape the input had."""
        shape = self.shapes[index]
        if index > 0:
            grouped = grad.shape[:-3] + (self.kv_heads, self.group) + grad.shape[-2:]
            grad = grad.reshape(grouped).sum(axis=-3)
        if len(shape) == 2:
            return grad.sum(axis=tuple(range(grad.ndim - 2)))
        if self.layout == "bshd":
            grad = np.swapaxes(grad, -3, -2)
        grad = grad.sum(axis=tuple(range(grad.ndim - len(shape))))
        stretched = tuple(a for a in range(grad.ndim) if shape[a] == 1 and grad.shape[a] != 1)
        return grad.sum(axis=stretched, keepdims=True)


def _visible(seqlen_q, seqlen_k, causal, causal_offset, window):
    """The (L, S) booleans, True where query i sees key j. Every way to hide a key intersects."""
    if not isinstance(causal, (bool, np.bool_)) and causal not in ("bottom_right", "top_left"):
        raise ValueError(f'causal must be a bool, "bottom_right" or "top_left", got {causal!r}')
    if causal_offset is not None:
        if isinstance(causal, str):
            raise ValueError(f"causal_offset={causal_offset} conflicts with causal={causal!r}")
        if not causal and window is None:
            raise ValueError(f"causal_offset={causal_offset}: no effect without causal or window")
        offset = operator.index(causal_offset)
    else:
        offset = 0 if isinstance(causal, str) and causal == "top_left" else seqlen_k - seqlen_q
    i = np.arange(seqlen_q)[:, None]
    j = np.arange(seqlen_k)[None, :]
    seen = np.ones((seqlen_q, seqlen_k), dtype=bool)
    if causal:
        seen &= j <= i + offset
    if window is not None:
        left, right = (None if n is None or n == -1 else operator.index(n) for n in window)
        if (left is not None and left < 0) or (right is not None and right < 0):
            raise ValueError(f"window must hold None, -1 or a size of at least 0, got {window}")
        if left is not None:
            seen &= j >= i + offset - left
        if right is not None:
            seen &= j <= i + offset + right
    return seen


def _weighted_sum(weights, rows, visible):
    """``weights @ rows`` in which a hidden pair adds nothing, even to NaN or infinity in rows.

    weights and visible are (..., M, N) with weight 0 at hidden pairs; rows is (..., N, D).
    """
    finite = np.isfinite(rows).all(axis=-1)
    total = weights @ np.where(finite[..., None], rows, 0.0)
    for n in np.flatnonzero(~finite.all(axis=tuple(range(finite.ndim - 1)))):
        special = ~finite[..., n, None, None]
        term = weights[..., :, n, None] * rows[..., None, n, :]
        total = total + np.where(visible[..., :, n, None] & special, term, 0.0)
    return total


def _check_shapes(q, k, v):
    """q, k, v as (..., H, rows, D): the sizes that must agree."""
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have q's head dim {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[-3:-1] != k.shape[-3:-1]:
        raise ValueError(f"v must have k's heads and length {k.shape[-3:-1]}, got {v.shape[-3:-1]}")
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"q's heads must be a multiple of k's, got {heads} and {kv_heads}")
