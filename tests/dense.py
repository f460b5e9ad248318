"""The oracle: the float64 reference, a plain implementation in the call's dtype, and rule C15.

C15 allows twice the error of the plain (score-matrix) implementation plus one rounding of the
result. On a small array the plain error can be zero by luck, so the rule also allows a first-order
bound of the rounding that any implementation with these dtypes must commit: scores and sums in
float32 (float64), one rounding of P and of dS to a 16-bit dtype. `strict=True` leaves the bound
out; it is meant for arrays large enough for the plain error to be typical.
"""

from __future__ import annotations

import functools

import numpy as np
from conftest import np_dtype

from cuflash import reference

ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}


def visible(seqlen_q, seqlen_k, causal=False, causal_offset=None, window=None):
    """Which key each query sees, (L, S) bool: rules C3 and C4, word for word."""
    offset = seqlen_k - seqlen_q if causal_offset is None else causal_offset
    offset = 0 if causal == "top_left" else offset
    i, j = np.ogrid[:seqlen_q, :seqlen_k]
    seen = np.ones((seqlen_q, seqlen_k), bool)
    if causal:
        seen &= j <= i + offset
    left, right = (None, None) if window is None else (None if n == -1 else n for n in window)
    if left is not None:
        seen &= j >= i + offset - left
    if right is not None:
        seen &= j <= i + offset + right
    return seen


def swap(array):
    return array.swapaxes(-1, -2)


def heads_first(array, layout, axis=-3):
    """From the call's layout to (..., H, L, D); for lse axis=-2."""
    return array if layout == "bhsd" else array.swapaxes(axis, axis + 1)


def clean(array):
    """float64 with every NaN and inf as 0, for sizes and bounds."""
    return np.nan_to_num(np.asarray(array, np.float64), nan=0.0, posinf=0.0, neginf=0.0)


