"""Calls of cuflash.cpu through the interface that api.py uses, checked against the reference."""

from __future__ import annotations

import math
import tracemalloc

import ml_dtypes
import numpy as np

from cuflash import cpu, reference
from cuflash.problem import Band, Problem

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
ALL = (True, True, True)


def problem_of(q, k, v, scale=None, causal=False, causal_offset=None, window=None):
    """The Problem of arrays (*batch, H, rows, D), its band worked out from the contract."""
    seqlen_q, seqlen_k = q.shape[-2], k.shape[-2]
    offset = causal_offset
    if offset is None:
        offset = 0 if causal == "top_left" else seqlen_k - seqlen_q
    lo, hi = -seqlen_q, seqlen_k
    if causal:
        hi = min(hi, offset)
    if window is not None:
        left, right = window
        lo = lo if left is None else max(lo, offset - left)
        hi = hi if right is None else min(hi, offset + right)
    lo, hi = min(lo, seqlen_k), max(hi, -seqlen_q - 1)
    return Problem(
        dtype=q.dtype.name,
        batch=q.shape[:-3],
        num_heads=q.shape[-3],
        num_kv_heads=k.shape[-3],
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        scale=1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        band=Band(lo, hi) if causal or window is not None else None,
    )


def lse_dtype(q):
    return np.float64 if q.dtype == np.float64 else np.float32


def forward(q, k, v, **options):
    """out and lse, from outputs that start as NaN so that an unwritten element shows."""
    out = np.full(q.shape[:-1] + v.shape[-1:], np.nan, q.dtype)
    lse = np.full(q.shape[:-1], np.nan, lse_dtype(q))
    cpu.forward(problem_of(q, k, v, **options), q, k, v, out, lse)
    return out, lse


def backward(dout, q, k, v, out, lse, dlse=None, need=ALL, **options):
    grads = [np.full(x.shape, np.nan, x.dtype) if n else None for x, n in zip((q, k, v), need)]
    cpu.backward(problem_of(q, k, v, **options), dout, q, k, v, out, lse, dlse, *grads, True)
    return grads


def arrays(seed, dtype, batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v, size=1.0):
    """q, k, v, dout, dlse."""
    rng = np.random.default_rng(seed)
    shapes = (
        (heads, seqlen_q, head_dim),
        (kv_heads, seqlen_k, head_dim),
        (kv_heads, seqlen_k, head_dim_v),
        (heads, seqlen_q, head_dim_v),
    )
    made = [rng.standard_normal((*batch, *s)).astype(DTYPES[dtype]) for s in shapes]
    made[0] = (made[0].astype(np.float64) * size).astype(DTYPES[dtype])
    dlse = rng.standard_normal((*batch, heads, seqlen_q))
    return *made, dlse.astype(np.float64 if dtype == "float64" else np.float32)


def close(name, got, want, dtype, slack=1.0):
    """Same NaN and infinities; finite values within a few roundings of the largest one."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=name)
    np.testing.assert_array_equal(got[np.isinf(want)], want[np.isinf(want)], err_msg=name)
    finite = np.isfinite(want)
    if finite.any():
        error = np.abs(got[finite] - want[finite]).max()
        allowed = 40 * slack * ROUNDING[dtype] * max(1.0, np.abs(want[finite]).max())
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def check(q, k, v, dout, dlse=None, slack=1.0, **options):
    dtype = q.dtype.name
    out, lse = forward(q, k, v, **options)
    want_out, want_lse = reference.attention(q, k, v, **options)
    close("out", out, want_out, dtype, slack)
    close("lse", lse, want_lse, lse.dtype.name, slack)
    grads = backward(dout, q, k, v, out, lse, dlse, **options)
    wanted = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    for name, got, want in zip(("dq", "dk", "dv"), grads, wanted):
        close(name, got, want, dtype, slack)
    return out, lse, grads


def peak_bytes(call):
    """The most that Python and NumPy had allocated at once."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
