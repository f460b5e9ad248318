"""Faults reported for other attention kernels, each as a test of the right value.

The numbers (bug 11, bug 43) are those of the log of reports that the tests were drawn from. Most
are cases of bug_cases.py, which must equal the reference forward and backward; those with a value
of their own follow here. Reports about options that this version does not have are absent.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bug_cases import EQUAL
from conftest import np_dtype
from dense import Oracle, compare
from running import attend, check, differentiate, same_bits, to_numpy
from strategies import Case

import cuflash


@pytest.mark.parametrize("bug", EQUAL, ids=lambda bug: f"bug{bug}")
def test_equals_reference(home, bug):
    for case in EQUAL[bug][1]:
        check(home, case)


def filled(case, **values):
    """Arrays of a case, the named ones filled with a value or a list that broadcasts."""
    arrays = case.arrays()
    for name, value in values.items():
        arrays[name][...] = value
    return arrays


def test_bug1_hidden_rows_are_zero(home):
    """The last rows see nothing: exactly 0, not NaN."""
    case = Case(8, 8, causal=True, causal_offset=-4)
    out, lse, dq, _, _ = differentiate(home, case, filled(case, q=1, k=1, v=1))
    assert np.array_equal(out[0], np.repeat([[0.0], [1.0]], 4, axis=0) * np.ones(8))
    assert np.all(np.isneginf(lse[0, :4])) and not dq[0, :4].any()


def test_bug11_no_finite_initial_maximum(home):
    case = Case(1, 1, 1, 1, scale=1.0)
    out, lse, *_ = differentiate(home, case, filled(case, q=1000, k=-100, v=3))
    assert out.item() == 3 and lse.item() == -1e5


@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_bug15_merge_with_empty_states(home, dtype):
    """Two empty states merge to an empty state, and an empty state changes nothing."""
    empty = np.zeros((2, 3), np_dtype(dtype)), np.full(2, -np.inf, np.float32)
    full = np.array([[1, 2, 3], [4, 5, 6]]).astype(np_dtype(dtype)), np.array(
        [0.25, -7], np.float32
    )
    for states, want in (
        ((empty, empty), empty),
        ((empty, full), full),
        ((full, empty, empty), full),
        ((full,), full),
    ):
        outs, lses = zip(*((home.to_home(o), home.to_home(lse)) for o, lse in states))
        same_bits(*zip(to_numpy(home, cuflash.merge(list(outs), list(lses))), want))


@pytest.mark.parametrize("name", ("k", "v"))
def test_bug17_nan_in_a_hidden_key(home, name):
    case = Case(2, 2, 4, 4, causal=True)
    arrays = case.arrays()
    clean = differentiate(home, case, arrays)
    arrays[name][0, 1] = np.nan
    dirty = differentiate(home, case, arrays)
    same_bits((dirty[0][0, 0], clean[0][0, 0]), (dirty[2][0, 0], clean[2][0, 0]))


def test_bug27_huge_equal_bfloat16(home):
    case = Case(1, 1, 64, 64, dtype="bfloat16")
    out, lse, *grads = differentiate(
        home, case, filled(case, q=133120.0, k=133120.0, v=133120.0), dlse=False
    )
    assert np.all(out.astype(float) == 133120.0) and np.all(np.isfinite(lse))
    assert (
        not grads[0].any()
        and not grads[1].any()
        and np.array_equal(grads[2], case.arrays()["dout"])
    )


def test_bug29_unscaled_half_product(home):
    case = Case(64, 64, 64, 64, dtype="float16")
    arrays = case.arrays()
    for name in "qk":
        arrays[name][...] = np.copysign(30, arrays[name])
    check(home, case, arrays)


@pytest.mark.parametrize("seqlen_k", (5_000, 65_537, pytest.param(350_000, id="350000")))
def test_bug33_and_bug201_result_does_not_depend_on_the_batch(home, seqlen_k):
    """Few queries, many keys: alone and as one of 32, bit for bit."""
    if not home.is_gpu and seqlen_k > 100_000:
        pytest.skip("the long one is for a GPU")
    case = Case(4, seqlen_k, 64, 64, dtype="float16" if home.is_gpu else "float32")
    arrays = case.arrays()
    alone = attend(home, case, arrays)
    k, v = (
        home.xp.broadcast_to(home.to_home(arrays[n])[None], (32, *arrays[n].shape)) for n in "kv"
    )
    rng = np.random.default_rng(1)
    q = rng.standard_normal((32, *arrays["q"].shape)).astype(arrays["q"].dtype)
    q[5] = arrays["q"]
    together = to_numpy(home, cuflash.attention(home.to_home(q), k, v, return_lse=True))
    same_bits(*((got[5], want) for got, want in zip(together, alone)))


def test_bug51_negative_window_is_refused(home):
    case = Case(4, 4)
    arrays = [home.to_home(case.arrays()[n]) for n in "qkv"]
    for window in ((-1, -3), (-2, 0), (0, -7)):
        with pytest.raises(ValueError, match="window"):
            cuflash.attention(*arrays, causal=True, window=window)


def test_bug53_window_is_inclusive(home):
    """left=2 shows 3 keys: the mean of the last three values."""
    case = Case(8, 8, 1, 1, window=(2, 0))
    out = attend(home, case, filled(case, q=0, v=np.arange(8.0)[:, None]))[0]
    np.testing.assert_allclose(out[0, :, 0], [0, 0.5, *range(1, 7)], rtol=1e-6)


def test_bug57_window_without_causal_hides_the_future(home):
    case = Case(8, 8, window=(2, 0))
    arrays = case.arrays()
    before = attend(home, case, arrays)[0]
    arrays["v"][0, 5:] += 100
    after = attend(home, case, arrays)[0]
    same_bits((after[0, :5], before[0, :5]))


def test_bug105_padding_keys_are_not_counted(home):
    """q = 0: the mean over the 17 keys there are, whatever lies beyond them."""
    case = Case(3, 17, 64, 64, strides=("packed", "rows+2", "rows+2", "packed", "packed"))
    for dtype in ("float32", "float16"):
        typed = replace(case, dtype=dtype)
        arrays = filled(typed, q=0, v=np.arange(17.0)[:, None])
        out, lse, *_ = differentiate(home, typed, arrays)
        assert np.all(out == 8) and np.allclose(lse, np.log(17.0))


def test_bug129_gradient_of_a_sum(home):
    """dout of stride 0 everywhere, one query, 65536 keys."""
    case = Case(1, 65536, 8, 8)
    arrays = filled(case, dout=1)
    q, k, v = (home.to_home(arrays[n]) for n in "qkv")
    dout = home.xp.broadcast_to(home.to_home(np.ones((), np.float32)), case.shape("out"))
    out, pullback = cuflash.attention_vjp(q, k, v)
    grads = to_numpy(home, pullback(dout)[:3])
    oracle = Oracle(case, *(arrays[n] for n in ("q", "k", "v", "dout")))
    for name, *rest in zip(
        ("dq", "dk", "dv"), grads, oracle.backward, oracle.plain_backward, oracle.bound_backward
    ):
        compare(name, *rest, case.dtype, (-2, -1))


def test_bug139_lse_with_padding_between_rows(home):
    """backward reads an lse of any strides."""
    case = Case(33, 40, 16, 16, 3, 3, (2,), (2,), (2,))
    arrays = case.arrays()
    out, lse, *want = differentiate(home, case, arrays, dlse=False)
    wide = home.to_home(np.full((2, 3, 2 * 33 + 5), np.nan, np.float32))
    view = wide[..., 3:69:2]
    view[...] = home.to_home(lse)
    got = cuflash.attention_backward(
        *(home.to_home(arrays[n]) for n in ("dout", "q", "k", "v")), home.to_home(out), view
    )
    same_bits(*zip(to_numpy(home, got[:3]), want))


def test_bug199_two_runs_give_the_same_bits(home):
    case = Case(257, 300, 64, 64, 4, 2, dtype="float16", causal=True)
    first = differentiate(home, case, case.arrays())
    for _ in range(3):
        same_bits(*zip(differentiate(home, case, case.arrays()), first))


PAIRS = (
    dict(causal=True),
    dict(causal="top_left"),
    dict(window=(2, 1)),
    dict(window=(3, 1)),
    dict(scale=0.5),
    dict(scale=2.0),
    dict(causal_offset=1, causal=True),
    dict(dtype="float16"),
    dict(dtype="bfloat16"),
    dict(head_dim_v=5),
    dict(num_heads=2),
)


def test_bug227_options_that_differ_give_their_own_results(home):
    """Every option after and before others, in one process: no two share a kernel by mistake."""
    for one in PAIRS:
        for other in PAIRS[:: len(PAIRS) // 3]:
            for facts in (one, other, one):
                check(home, replace(Case(5, 9), **facts))