class Oracle:
    """What a case must give: reference results, plain results and bounds, computed when first asked
    for.
    """

    def __init__(self, case, q, k, v, dout=None, dlse=None):
        self.case, self.inputs, self.dout, self.dlse = case, (q, k, v), dout, dlse
        band = {n: x for n, x in case.options.items() if n in ("causal", "causal_offset", "window")}
        self.seen = visible(case.seqlen_q, case.seqlen_k, **band)
        self.u = ROUNDOFF["float64" if case.dtype == "float64" else "float32"]
        self.t = ROUNDOFF[case.dtype] if case.dtype in ("float16", "bfloat16") else 0.0
        self.floor = SMALLEST[case.dtype]

    # The reference

    @functools.cached_property
    def forward(self):
        """out and lse in the call's layout, float64."""
        return reference.attention(*self.inputs, **self.case.options)

    @functools.cached_property
    def backward(self):
        """dq, dk, dv in the shapes of q, k, v, float64."""
        return reference.attention_backward(
            self.dout, *self.inputs, dlse=self.dlse, **self.case.options
        )

    # One full batch, one key head a query head, heads before rows

    def expand(self, array, heads=None):
        array = heads_first(np.asarray(array), self.case.layout)
        array = np.broadcast_to(array, (*self.case.batch, *array.shape[-3:]))
        return array if heads is None else np.repeat(array, self.case.group, axis=-3)

    def expanded(self, dtype):
        case = self.case
        q, k, v = (clean(x).astype(dtype) for x in self.inputs)
        return self.expand(q), self.expand(k, case.num_kv_heads), self.expand(v, case.num_kv_heads)

    def reduce(self, array, shape):
        """Sum an expanded gradient over the group and the broadcast axes: (..., H, L, D) of the
        input.
        """
        heads = shape[-3] if self.case.layout == "bhsd" else shape[-2]
        group = self.case.group if heads == self.case.num_kv_heads else 1
        array = array.reshape(*array.shape[:-3], heads, group, *array.shape[-2:]).sum(axis=-3)
        batch, own = self.case.batch, (1,) * (len(self.case.batch) + 3 - len(shape)) + shape[:-3]
        axes = tuple(a for a, (full, n) in enumerate(zip(batch, own)) if full != n)
        array = array.sum(axis=axes, keepdims=True)
        return array.reshape(*shape[:-3], *array.shape[-3:])

    # A plain implementation, as a framework would write it

    def plain_weights(self, work):
        q, k, _ = self.expanded(work)
        with np.errstate(all="ignore"):
            scores = np.where(self.seen, (q @ swap(k)) * work.type(self.case.scale_value), -np.inf)
            top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
            p = np.exp(scores - np.where(np.isfinite(top), top, 0))
            total = p.sum(axis=-1, keepdims=True, dtype=work)
            lse = np.where(total > 0, np.log(total) + top, -np.inf)[..., 0]
        return p / np.where(total > 0, total, 1), lse

    def round(self, array):
        """Round to a 16-bit call's dtype; wider dtypes have nothing to round."""
        return array.astype(np_dtype(self.case.dtype)).astype(array.dtype) if self.t else array

    @functools.cached_property
    def plain_forward(self):
        work = np.dtype("float64" if self.case.dtype == "float64" else "float32")
        p, lse = self.plain_weights(work)
        out = self.round(self.round(p) @ self.expanded(work)[2])
        return out.astype(np.float64), lse.astype(np.float64)

    @functools.cached_property
    def plain_backward(self):
        work = np.dtype("float64" if self.case.dtype == "float64" else "float32")
        q, k, v = self.expanded(work)
        p, _ = self.plain_weights(work)
        dout, scale = self.expand(clean(self.dout).astype(work)), work.type(self.case.scale_value)
        dp = dout @ swap(v)
        delta = (p * dp).sum(axis=-1, keepdims=True) - self.row_dlse().astype(work)
        ds = self.round(p * (dp - delta))
        grads = (ds @ k) * scale, (swap(ds) @ q) * scale, swap(self.round(p)) @ dout
        return tuple(
            self.round(self.reduce(g, x.shape)).astype(np.float64)
            for g, x in zip(grads, self.inputs)
        )

    def row_dlse(self):
        if self.dlse is None:
            return np.zeros((1, 1))
        return heads_first(clean(self.dlse), self.case.layout, axis=-2)[..., None]

    # First-order bounds, elementwise, expanded

    @functools.cached_property
    def parts(self):
        """p and lse, the error of a score (..., H, L, 1), and the relative error of p."""
        q, k, _ = self.expanded(np.dtype(np.float64))
        p, lse = self.plain_weights(np.dtype(np.float64))
        # A sum of D rounded products: errors grow like the root of D, in the size of the partial
        # sums.
        size = abs(q @ swap(k)) + np.sqrt(q**2 @ swap(k**2))
        size = np.where(self.seen, abs(self.case.scale_value) * size, 0)
        steps = 2 + self.case.head_dim**0.5 / 2
        e_score = self.u * (steps * size.max(axis=-1, keepdims=True, initial=0) + 4)
        return p, lse, e_score, 2 * e_score + self.t

    def sums(self, length):
        """Relative error of a sum: every partial sum may be rounded the same way, until it is done
        in blocks.
        """
        return self.u * (4 + min(length / 2, 4 * length**0.5))

    @functools.cached_property
    def bound_forward(self):
        p, lse, e_score, e_p = self.parts
        v = abs(self.expanded(np.dtype(np.float64))[2])
        out = (e_p + self.sums(self.case.seqlen_k)) * (p @ v) + self.floor * (self.seen @ v)
        return out, e_score[..., 0] + self.u * (np.where(np.isfinite(lse), abs(lse), 0) + 8)

    @functools.cached_property
    def bound_backward(self):
        case, roundoff = self.case, ROUNDOFF[self.case.dtype]
        p, _, _, e_p = self.parts
        q, k, v = self.expanded(np.dtype(np.float64))
        dout, scale = self.expand(clean(self.dout)), abs(case.scale_value)
        dp, out = dout @ swap(v), p @ v
        ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True) + self.row_dlse())
        dp_size = abs(dout) @ swap(abs(v))
        e_delta = (abs(dout) * (self.bound_forward[0] + 2 * roundoff * abs(out))).sum(
            -1, keepdims=True
        )
        e_delta = e_delta + self.u * abs(self.row_dlse())
        e_ds = p * (self.sums(case.head_dim_v) * dp_size + e_delta) + (e_p + self.t) * abs(ds)
        e_ds = np.where(self.seen, e_ds + self.floor, 0)
        size, sums_k, sums_q = abs(ds), self.sums(case.seqlen_k), self.sums(case.seqlen_q)
        q, k, dout = abs(q), abs(k), abs(dout)
        dq = scale * ((e_ds + sums_k * size) @ k)
        dk = scale * (swap(e_ds + sums_q * size) @ q)
        dv = swap((e_p + sums_q) * p + self.floor * self.seen) @ dout
        bounds = []
        for grad, want, x in zip((dq, dk, dv), self.backward, self.inputs):
            reduced = self.reduce(grad, x.shape)
            if (
                len(case.batch) and x.shape[:-3] != case.batch
            ):  # each batch entry may be rounded first
                reduced = reduced + roundoff * self.reduce(abs(grad), x.shape)
                reduced = reduced + roundoff * abs(heads_first(np.asarray(want), case.layout))
            bounds.append(reduced)
        return tuple(bounds)


