"""cuflash.cpu against the dense reference: shapes, strides, bands, special and extreme values."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from cpu_calls import DTYPES, ROUNDING, arrays, backward, check, close, forward, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import cpu, reference


@st.composite
def layouts(draw, array):
    """The same values with other strides: permuted axes, a step, a reversed axis, an odd offset."""
    kinds = "as is", "transposed", "stepped", "reversed", "offset", "unaligned"
    kind = draw(st.sampled_from(kinds))
    if kind == "transposed":
        return np.ascontiguousarray(array.T).T
    if kind == "stepped":
        wide = np.full((*array.shape[:-1], 2 * array.shape[-1] + 1), np.nan, array.dtype)
        view = wide[..., : 2 * array.shape[-1] : 2]
    elif kind == "reversed":
        view = np.empty_like(array)[..., ::-1, ::-1]
    elif kind == "offset":
        view = np.full((array.size + 1,), np.nan, array.dtype)[1:].reshape(array.shape)
    elif kind == "unaligned":
        raw = np.empty(array.nbytes + 1, np.uint8)[1:]
        view = raw.view(array.dtype).reshape(array.shape)
    else:
        return array
    view[...] = array
    return view


@st.composite
def band_options(draw, seqlen_q, seqlen_k):
    kind = draw(st.sampled_from(["none", "causal", "top_left", "offset", "window", "both"]))
    options = {"scale": draw(st.sampled_from([None, 0.0, -0.3, 1.0]))}
    if kind in ("causal", "both"):
        options["causal"] = True
    if kind == "top_left":
        options["causal"] = "top_left"
    if kind == "offset":
        options["causal"] = True
        options["causal_offset"] = draw(st.integers(-seqlen_q - 2, seqlen_k + 2))
    if kind in ("window", "both") or (kind == "offset" and draw(st.booleans())):
        side = st.none() | st.integers(0, 40)
        options["window"] = (draw(side), draw(side))
    return options


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_small_shapes_strides_and_bands(data):
    draw = data.draw
    batch = draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)]))
    kv_heads = draw(st.integers(0, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    seqlen_q, seqlen_k = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    head_dim, head_dim_v = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    dtype = draw(st.sampled_from(list(DTYPES)))
    *made, dlse = arrays(1, dtype, batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v)
    q, k, v, dout = (draw(layouts(x)) for x in made)
    dlse = draw(st.sampled_from([None, dlse]))
    check(q, k, v, dout, dlse, **draw(band_options(seqlen_q, seqlen_k)))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_many_tiles(data):
    draw = data.draw
    seqlen_q = draw(st.sampled_from([1, 255, 257, 700]))
    seqlen_k = draw(st.sampled_from([1, 511, 1025, 1600]))
    dtype = draw(st.sampled_from(["float32", "float64", "bfloat16"]))
    kv_heads = draw(st.integers(1, 2))
    q, k, v, dout, dlse = arrays(2, dtype, (), 2, kv_heads, seqlen_q, seqlen_k, 16, 8)
    options = draw(band_options(seqlen_q, seqlen_k))
    if options["scale"]:
        options["scale"] = None  # a scale of 1 makes scores of 16: other tests take large scores
    check(q, k, v, dout, dlse, **options)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("size", [1.0, 8.0, 100.0])
def test_peaked_scores(dtype, size):
    q, k, v, dout, dlse = arrays(3, dtype, (), 2, 1, 300, 1100, 32, 24, size)
    # The rounding of a score of this size is in every implementation's weights.
    check(q, k, v, dout, dlse, slack=4 * size, causal=True)


def plain(q, k, v, dout, causal):
    """The score-matrix implementation in the arrays' own dtype: out, dq, dk, dv."""
    scale = q.dtype.type(1 / math.sqrt(q.shape[-1]))
    s = (q @ k.mT) * scale
    if causal:
        rows, cols = s.shape[-2:]
        s = np.where(np.tri(rows, cols, cols - rows, dtype=bool), s, s.dtype.type(-np.inf))
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = dout @ v.mT
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale
    return p @ v, ds @ k, ds.mT @ q, p.mT @ dout


