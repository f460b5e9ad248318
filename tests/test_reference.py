"""cuflash.reference against loops, finite differences and the contract's examples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import reference


def looped(q, k, v, scale, sees):
    """out and lse of one head, element by element, with ``sees(i, j)``."""
    out = np.zeros((len(q), v.shape[1]))
    lse = np.full(len(q), -np.inf)
    for i in range(len(q)):
        seen = [j for j in range(len(k)) if sees(i, j)]
        if not seen:
            continue
        scores = [scale * sum(float(x) * float(y) for x, y in zip(q[i], k[j])) for j in seen]
        top = max(scores)
        total = sum(math.exp(s - top) for s in scores)
        lse[i] = top + math.log(total)
        for s, j in zip(scores, seen):
            out[i] += math.exp(s - lse[i]) * v[j]
    return out, lse


def normal(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


BANDS = [
    ({}, lambda i, j, o: True),
    ({"causal": True}, lambda i, j, o: j <= i + o),
    ({"causal": "bottom_right"}, lambda i, j, o: j <= i + o),
    ({"causal": "top_left"}, lambda i, j, o: j <= i),
    ({"causal": True, "causal_offset": -1}, lambda i, j, o: j <= i - 1),
    ({"window": (1, 2)}, lambda i, j, o: i + o - 1 <= j <= i + o + 2),
    ({"window": (0, None), "causal_offset": 2}, lambda i, j, o: j >= i + 2),
    ({"window": (-1, 0)}, lambda i, j, o: j <= i + o),
    ({"window": (3, 3), "causal": "top_left"}, lambda i, j, o: i - 3 <= j <= i),
]


@pytest.mark.parametrize("seqlens", [(1, 1), (3, 7), (7, 3), (5, 5), (4, 0)])
@pytest.mark.parametrize("options, sees", BANDS)
@pytest.mark.parametrize("scale", [None, 0.0, -0.7])
def test_against_loops(seqlens, options, sees, scale):
    seqlen_q, seqlen_k = seqlens
    q, k, v = normal(0, (seqlen_q, 4), (seqlen_k, 4), (seqlen_k, 3))
    out, lse = reference.attention(q, k, v, scale=scale, **options)
    offset = seqlen_k - seqlen_q
    wanted = looped(q, k, v, 0.5 if scale is None else scale, lambda i, j: sees(i, j, offset))
    np.testing.assert_allclose(out, wanted[0], rtol=0, atol=1e-14)
    np.testing.assert_allclose(lse, wanted[1], rtol=0, atol=1e-14)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_gradients_are_finite_differences(data):
    draw = data.draw
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    seqlen_q, seqlen_k = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    leading = st.sampled_from([(), (1,), (2,), (3, 1), (1, 2)])
    layout = draw(st.sampled_from(["bhsd", "bshd"]))
    options = draw(st.sampled_from(BANDS))[0]

    def shape(heads, length, width):
        middle = (heads, length) if layout == "bhsd" else (length, heads)
        return (*draw(leading), *middle, width)

    shapes = shape(heads, seqlen_q, 3), shape(kv_heads, seqlen_k, 3), shape(kv_heads, seqlen_k, 2)
    arrays = normal(1, *shapes)
    out, lse = reference.attention(*arrays, layout=layout, **options)
    assert lse.shape == out.shape[:-1]
    dout, dlse, *steps = normal(2, out.shape, lse.shape, *shapes)
    seen = np.isfinite(lse)

    def loss(inputs):
        out, lse = reference.attention(*inputs, layout=layout, **options)
        return np.sum(out * dout) + np.sum(lse[seen] * dlse[seen])

    grads = reference.attention_backward(dout, *arrays, dlse=dlse, layout=layout, **options)
    for n, (grad, step) in enumerate(zip(grads, steps)):
        assert grad.shape == arrays[n].shape and grad.dtype == np.float64
        sides = [
            [x + sign * 1e-5 * step if m == n else x for m, x in enumerate(arrays)]
            for sign in (1, -1)
        ]
        difference = (loss(sides[0]) - loss(sides[1])) / 2e-5
        assert abs(difference - np.sum(grad * step)) <= 1e-7 * (1 + abs(difference))


def test_two_dimensional_inputs_are_one_head():
    q, k, v = normal(3, (3, 4), (5, 4), (5, 2))
    out, lse = reference.attention(q, k, v)
    assert out.shape == (3, 2) and lse.shape == (3,)
    for layout, shape in (("bhsd", (2, 1, 3, 2)), ("bshd", (2, 3, 1, 2))):
        many = np.broadcast_to(q, (2, 3, 4)).reshape(shape[:-1] + (4,))
        wide, wide_lse = reference.attention(many, k, v, layout=layout)
        assert wide.shape == shape and wide_lse.shape == shape[:-1]
        np.testing.assert_array_equal(wide.reshape(2, 3, 2)[1], out)
        dq, dk, dv = reference.attention_backward(np.ones(shape), many, k, v, layout=layout)
        one = reference.attention_backward(np.ones((3, 2)), q, k, v)
        assert dq.shape == many.shape and dk.shape == k.shape and dv.shape == v.shape
        np.testing.assert_allclose(dk, 2 * one[1], atol=1e-14)
        np.testing.assert_allclose(dv, 2 * one[2], atol=1e-14)


def test_bshd_is_bhsd_with_axes_swapped():
    q, k, v, dout = normal(4, (2, 4, 3, 5), (2, 2, 6, 5), (2, 2, 6, 3), (2, 4, 3, 3))
    swapped = [np.swapaxes(x, -3, -2) for x in (q, k, v, dout)]
    out, lse = reference.attention(q, k, v, causal=True)
    out2, lse2 = reference.attention(*swapped[:3], causal=True, layout="bshd")
    np.testing.assert_array_equal(np.swapaxes(out2, -3, -2), out)
    np.testing.assert_array_equal(np.swapaxes(lse2, -2, -1), lse)
    grads = reference.attention_backward(dout, q, k, v, causal=True)
    grads2 = reference.attention_backward(swapped[3], *swapped[:3], causal=True, layout="bshd")
    for a, b in zip(grads, grads2):
        np.testing.assert_array_equal(np.swapaxes(b, -3, -2), a)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_hidden_pairs_contribute_nothing(bad):
    q, k, v, dout = normal(5, (2, 4, 3), (2, 6, 3), (2, 6, 3), (2, 4, 3))
    options = {"window": (1, 0)}
    out, lse = reference.attention(q, k, v, **options)
    grads = reference.attention_backward(dout, q, k, v, **options)
    k[:, 0] = v[:, 0] = bad  # hidden from all
    k[1, 5] = v[0, 5] = bad  # seen by query 3 only
    out2, lse2 = reference.attention(q, k, v, **options)
    grads2 = reference.attention_backward(dout, q, k, v, **options)
    np.testing.assert_array_equal(out2[:, :3], out[:, :3])
    np.testing.assert_array_equal(lse2[:, :3], lse[:, :3])
    np.testing.assert_array_equal(grads2[0][:, :3], grads[0][:, :3])
    for a, b in zip(grads2[1:], grads[1:]):
        np.testing.assert_array_equal(a[:, :4], b[:, :4])


def test_rows_that_see_nothing():
    q, k, v, dout, dlse = normal(6, (1, 4, 2), (1, 3, 2), (1, 3, 2), (1, 4, 2), (1, 4))
    k[0, :, 0] = -np.inf
    q[0, :2, 0] = 1
    q[0, 2:, 0] = np.nan
    dout[0, 0] = np.nan
    options = {"window": (0, 0), "causal_offset": 0}
    out, lse = reference.attention(q, k, v, **options)
    assert (out[0, :2] == 0).all() and (lse[0, :2] == -np.inf).all()
    assert (out[0, 3] == 0).all() and lse[0, 3] == -np.inf  # query 3 has no key
    assert np.isnan(out[0, 2]).all() and np.isnan(lse[0, 2])
    dq, dk, dv = reference.attention_backward(dout, q, k, v, dlse=dlse, **options)
    assert (dq[0, [0, 1, 3]] == 0).all() and (dk[0, :2] == 0).all() and (dv[0, :2] == 0).all()


def test_large_scores():
    q, k = np.full((1, 1), 1024.0), np.full((3, 1), 97.0)
    out, lse = reference.attention(q, k, np.eye(3), scale=1.0)
    np.testing.assert_allclose(out, np.full((1, 3), 1 / 3), rtol=1e-15)
    assert lse[0] == pytest.approx(99328 + math.log(3), abs=1e-10)
    _, _, dv = reference.attention_backward(np.ones((1, 3)), q, k, np.eye(3), scale=1.0)
    np.testing.assert_allclose(dv, np.full((3, 3), 1 / 3), rtol=1e-15)


def test_every_float_dtype_and_stride():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        q, k, v = (x.astype(dtype) for x in normal(7, (2, 5, 4), (2, 6, 4), (2, 6, 3)))
        out, lse = reference.attention(q, k, v)
        assert out.dtype == lse.dtype == np.float64
        views = [np.asfortranarray(x) for x in (q, k, v)]
        np.testing.assert_array_equal(reference.attention(*views)[0], out)
        wide = [np.repeat(x, 2, axis=-1)[..., ::-1][..., ::2][..., ::-1] for x in (q, k, v)]
        np.testing.assert_array_equal(reference.attention(*wide)[0], out)


@pytest.mark.parametrize(
    "shapes", [((0, 2, 3, 4), (2, 5, 4)), ((0, 3, 4), (0, 5, 4)), ((2, 0, 4), (2, 5, 4)),
               ((2, 3, 4), (2, 0, 4)), ((0, 4), (0, 4)), ((0, 3, 4), (2, 5, 4))],
)
def test_zero_sizes(shapes):
    q, k = (np.zeros(s) for s in shapes)
    out, lse = reference.attention(q, k, k)
    assert out.shape == q.shape and (out == 0).all()
    assert lse.shape == q.shape[:-1]
    for grad, x in zip(reference.attention_backward(np.zeros(out.shape), q, k, k), (q, k, k)):
        assert grad.shape == x.shape and (grad == 0).all()


@pytest.mark.parametrize(
    "shapes, options, words",
    [
        (((4,), (3, 4), (3, 4)), {}, "q must have at least 2 axes"),
        (((2, 3, 4), (2, 3, 5), (2, 3, 4)), {}, "head dim"),
        (((2, 3, 4), (2, 3, 4), (2, 4, 4)), {}, "v must have"),
        (((3, 3, 4), (2, 3, 4), (2, 3, 4)), {}, "multiple"),
        (((2, 3, 4),) * 3, {"layout": "sbhd"}, "layout"),
        (((2, 3, 4),) * 3, {"causal": "left"}, "causal"),
        (((2, 3, 4),) * 3, {"causal_offset": 1}, "no effect"),
        (((2, 3, 4),) * 3, {"causal": "top_left", "causal_offset": 1}, "conflicts"),
        (((2, 3, 4),) * 3, {"window": (-2, 0)}, "window"),
    ],
)
def test_bad_arguments(shapes, options, words):
    with pytest.raises(ValueError, match=words):
        reference.attention(*(np.zeros(s) for s in shapes), **options)


def test_unknown_options_and_wrong_gradients():
    x = np.zeros((1, 2, 3))
    with pytest.raises(TypeError, match="dropout"):
        reference.attention(x, x, x, dropout=0.1)
    with pytest.raises(ValueError, match="dout must have shape"):
        reference.attention_backward(x[0], x, x, x)
    with pytest.raises(ValueError, match="dlse must have shape"):
        reference.attention_backward(x, x, x, x, dlse=np.zeros((2, 1)))
