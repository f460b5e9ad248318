"""`out`: any strides, the same object back, and refused where it overlaps an input or itself."""

import numpy as np
import pytest

import cuflash


def randn(*shape):
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def good():
    return randn(2, 4, 5, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 3)


def out_views():
    """Views of shape (2, 4, 5, 3) whose elements all have a place of their own."""
    yield "contiguous", np.empty((2, 4, 5, 3), np.float32)
    yield "permuted", np.empty((3, 5, 2, 4), np.float32).transpose(2, 3, 1, 0)
    yield "sliced", np.empty((2, 4, 5, 9), np.float32)[..., 1:7:2]
    yield "reversed", np.empty((2, 4, 5, 3), np.float32)[:, ::-1, :, ::-1]
    yield "bshd", np.empty((2, 5, 4, 3), np.float32).swapaxes(1, 2)
    raw = np.empty(2 * 4 * 5 * 3 * 4 + 1, np.uint8)
    yield "unaligned", raw[1:].view(np.float32).reshape(2, 4, 5, 3)


@pytest.mark.parametrize("view", [pytest.param(x, id=name) for name, x in out_views()])
def test_out_with_any_strides(view):
    q, k, v = good()
    view[...] = np.nan
    result, lse = cuflash.attention(q, k, v, out=view, return_lse=True, causal=True)
    assert result is view
    expected, expected_lse = cuflash.attention(q, k, v, return_lse=True, causal=True)
    np.testing.assert_array_equal(view, expected)
    np.testing.assert_array_equal(lse, expected_lse)


def test_out_in_other_layouts():
    q, k, v = (x.swapaxes(1, 2) for x in good())
    out = np.empty((2, 5, 4, 3), np.float32)
    assert cuflash.attention(q, k, v, layout="bshd", out=out) is out
    np.testing.assert_array_equal(out.swapaxes(1, 2), cuflash.attention(*good()))
    flat = np.empty((5, 3), np.float32)
    assert cuflash.attention(q[0, :, 0], k[0, :, 0], v[0, :, 0], out=flat) is flat


def test_what_surrounds_out_is_left_alone():
    buffer = np.full((2, 4, 7, 9), 7, np.float32)
    inner = buffer[:, :, 1:6, 2:8:2]
    cuflash.attention(*good(), out=inner)
    np.testing.assert_array_equal(inner, cuflash.attention(*good()))
    inner[...] = 7
    assert (buffer == 7).all()


def overlaps():
    """(id, q, k, v, out, whether out overlaps an input)"""
    buffer = np.zeros(2000, np.float32)

    def part(start, *shape):
        return buffer[start : start + int(np.prod(shape))].reshape(shape)

    k, v = part(500, 5, 4), part(600, 5, 4)
    yield "apart", part(0, 5, 4), k, v, part(20, 5, 4), None
    yield "same as q", part(0, 5, 4), k, v, part(0, 5, 4), "q"
    yield "tail of k", part(0, 5, 4), k, v, part(519, 5, 4), "k"
    yield "touching v", part(0, 5, 4), k, v, part(620, 5, 4), None
    yield "reversed v", part(0, 5, 4), k, v[::-1], part(601, 5, 4), "v"
    packed = part(1000, 5, 4, 4)  # q, k, v and out side by side in every row
    yield "interleaved", *(packed[:, n] for n in range(4)), None
    yield "interleaved, shifted", packed[:, 0], packed[:, 1], packed[:, 2], packed[:, 2], "v"
    columns = part(1000, 5, 8)
    yield "even and odd columns", columns[:, ::2], k, v, columns[:, 1::2], None


@pytest.mark.parametrize(
    "q, k, v, out, culprit", [pytest.param(*c[1:], id=c[0]) for c in overlaps()]
)
def test_overlap_of_out(q, k, v, out, culprit):
    if culprit is None:
        assert cuflash.attention(q, k, v, out=out) is out
        return
    with pytest.raises(ValueError, match=f"out shares memory with {culprit}"):
        cuflash.attention(q, k, v, out=out)


@pytest.mark.parametrize("strides", [(0, 4), (16, 0), (8, 4), (4, 4)])
def test_out_that_overlaps_itself(strides):
    out = np.lib.stride_tricks.as_strided(np.zeros(100, np.float32), (5, 4), strides)
    with pytest.raises(ValueError, match="out: elements share memory"):
        cuflash.attention(*(randn(5, 4) for _ in "qkv"), out=out)


def test_out_of_odd_but_separate_strides():
    out = np.lib.stride_tricks.as_strided(np.zeros(100, np.float32), (5, 1, 4), (16, 3, -4))[2:, 0]
    q = randn(3, 4)
    np.testing.assert_array_equal(
        cuflash.attention(q, q, q, out=out.copy()), cuflash.attention(q, q, q)
    )