def results(q, k, v, dout, causal):
    """(name, by this library, by the reference, by score matrices) of out, dq, dk and dv."""
    out, lse = forward(q, k, v, causal=causal)
    got = out, *backward(dout, q, k, v, out, lse, causal=causal)
    want = (
        reference.attention(q, k, v, causal=causal)[0],
        *reference.attention_backward(dout, q, k, v, causal=causal),
    )
    return zip(("out", "dq", "dk", "dv"), got, want, plain(q, k, v, dout, causal))


def check_twice_the_plain_error(q, k, v, dout, causal):
    """C15 head by head: out, dq, dk and dv."""
    for name, g, w, p in results(q, k, v, dout, causal):
        error, plain_error = (np.abs(x - w).max(axis=(-2, -1)) for x in (g, p))
        rounding = 2.0**-24 * np.abs(w).max(axis=(-2, -1))
        assert (error <= 2 * plain_error + rounding).all(), name


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, causal",
    [(1200, 1300, False), (300, 300, True), (20, 20, True), (40, 9, False)],
)
@pytest.mark.parametrize("head_dim", [3, 16, 64, 80, 128])
@pytest.mark.parametrize("size", [1.0, 4.0])
def test_error_at_most_twice_that_of_a_score_matrix(seqlen_q, seqlen_k, causal, head_dim, size):
    """C15 in float32, the largest error of each head."""
    q, k, v, dout, _ = arrays(5, "float32", (), 4, 4, seqlen_q, seqlen_k, head_dim, head_dim, size)
    check_twice_the_plain_error(q, k, v, dout, causal)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("seqlen_k", [40, 1500])
