"""Faults reported for other attention kernels' options, each as a test of the right value.

As test_bugs.py, with the same numbers.
"""

from __future__ import annotations

import numpy as np
import pytest
from score_cases import check, run
from strategies import Case

import cuflash


def square(n, **facts):
    return Case(n, n, **facts)


def test_bug1_mask_with_hidden_rows(home):
    case, mask = square(8), np.zeros((8, 8), bool)
    mask[:4, :4] = True
    arrays = {**case.arrays(), **{n: np.ones((1, 8, 8), np.float32) for n in "qkv"}}
    out = run(home, case, arrays, dict(mask=mask))[0][0]
    assert np.array_equal(out[0], np.repeat([[1.0], [0.0]], 4, axis=0) * np.ones(8))


def test_bug5_blocks_that_reset(home):
    ids = np.searchsorted([5, 11], np.arange(16), side="right")
    bias = np.where(ids[:, None] == ids, 0, -np.inf).astype(np.float32)
    check(home, square(16), options=dict(bias=bias))
    check(home, square(16), options=dict(q_segment_ids=ids))


def test_bug7_hidden_row_and_dropout(home):
    mask = np.ones((3, 4), bool)
    mask[0] = False
    case = Case(3, 4, 4, 4, 2, 2, (2,), (2,), (2,))
    check(home, case, options=dict(mask=mask, dropout_p=0.5, seed=1))


@pytest.mark.parametrize("length", (1, 5, 43, 77))
def test_bug61_any_row_length(home, length):
    bias = np.random.default_rng(0).standard_normal((1, 1, 6, length)).astype(np.float16)
    facts = dict(batch_q=(1,), batch_k=(1,), batch_v=(1,), dtype="float16")
    check(home, Case(6, length, **facts), options=dict(bias=bias))


def test_bug65_every_mask_counts(home):
    case = square(9)
    arrays, bias = case.arrays(), np.zeros((9, 9), np.float32)
    plain = run(home, case, arrays, dict(bias=bias))[0][0]
    bias[:, 0] = -np.inf
    assert (run(home, case, arrays, dict(bias=bias))[0][0] != plain).all()


@pytest.mark.parametrize("shape", ((10, 4, 20), (128, 256), (3, 4, 4)))
def test_bug63_67_73_masks_of_other_shapes_raise(shape):
    x = np.ones((2, 4, 4))
    for options in (dict(mask=np.ones(shape, bool)), dict(bias=np.ones(shape))):
        with pytest.raises(ValueError, match="its shape"):
            cuflash.attention(x, x, x, **options)


@pytest.mark.parametrize("shape", ((1, 1, 9, 5), (2, 1, 1, 5), (1, 4, 1, 1), (9, 1)))
def test_bug71_gradient_of_broadcast_bias(home, shape):
    bias = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    facts = dict(num_heads=4, num_kv_heads=2, batch_q=(2,), batch_k=(2,), batch_v=(2,))
    check(home, Case(9, 5, **facts), options=dict(bias=bias))


def test_bug75_rows_hidden_in_the_middle(home):
    def mod(b, h, i, j):
        return ((i // 4 == j // 4) | (j < i - 8)) & ((i < 16) | (i > 19))

    check(home, square(24), options=dict(mask_mod=mod))


def test_bug83_85_87_packed_with_empty_sequences():
    rng = np.random.default_rng(0)
    for lengths_q, lengths_k in (((0, 4), (3, 4)), ((3, 4), (0, 4)), ((1, 0, 1), (3, 0, 5))):
        cu = [[0, *map(int, np.cumsum(x))] for x in (lengths_q, lengths_k)]
        q = rng.standard_normal((cu[0][-1], 9, 4))
        k, v = rng.standard_normal((2, cu[1][-1], 3, 4))
        out, pull = cuflash.attention_varlen_vjp(q, k, v, *cu)
        grads = pull(np.ones_like(out))
        assert all(np.isfinite(x).all() for x in (out, *grads))
        first = lengths_q[0], lengths_k[0]
        if 0 in first:
            assert not out[: first[0]].any() and not grads.dk[: first[1]].any()
            assert not grads.dv[: first[1]].any()


@pytest.mark.parametrize("lens", (dict(kv_lens=np.array([3, 8])), dict(q_lens=np.array([2, 0]))))
def test_bug99_either_length_alone(home, lens):
    check(home, Case(5, 8, batch_q=(2,), batch_k=(2,), batch_v=(2,)), options=lens)


def test_bug177_caps_do_not_mix(home):
    for cap in (1.0, 2.0, 1.0):
        check(home, square(9, values="peaked", dtype="float64"), options=dict(softcap=cap))


@pytest.mark.parametrize("heads", (3, 12, 40))
def test_bug179_181_alibi_counts_from_the_end(home, heads):
    slopes = np.ones(heads, np.float32)
    check(home, Case(1, 5, num_heads=heads, num_kv_heads=heads), options=dict(alibi_slopes=slopes))
    check(home, Case(3, 129, num_heads=heads), options=dict(alibi_slopes=slopes))


def test_bug183_drop_after_normalising(home):
    case = square(4, causal=True)
    check(home, case, options=dict(dropout_p=0.9, seed=0))
    options = dict(dropout_p=0.9, seed=0), {}
    lse, plain = (run(home, case, case.arrays(), o)[0][1] for o in options)
    assert np.allclose(lse, plain, rtol=1e-6)


def test_bug185_one_mask_forward_and_backward(home):
    n = 32
    case, eye = Case(n, n, n, n, scale=0.0), np.eye(n, dtype=np.float32)[None]
    arrays = {**case.arrays(), "v": eye, "dout": eye, "dlse": np.zeros((1, n), np.float32)}
    out, _, _, _, dv, *_ = run(home, case, arrays, dict(dropout_p=0.5, seed=9))[0]
    kept = cuflash.dropout_mask(9, 1, 1, n, n, 0.5)[0]
    assert np.array_equal(out > 0, kept) and np.array_equal(dv > 0, kept.swapaxes(-1, -2))


def test_bug187_sink_of_a_hidden_row(home):
    case, sink = square(4), np.array([0.3], np.float32)
    options = dict(sinks=sink, mask=np.zeros((4, 4), bool))
    (out, lse, *_), _ = run(home, case, case.arrays(), options)
    assert not out.any() and (lse == sink[0]).all()
