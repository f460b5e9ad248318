"""The rules C1 to C10 one by one, each with the cases that would break it.

The broad sweeps are in test_properties.py, C11 to C17 in test_contract_numbers.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from conftest import UINT
from dense import Oracle, compare, visible
from running import attend, check, differentiate, oracle_of, same_bits
from strategies import DTYPES, STRIDES, WRITABLE, Case, Placed, place

from cuflash.problem import Band, Problem

BANDS = tuple(
    dict(causal=causal, causal_offset=offset, window=window)
    for causal, offset, window in itertools.product(
        (False, True, "top_left", "bottom_right"),
        (None, -3, 0, 2),
        (None, (0, 0), (2, 0), (0, 2), (1, None), (None, 1), (-1, -1), (7, 100)),
    )
    if offset is None or causal is True or (causal is False and window is not None)
)


# C1: rows without a visible key


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    (
        Case(9, 3, causal=True),
        Case(70, 3, causal=True),
        Case(5, 5, causal=True, causal_offset=-2),
        Case(4, 6, window=(0, 0), causal_offset=-2),
        Case(4, 3, causal_offset=50, window=(1, 1)),
        Case(130, 130, causal=True, causal_offset=-129, num_heads=4, num_kv_heads=2),
        Case(3, 0),
        Case(3, 0, causal=True),
    ),
    ids=repr,
)
def test_c1_rows_without_keys(home, case, dtype):
    """Such rows give 0 and -inf, a zero dq, and no part in dk and dv even when q and dout are NaN
    there.
    """
    case = replace(case, dtype=dtype)
    hidden = ~visible(
        case.seqlen_q, case.seqlen_k, case.causal, case.causal_offset, case.window
    ).any(1)
    assert hidden.any()
    arrays = case.arrays()
    dirty = {name: a.copy() for name, a in arrays.items()}
    for name in ("q", "dout", "dlse"):
        dirty[name][(..., hidden) if name == "dlse" else (..., hidden, slice(None))] = np.nan
    clean = differentiate(home, case, arrays)
    for out, lse, dq, dk, dv in (clean, differentiate(home, case, dirty)):
        assert not out[..., hidden, :].any() and not dq[..., hidden, :].any()
        assert np.all(np.isneginf(lse[..., hidden]))
        same_bits((dk, clean[3]), (dv, clean[4]))
    check(home, case)


# C2: memory behind what is hidden or unused (one hidden entry at a time: test_properties)


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize(
    "case",
    (
        Case(7, 12, causal="top_left"),
        Case(33, 130, causal=True, causal_offset=-1),
        Case(65, 65, window=(3, 2)),
        Case(3, 200, causal_offset=20, window=(2, 2), num_heads=4, num_kv_heads=2, head_dim_v=5),
    ),
    ids=repr,
)
def test_c2_keys_hidden_from_all(home, case, bad):
    """Keys and values that no row sees may hold anything; their own gradients are 0."""
    seen = visible(case.seqlen_q, case.seqlen_k, case.causal, case.causal_offset, case.window).any(
        0
    )
    if seen.all():  # the window case above: hide the last keys by showing one row only
        case = replace(case, seqlen_q=1, causal_offset=0)
        seen = visible(1, case.seqlen_k, False, 0, case.window).any(0)
    arrays = case.arrays()
    spoiled = {name: a.copy() for name, a in arrays.items()}
    for name in "kv":
        spoiled[name][..., ~seen, :] = bad
    clean, dirty = differentiate(home, case, arrays), differentiate(home, case, spoiled)
    same_bits(*zip(dirty, clean))
    assert not dirty[3][..., ~seen, :].any() and not dirty[4][..., ~seen, :].any()


# C3 and C4: who sees whom, read off the weights


def weights_and_rule(home, case):
    """The weights 1/n of uniform scores, recovered with v = identity, and the same from the rule by
    loops.
    """
    q = np.zeros(case.shape("q"), np.float32)
    k = np.ones(case.shape("k"), np.float32)
    v = np.eye(case.seqlen_k, dtype=np.float32)[None]
    got = attend(home, case, {"q": q, "k": k, "v": v})[0][0]
    want = np.zeros((case.seqlen_q, case.seqlen_k))
    offset = case.seqlen_k - case.seqlen_q if case.causal_offset is None else case.causal_offset
    offset = 0 if case.causal == "top_left" else offset
    left, right = case.window or (None, None)
    for i in range(case.seqlen_q):
        keys = [
            j
            for j in range(case.seqlen_k)
            if (not case.causal or j <= i + offset)
            and (left in (None, -1) or j >= i + offset - left)
            and (right in (None, -1) or j <= i + offset + right)
        ]
        want[i, keys] = 1 / max(len(keys), 1)
    return got, want


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k", ((1, 1), (1, 5), (5, 1), (4, 4), (3, 8), (8, 3), (9, 10))
)
def test_c3_c4_every_band(home, seqlen_q, seqlen_k):
    for band in BANDS:
        got, want = weights_and_rule(home, Case(seqlen_q, seqlen_k, head_dim_v=seqlen_k, **band))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=0, err_msg=str(band))


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k", ((63, 64), (64, 65), (129, 127), (65, 192), (200, 130), (1, 256))
)
def test_c3_c4_at_tile_edges(home, seqlen_q, seqlen_k):
    bands = (
        dict(causal=True),
        dict(causal="top_left"),
        dict(window=(0, 0)),
        dict(window=(63, 0)),
        dict(causal=True, window=(64, None)),
        dict(window=(5, 65)),
        dict(causal=True, causal_offset=-64),
        dict(window=(None, 1), causal_offset=63),
        dict(window=(128, -1)),
    )
    for band in bands:
        got, want = weights_and_rule(home, Case(seqlen_q, seqlen_k, head_dim_v=seqlen_k, **band))
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=0, err_msg=str(band))


def test_c6_lse_is_the_natural_log(home):
    case = Case(2, 3, head_dim=1, scale=1.0)
    q, k = np.ones(case.shape("q"), np.float32), np.log([[[1.0], [2.0], [4.0]]]).astype(np.float32)
    lse = attend(home, case, {"q": q, "k": k, "v": np.ones(case.shape("v"), np.float32)})[1]
    np.testing.assert_allclose(lse, np.log(7.0), rtol=1e-6)


# C7: strides, one array at a time


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("recipe", [name for name in STRIDES if name != "packed"])
@pytest.mark.parametrize("which", range(5), ids=("q", "k", "v", "dout", "out"))
def test_c7_strides_of_one_array(home, which, recipe, dtype):
    if which == 4 and recipe not in WRITABLE:
        pytest.skip("out has no axis of stride 0")
    strides = tuple(recipe if n == which else "packed" for n in range(5))
    base = Case(33, 70, 64, 64, 4, 2, (2,), (2,), (2,), dtype, causal=True, strides=strides)
    for case in (base, replace(base, layout="bshd")):
        check(home, case)
    check(home, replace(base, seqlen_q=1, batch_q=(1,), batch_k=(1,), batch_v=(1,), num_heads=2))


@pytest.mark.parametrize("which", ("dq", "dk", "dv", "lse", "dlse", "given out"))
@pytest.mark.parametrize(
    "recipe", ("offset1", "pitch+3", "step2", "reversed", "fortran", "swap -2 -3", "size-1 odd")
)
def test_c7_strides_inside_backward(home, which, recipe):
    """The backends read out, lse and dlse and write dq, dk and dv through any strides and stay
    inside them.
    """
    case = Case(33, 70, 40, 24, 4, 2, (2,), (2,), (2,), causal=True)
    arrays = case.arrays()
    problem = Problem(
        case.dtype, case.batch, 4, 2, 33, 70, 40, 24, case.scale_value, Band(-33, 70 - 33)
    )
    out, lse, *want = differentiate(home, case, arrays)
    inputs = {
        **{n: arrays[n] for n in ("dout", "q", "k", "v")},
        "out": out,
        "lse": lse,
        "dlse": arrays["dlse"],
    }
    placed = {
        n: Placed(home, a, recipe if n == which.split()[-1] else "packed")
        for n, a in inputs.items()
    }
    grads = {
        n: Placed(home, np.full_like(a, np.nan), recipe if n == which else "packed")
        for n, a in zip(("dq", "dk", "dv"), want)
    }
    home.backend.backward(
        problem, *(p.array for p in placed.values()), *(p.array for p in grads.values()), True
    )
    oracle = Oracle(case, *(arrays[n] for n in ("q", "k", "v", "dout", "dlse")))
    for index, (name, grad) in enumerate(grads.items()):
        compare(
            name,
            grad.values,
            oracle.backward[index],
            oracle.plain_backward[index],
            lambda index=index: oracle.bound_backward[index],
            case.dtype,
            (-2, -1),
        )
        assert grad.guard_unchanged(), f"wrote outside of {name}"
    for name, array in placed.items():
        assert array.unchanged(), f"wrote into or around {name}"


def test_c7_two_dimensional_and_broadcast_inputs(home):
    """2-D means one head, without a head axis in the results only when all three are 2-D."""
    case = Case(5, 7, causal=True)
    arrays = case.arrays()
    whole = differentiate(home, case, arrays)
    flat = differentiate(home, case, {name: a[0] for name, a in arrays.items()})
    same_bits(*((got, want[0]) for got, want in zip(flat, whole)))
    mixed = attend(home, case, {"q": arrays["q"], "k": arrays["k"][0], "v": arrays["v"][0]})
    same_bits(*zip(mixed, whole))


# C9: many heads (large arrays: test_gpu.py)


@pytest.mark.parametrize("batch, heads", ((65536, 1), (70000, 1), (1, 65536), (35000, 2)))
def test_c9_many_heads(home, batch, heads):
    """With one key the output is v and dv is dout, whatever the number of heads."""
    # float16: a float32 product on tensor cores need not be exact to the last bit
    case = Case(1, 1, 8, 8, heads, heads, (batch,), (batch,), (batch,), dtype="float16")
    arrays = case.arrays()
    out, lse, dq, dk, dv = differentiate(home, case, arrays, dlse=False)
    assert np.array_equal(out, arrays["v"]) and np.array_equal(dv, arrays["dout"])
    scores = (arrays["q"].astype(float) * arrays["k"]).sum(axis=-1) * case.scale_value
    np.testing.assert_allclose(lse, scores, rtol=1e-5, atol=1e-5)
    assert abs(dq).max() < 1e-4 and abs(dk).max() < 1e-4


# C10: zero sizes


@pytest.mark.parametrize(
    "case",
    (
        Case(0, 4),
        Case(4, 0),
        Case(0, 0),
        Case(0, 4, causal=True),
        Case(4, 0, window=(1, 1)),
        Case(batch_q=(0,), batch_k=(0,), batch_v=(0,)),
        Case(batch_q=(0, 2), batch_k=(1,), batch_v=(2,)),
        Case(num_heads=0, num_kv_heads=1),
        Case(4, 0, batch_q=(3,), num_heads=4, num_kv_heads=2, layout="bshd"),
    ),
    ids=repr,
)
def test_c10_zero_sizes(home, case):
    check(home, case)
    arrays = case.arrays()
    results = differentiate(home, case, arrays)
    shapes = [case.shape("out"), case.shape("lse"), *(arrays[n].shape for n in "qkv")]
    assert [a.shape for a in results] == shapes
    assert not any(a.any() for a in (results[0], *results[2:]))


def test_placed_arrays_are_what_they_claim(home):
    """The strides recipes themselves: same values, guarded memory, no copy."""
    case = Case(3, 5, batch_q=(2,), batch_k=(2,), batch_v=(2,), num_heads=2, num_kv_heads=2)
    for recipe in STRIDES:
        placed = place(home, replace(case, strides=(recipe,) * 4 + ("packed",)), None)
        for name, array in case.arrays().items():
            if name in placed:
                assert placed[name].unchanged()
            if name in placed and recipe in WRITABLE:
                assert np.array_equal(placed[name].values, array)
                assert placed[name].guard_unchanged()
    spoiled = Placed(home, np.ones((3, 4), np.float32), "pitch+3")
    bits = spoiled.memory.view(UINT[4])
    bits[0, 0] = 7
    assert not spoiled.guard_unchanged() and not spoiled.unchanged()
    assert oracle_of(case, place(home, case)).forward[0].shape == case.shape("out")