def test_hidden_pairs_contribute_nothing(bad, seqlen_k):
    q, k, v, dout, dlse = arrays(5, "float32", (2,), 4, 2, 300, seqlen_k, 8, 8)
    options = {"causal": True, "window": (seqlen_k // 2, 0)}
    k[0, 1, -1] = v[1, 0, -1] = bad  # seen by the last query only
    k[:, :, 0, 2] = v[:, :, 0] = bad  # seen by the first queries, or by none
    q[1, 2, 7] = dout[0, 3, 9] = bad
    check(q, k, v, dout, dlse, **options)


@pytest.mark.parametrize("seqlen_k", [5, 1100])
def test_rows_that_see_only_scores_of_minus_infinity(seqlen_k):
    q, k, v, dout, _ = arrays(6, "float64", (), 1, 1, 6, seqlen_k, 2, 3)
    q, k = np.abs(q), np.abs(k)
    q[0, 2] = -1
    k[0, :, 1] = np.inf
    q[0, :2] = -2
    q[0, 3:] = 0  # 0 * inf: NaN rows
    v[0, 3] = np.nan
    dout[0, 1] = np.nan
    out, lse, (dq, _, _) = check(q, k, v, dout)
    assert (out[0, :3] == 0).all() and (lse[0, :3] == -np.inf).all() and (dq[0, :3] == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_visible_nan_and_infinite_scores_make_the_row_nan(value):
    q, k, v, dout, _ = arrays(7, "float32", (), 1, 1, 300, 600, 4, 4)
    q[0, 5], k[0, 550] = np.abs(q[0, 5]), np.abs(k[0, 550])
    q[0, 5, 0] = value
    k[0, :, 0] = np.abs(k[0, :, 0])
    check(q, k, v, dout)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_large_scores_keep_their_third(dtype):
    q = np.full((1, 1, 1), 1024, DTYPES[dtype])
    k = np.full((1, 3, 1), 97, DTYPES[dtype])
    v = np.eye(3)[None].astype(DTYPES[dtype])
    dout = np.array([[[1, 2, 4]]], DTYPES[dtype])
    out, lse = forward(q, k, v, scale=1.0)
    dq, dk, dv = backward(dout, q, k, v, out, lse, scale=1.0)
    want = reference.attention_backward(dout, q, k, v, scale=1.0)
    close("out", out, reference.attention(q, k, v, scale=1.0)[0], dtype, slack=0.1)
    close("dk", dk, want[1], dtype, slack=0.25)
    close("dv", dv, want[2], dtype, slack=0.1)
    # dq is a sum of ds * 97 that cancels, and out's rounding is in ds.
    assert np.abs(dq.astype(np.float64)).max() <= 97 * 4 * ROUNDING[dtype]


def test_equal_huge_bfloat16_inputs_give_v():
    x = np.full((1, 1, 64), 133120.0, ml_dtypes.bfloat16)
    out, _, _ = check(x, x, x, x)
    assert (out == x).all()


@pytest.mark.parametrize("scale", [1e10, 1e30, -1e30])
def test_scores_up_to_1e30_give_no_nan(scale):
    q, k, v, dout, _ = arrays(8, "float32", (), 2, 1, 300, 1300, 16, 8)
    out, lse = forward(q, k, v, scale=scale / 16)
    best = np.argmax(np.sign(scale) * (q.astype(np.float64) @ k.mT), axis=-1)
    wanted = np.take_along_axis(v[[0, 0]], best[..., None], axis=-2)
    np.testing.assert_allclose(out, wanted, rtol=1e-6)
    for grad in backward(dout, q, k, v, out, lse, scale=scale / 16):
        assert np.isfinite(grad).all()


@pytest.mark.parametrize("size", [1e37, 1e-30])
def test_huge_and_tiny_values(size):
    q, k, v, dout, _ = arrays(9, "float32", (), 1, 1, 300, 700, 4, 4, size=6.0)
    big = (v.astype(np.float64) * size).astype(np.float32)
    out, _ = forward(q, k, big)
    want, _ = reference.attention(q, k, big)
    np.testing.assert_allclose(out / np.float32(size), want / size, rtol=0, atol=1e-4)
    assert np.isfinite(out).all()


def test_backward_of_a_part_uses_the_lse_of_the_whole():
    # Keys split in two, as in ring attention: each part's gradients with the merged out and lse.
    for size in (1.0, 40.0):
        q, k, v, dout, dlse = arrays(10, "float32", (), 2, 1, 300, 1200, 16, 8, size)
        cuts = slice(None, 700), slice(700, None)
        parts = [forward(q, k[:, cut], v[:, cut]) for cut in cuts]
        out, lse = np.empty_like(parts[0][0]), np.empty_like(parts[0][1])
        cpu.merge([o for o, _ in parts], [m for _, m in parts], out, lse)
        want_out, want_lse = reference.attention(q, k, v)
        close("out", out, want_out, "float32", 4 * size)
        close("lse", lse, want_lse, "float32", 4 * size)
        grads = [backward(dout, q, k[:, cut], v[:, cut], out, lse, dlse) for cut in cuts]
        got = (
            grads[0][0] + grads[1][0],
            np.concatenate([grads[0][1], grads[1][1]], axis=-2),
            np.concatenate([grads[0][2], grads[1][2]], axis=-2),
        )
        wanted = reference.attention_backward(dout, q, k, v, dlse=dlse)
        for name, g, w in zip(("dq", "dk", "dv"), got, wanted):
            close(name, g, w, "float32", 8 * size)


def test_merge_of_parts_that_saw_nothing():
    shape = (2, 3, 4)
    nothing = np.zeros(shape, np.float32), np.full(shape[:-1], -np.inf, np.float32)
    something = np.ones(shape, np.float32), np.full(shape[:-1], -1e5, np.float32)
    out, lse = np.empty(shape, np.float32), np.empty(shape[:-1], np.float32)
    cpu.merge([nothing[0], nothing[0]], [nothing[1], nothing[1]], out, lse)
    assert (out == 0).all() and (lse == -np.inf).all()
    nothing[0][...] = np.nan
    cpu.merge([nothing[0], something[0]], [nothing[1], something[1]], out, lse)
    assert (out == 1).all() and (lse == np.float32(-1e5)).all()


@pytest.mark.parametrize("need", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_only_the_needed_gradients(need):
    q, k, v, dout, dlse = arrays(11, "float32", (2,), 2, 1, 270, 530, 8, 4)
    out, lse = forward(q, k, v, causal=True)
    wanted = backward(dout, q, k, v, out, lse, dlse, causal=True)
    got = backward(dout, q, k, v, out, lse, dlse, need, causal=True)
    for g, w, n in zip(got, wanted, need):
        assert (g is None) == (not n)
        assert g is None or (g == w).all()


def test_broadcast_batch_views():
    q, k, v, dout, _ = arrays(12, "float32", (), 2, 2, 30, 50, 8, 4)
    q4, dout4 = (np.broadcast_to(x, (3, *x.shape)) for x in (q, dout))
    k4, v4 = (np.broadcast_to(x, (3, *x.shape)) for x in (k, v))
    out, lse = forward(q4, k4, v4)
    single, single_lse = forward(q, k, v)
    assert (out == single).all() and (lse == single_lse).all()
    for many, one in zip(
        backward(dout4, q4, k4, v4, out, lse), backward(dout, q, k, v, single, single_lse)
    ):
        assert (many == one).all()


def test_results_and_gradients_in_any_strides():
    q, k, v, dout, _ = arrays(13, "float32", (2,), 2, 1, 300, 600, 8, 4)
    problem = problem_of(q, k, v)
    out, lse = forward(q, k, v)
    odd_out = np.empty((4, 300, 2, 2), np.float32).T[..., ::-1]
    odd_lse = np.empty((300, 2, 4), np.float32).T[::2]
    cpu.forward(problem, q, k, v, odd_out, odd_lse)
    assert (odd_out == out).all() and (odd_lse == lse).all()
    grads = backward(dout, q, k, v, out, lse)
    odd = [np.empty(x.shape[::-1], np.float32).T[..., ::-1, :] for x in (q, k, v)]
    cpu.backward(problem, dout, q, k, v, odd_out, odd_lse, None, *odd, True)
    for a, b in zip(odd, grads):
        assert (a == b).all()


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, head_dim, size",
    [(64, 128, 32, 4.0), (64, 200, 64, 4.0), (200, 200, 64, 4.0), (300, 150, 12, 4.0)],
)
def test_few_rows_or_dims_of_peaked_scores(seqlen_q, seqlen_k, head_dim, size):
    """C15 over many heads, where a float32 product's own roundings would decide it."""
    heads = 48
    shape = (heads, heads, seqlen_q, seqlen_k, head_dim, head_dim)
    q, k, v, dout, _ = arrays(11, "float32", (), *shape, size)
    check_twice_the_plain_error(q, k, v, dout, False)


@pytest.mark.parametrize("size", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("seqlen_q, seqlen_k, causal", [(256, 256, True), (256, 700, False)])
def test_errors_of_many_heads(seqlen_q, seqlen_k, causal, size):
    """C15 without the luck of one element: the largest error of a head, of an implementation as
    precise as the score matrix (such as itself with its keys reversed), now and then is more than
    twice the other's. Of each head the root of the mean square, and the largest of all heads.
    """
    shape = 32, 32, seqlen_q, seqlen_k, 64, 64
    q, k, v, dout, _ = arrays(17, "float32", (), *shape, size)
    for name, g, w, p in results(q, k, v, dout, causal):
        error, plain_error = (np.sqrt(np.square(x - w).mean(axis=(-2, -1))) for x in (g, p))
        rounding = 2.0**-24 * np.sqrt(np.square(w).mean(axis=(-2, -1)))
        assert (error <= 2 * plain_error + rounding).all(), name
        error, plain_error = (np.abs(x - w).max() for x in (g, p))
        assert error <= 2 * plain_error + 2.0**-24 * np.abs(w).max(), name