def compare(name, got, want, plain, bound, dtype, axes, strict=False):
    """Rule C15 for one result, head by head. All arrays have heads before rows; axes are those of
    one head. ``bound``: an array, or a function that computes it, called only where twice the plain
    error is not enough: it takes as long as all the rest.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {got.shape}, expected {want.shape}")
    if got.size == 0:
        return
    odd = ~np.isfinite(want) | ~np.isfinite(got)
    if not np.array_equal(got[odd], want[odd], equal_nan=True):
        where = np.argwhere(odd & ~((got == want) | (np.isnan(got) & np.isnan(want))))[0]
        where = tuple(int(n) for n in where)
        raise AssertionError(f"{name}{list(where)}: {got[where]}, expected {want[where]}")

    def largest(array):
        return np.where(odd, 0, abs(array)).max(axis=axes)

    with np.errstate(invalid="ignore"):
        error, allowed = largest(got - want), 2 * largest(plain - want)
    rounding = 2 * ROUNDOFF[dtype] * largest(want) + SMALLEST[dtype]
    if not strict and not (error <= allowed + rounding).all():
        bound = bound() if callable(bound) else bound
        allowed = np.maximum(allowed, largest(np.broadcast_to(bound, want.shape)))
    allowed = allowed + rounding
    if not (error <= allowed).all():
        head = np.unravel_index(np.argmax(error / allowed), error.shape)
        head = tuple(int(n) for n in head)
        raise AssertionError(
            f"{name}, head {list(head)}: error {error[head]:.3g}, allowed {allowed[head]:.3g}, "
            f"plain implementation {largest(plain - want)[head]:.3g}, "
            f"largest {largest(want)[head]:.3g}"
        )


def check_forward(oracle, out, lse, strict=False, bounds=None):
    """out and lse (NumPy, the call's layout and dtypes) against the oracle. ``bounds``: a function
    of both's bounds, in place of the oracle's.
    """
    case = oracle.case
    assert out.dtype == np_dtype(case.dtype)
    assert lse.dtype == ("float64" if case.dtype == "float64" else "float32")
    want_out, want_lse = oracle.forward
    plain_out, plain_lse = oracle.plain_forward
    bounds = bounds or (lambda: oracle.bound_forward)
    compare(
        "out",
        heads_first(out, case.layout),
        heads_first(want_out, case.layout),
        plain_out,
        lambda: bounds()[0],
        case.dtype,
        (-2, -1),
        strict,
    )
    compare(
        "lse",
        heads_first(lse, case.layout, -2),
        heads_first(want_lse, case.layout, -2),
        plain_lse,
        lambda: bounds()[1],
        str(lse.dtype),
        (-1,),
        strict,
    )


def check_backward(oracle, grads, strict=False):
    """dq, dk, dv (NumPy; None where not asked for) against the oracle."""
    case = oracle.case
    for index, (name, got) in enumerate(zip(("dq", "dk", "dv"), grads)):
        if got is not None:
            assert got.dtype == np_dtype(case.dtype)
            assert got.shape == oracle.inputs[index].shape, f"{name}: shape {got.shape}"
            compare(
                name,
                heads_first(got, case.layout),
                heads_first(oracle.backward[index], case.layout),
                oracle.plain_backward[index],
                lambda index=index: oracle.bound_backward[index],
                case.dtype,
                (-2, -1),
                strict,
            )
