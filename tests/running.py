"""Runs a case on a home and hands back NumPy results; shared by the test modules."""

from __future__ import annotations

import numpy as np
from dense import Oracle, check_backward, check_forward
from strategies import forced_tile, place

import cuflash


def forward(home, case, placed, out=False):
    """attention on the placed arrays: (out, lse) as arrays of the home."""
    target = placed["out"].array if out else None
    with forced_tile(case, home):
        result = cuflash.attention(
            *(placed[n].array for n in "qkv"), **case.options, out=target, return_lse=True
        )
    if out:
        assert result[0] is target
    return result


def backward(home, case, placed, out, lse, dlse=None, **keywords):
    """attention_backward on the placed arrays: AttentionGrads of the home."""
    with forced_tile(case, home):
        return cuflash.attention_backward(
            placed["dout"].array,
            *(placed[n].array for n in "qkv"),
            out,
            lse,
            dlse=dlse,
            **case.options,
            **keywords,
        )


def to_numpy(home, arrays):
    return tuple(None if a is None else home.asnumpy(a) for a in arrays)


def attend(home, case, arrays):
    """Forward on plain NumPy arrays {q, k, v, ...} of any strides: (out, lse) in NumPy."""
    with forced_tile(case, home):
        result = cuflash.attention(
            *(home.to_home(arrays[n]) for n in "qkv"), **case.options, return_lse=True
        )
    return to_numpy(home, result)


def differentiate(home, case, arrays, dlse=True, deterministic=True, need=("q", "k", "v")):
    """Forward and backward on NumPy arrays: (out, lse, dq, dk, dv) in NumPy."""
    q, k, v, dout = (home.to_home(arrays[n]) for n in ("q", "k", "v", "dout"))
    poison = home.to_home(np.full_like(arrays["dout"], np.nan))
    dlse = home.to_home(arrays["dlse"]) if dlse else None
    with forced_tile(case, home):
        out, lse = cuflash.attention(q, k, v, **case.options, out=poison, return_lse=True)
        grads = cuflash.attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dlse=dlse,
            need=need,
            deterministic=deterministic,
            **case.options,
        )
    return to_numpy(home, (out, lse, *grads[:3]))


def oracle_of(case, placed, dlse=None):
    """The oracle for what the placed arrays really hold (a stride of 0 repeats an entry)."""
    return Oracle(case, *(placed[n].values for n in ("q", "k", "v", "dout")), dlse)


def check(home, case, arrays=None, strict=False, dlse=True, gradients=True):
    """The whole of a case against the oracle: out (into a guarded `out`), lse, dq, dk, dv,
    untouched inputs.
    """
    arrays = case.arrays() if arrays is None else arrays
    placed = place(home, case, arrays)
    dlse_values = arrays["dlse"] if dlse else None
    oracle = oracle_of(case, placed, dlse_values)
    out, lse = forward(home, case, placed, out=True)
    lse_values = home.asnumpy(lse)
    check_forward(oracle, placed["out"].values, lse_values, strict)
    assert placed["out"].guard_unchanged(), "wrote outside of out"
    if gradients:
        grads = backward(
            home, case, placed, out, lse, None if dlse is False else home.to_home(dlse_values)
        )
        check_backward(oracle, to_numpy(home, grads[:3]), strict)
        after = home.asnumpy(lse)
        assert np.array_equal(after, lse_values, equal_nan=True), "backward wrote into lse"
        assert placed["out"].guard_unchanged(), "backward wrote around out"
    for name in ("q", "k", "v", "dout"):
        assert placed[name].unchanged(), f"wrote into or around {name}"
    return oracle


def same_bits(*pairs):
    """Every pair of arrays agrees in every bit (NaN payloads aside)."""
    for got, want in pairs:
        if got is None and want is None:
            continue
        assert got.dtype == want.dtype and got.shape == want.shape
        got, want = (np.asarray(a, np.float64) for a in (got, want))
        assert np.array_equal(got, want, equal_nan=True)
        assert np.array_equal(np.signbit(got) | np.isnan(got), np.signbit(want) | np.isnan(want))
