"""Options on scores and weights: any combination against the reference, and what each promises."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from conftest import CUPY
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from score_cases import SCORES, check, run
from strategies import DTYPES, Case, cases

import cuflash
from cuflash import philox, reference

# On a GPU each example builds kernels of its own: several processes share them.
PARTS = 1 if CUPY is None else 5
SMALL = (1, 2, 3, 5, 9, 17, 33, 65, 129, 300)


@st.composite
def scored(draw, least=3, dtypes=DTYPES):
    case = draw(cases(dtypes=dtypes, lengths=SMALL, scales=(None, -0.5), values=("normal",)))
    names = draw(st.lists(st.sampled_from(SCORES), min_size=least, unique=True))
    return replace(case, scores=tuple(names), strides=("packed",) * 5)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_combinations(home, dtype, part):
    """Three options or more at once, beside any band: out, lse and every gradient."""

    @seed(part)
    @settings(max_examples=30 if PARTS == 1 else 3)
    @given(scored(dtypes=(dtype,)))
    def combine(case):
        check(home, case)

    combine()


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_each_alone(home, name, dtype):
    case = Case(70, 300, num_heads=4, num_kv_heads=2, batch_q=(2,), batch_k=(2,), batch_v=(2,))
    check(home, replace(case, dtype=dtype, scores=(name,)))
    check(home, replace(case, dtype=dtype, scores=(name,), causal=True, layout="bshd"))


HIDING = {
    "mask": lambda n: dict(mask=np.arange(n)[None, :] < np.where(np.arange(n) % 3, 5, 0)[:, None]),
    "mask_mod": lambda n: dict(mask_mod=lambda b, h, i, j: (j < 5) & (i % 3 != 0)),
    "kv_lens": lambda n: dict(kv_lens=np.array([5, 0])),
    "q_lens": lambda n: dict(q_lens=np.array([7, 0]), kv_lens=np.array([5, 5])),
    "segments": lambda n: dict(
        q_segment_ids=np.arange(n) % 3, kv_segment_ids=np.where(np.arange(n) < 5, 1, 7)
    ),
}


@pytest.mark.parametrize("kind", HIDING)
@pytest.mark.parametrize("sinks", (False, True))
def test_nan_behind_each_mask(home, kind, sinks):
    """Hidden keys, values and bias entries may hold anything; hidden rows give 0 and -inf, or the
    sink, and no gradient (C1, C2).
    """
    n = 40
    case = Case(n, n, num_heads=2, num_kv_heads=1, batch_q=(2,), batch_k=(2,), batch_v=(2,))
    arrays, options = case.arrays(), HIDING[kind](n)
    options["bias"] = np.random.default_rng(2).standard_normal((n, n)).astype(np.float32)
    if sinks:
        options["sinks"] = np.array([0.5, -1], np.float32)
    need = ("q", "k", "v", "bias", *(["sinks"] if sinks else []))
    (clean, *_) = run(home, case, arrays, options, need)
    dirty = {name: x.copy() for name, x in arrays.items()}
    dirty["k"][..., 5:, :], dirty["v"][..., 5:, :] = np.nan, np.inf
    bias = options["bias"].copy()
    bias[:, 5:] = np.nan
    (found, *_) = run(home, case, dirty, {**options, "bias": bias}, need)
    for got, want in zip(found, clean):
        assert (got is None and want is None) or np.array_equal(got, want)
    out, lse, dq, dk, _, dbias, *_ = found
    blind = np.zeros((2, n), bool)
    if kind in ("mask", "mask_mod"):
        blind[:, ::3] = True
    elif kind == "segments":
        blind[:, np.arange(n) % 3 != 1] = True
    else:
        blind[1] = True
        blind[0, 7:] = kind == "q_lens"
    rows = np.broadcast_to(blind[:, None], lse.shape)
    sink = np.broadcast_to([[[0.5], [-1]]], lse.shape) if sinks else np.full(lse.shape, -np.inf)
    assert np.array_equal(lse[rows], sink[rows].astype(np.float32))
    assert not out[rows].any() and not dq[rows].any() and not dk[..., 5:, :].any()
    assert np.isfinite(lse[~rows]).all() and not dbias[:, 5:].any()


def test_dropout(home):
    """One mask for a seed, of the right mean, which the public function shows (C13)."""
    n = 64
    eye = np.broadcast_to(np.eye(n, dtype=np.float32), (2, 3, n, n))
    case = Case(n, n, n, n, 3, 3, (2,), (2,), (2,), scale=0.0)
    arrays = {**case.arrays(), "q": eye, "k": eye, "v": eye}
    options = dict(dropout_p=0.3, seed=2**40 + 17)
    first, second = (run(home, case, arrays, options)[0][0] for _ in range(2))
    assert np.array_equal(first, second)
    kept = cuflash.dropout_mask(2**40 + 17, 2, 3, n, n, 0.3)
    keep = round(256 * 0.7) / 256
    assert np.allclose(first, kept / (keep * n), rtol=1e-6)
    assert abs(kept.mean() - keep) < 4 * math.sqrt(keep * (1 - keep) / kept.size)
    other = cuflash.dropout_mask(2**40 + 18, 2, 3, n, n, 0.3)
    assert (kept != other).any() and (kept[0] != kept[1]).any() and (kept[:, 0] != kept[:, 1]).any()


def test_dropout_does_not_depend_on_tiles():
    whole = philox.kept(5, 1, 2, (0, 50), (0, 100), 0.5)
    part = philox.kept(5, 1, 2, (7, 31), (13, 77), 0.5)
    assert np.array_equal(part, whole[7:31, 13:77])


@pytest.mark.parametrize(
    "counter, key, words",
    [
        ((0,) * 4, (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_vectors(counter, key, words):
    """The known answers that Random123 publishes for Philox4x32-7."""
    assert tuple(int(x) for x in philox.philox4x32(counter, key)) == words


def test_gradients_of_score_args():
    """Against finite differences in float64, through a where and through repeated indices."""

    def mod(s, b, h, i, j, slopes, table, c):
        return np.where(i >= j, s * c + slopes[h] * (j - i), np.tanh(s) * table[(i - j) % 4, h])

    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, 2, 9, 4)) for _ in range(3))
    args = [rng.standard_normal(2), rng.standard_normal((4, 2)), 0.8]

    def loss(*given):
        return cuflash.attention(q, k, v, score_mod=mod, score_args=given)

    out, pull = cuflash.attention_vjp(q, k, v, score_mod=mod, score_args=tuple(args))
    dout = rng.standard_normal(out.shape)
    grads = pull(dout, need=("score_args",)).dscore_args
    assert grads[2] is None
    for n in (0, 1):
        assert abs(grads[n]).min() > 1e-6
        for place in np.ndindex(args[n].shape):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [x.copy() if isinstance(x, np.ndarray) else x for x in args]
                moved[n][place] += step
                sides.append((loss(*moved) * dout).sum())
            assert np.isclose(grads[n][place], (sides[0] - sides[1]) / 2e-6, rtol=1e-6, atol=1e-8)


def test_functions_without_a_trace():
    """NumPy arrays take any function of NumPy's forward, any mask both ways; a score_mod's gradient
    needs its trace.
    """
    q = np.random.default_rng(1).standard_normal((2, 6, 4))

    def mask(b, h, i, j):
        return np.hypot(i, j) < 5

    options = dict(score_mod=lambda s, b, h, i, j: np.arctan(s), mask_mod=mask)
    (out, lse), pull = cuflash.attention_vjp(q, q, q, return_lse=True, **options)
    want, want_lse = reference.attention(q, q, q, **options)
    assert np.allclose(out, want, rtol=1e-13) and np.allclose(lse, want_lse, rtol=1e-13)
    with pytest.raises(NotImplementedError, match="score_mod.*np.arctan"):
        pull(out)
    out, pull = cuflash.attention_vjp(q, q, q, mask_mod=mask)
    want = reference.attention_backward(out, q, q, q, mask_mod=mask)
    assert all(np.allclose(got, x, rtol=1e-12) for got, x in zip(pull(out), want))
    with pytest.raises(TypeError, match="mask_mod: it must return booleans"):
        cuflash.attention(q, q, q, mask_mod=lambda b, h, i, j: np.hypot(i, j))


def test_functions_are_called_on_tiles():
    """With a column of i, a row of j and plain numbers b and h: memory stays O(L + S) (C16)."""
    q, seen = np.ones((3, 2, 700, 4), np.float32), []

    def mod(s, b, h, i, j):
        if type(b) is int:
            seen.append((b, h, i.shape, j.shape, s.shape))
        return s

    cuflash.attention(q, q, q, score_mod=mod)
    assert {(b, h) for b, h, *_ in seen} == {(b, h) for b in range(3) for h in range(2)}
    for _, _, rows, keys, shape in seen:
        assert rows == (shape[0], 1) and keys == (1, shape[1]) and shape[0] * shape[1] <= 2**16


def test_sinks_without_keys():
    q, k = np.ones((2, 3, 4)), np.ones((2, 0, 4))
    sinks = np.array([0.5, -np.inf])
    (out, lse), pull = cuflash.attention_vjp(q, k, k, sinks=sinks, return_lse=True)
    assert not out.any() and (lse == sinks[:, None]).all()
    assert pull(out, np.ones_like(lse), need=("sinks",)).dsinks[0] == 3


def test_infinite_bias_hides_rows():
    q = np.ones((2, 600, 2), np.float32)
    bias = np.zeros((600, 600), np.float32)
    bias[:5], bias[5:, :300] = -np.inf, np.finfo(np.float32).min
    out, lse = cuflash.attention(q, q, q, bias=bias, return_lse=True)
    assert not out[:, :5].any() and (lse[:, :5] == -np.inf).all()
    assert np.allclose(out[:, 5:], 1) and np.isfinite(lse[:, 5:]).all()


X = np.ones((2, 4, 5, 8), np.float32)


@pytest.mark.parametrize(
    "options, error, text",
    [
        (dict(softcap=0.0), ValueError, "softcap=0.0"),
        (dict(softcap="a"), TypeError, "softcap='a'"),
        (dict(bias=np.zeros((5, 5), int)), TypeError, "bias: its dtype is int64"),
        (dict(bias=np.zeros((3, 5))), ValueError, r"bias: its shape is \(3, 5\)"),
        (dict(bias=[1.0]), TypeError, "bias is a builtins.list"),
        (dict(alibi_slopes=np.ones(3)), ValueError, "alibi_slopes: its shape"),
        (dict(mask=np.ones((5, 5))), TypeError, "mask: its dtype is float64"),
        (dict(mask=np.ones((2, 2, 4, 5, 5), bool)), ValueError, "mask: its shape"),
        (dict(q_lens=np.ones(2)), TypeError, "q_lens: its dtype"),
        (dict(kv_lens=np.ones(3, int)), ValueError, "kv_lens: its shape"),
        (dict(q_segment_ids=np.ones((2, 4), int)), ValueError, "q_segment_ids: its shape"),
        (dict(sinks=np.ones(4, int)), TypeError, "sinks: its dtype"),
        (dict(sinks=np.ones(5)), ValueError, "sinks: its shape"),
        (dict(score_mod=3), TypeError, "score_mod=3"),
        (dict(score_mod=lambda s, *_: s if s > 0 else 0), TypeError, "score_mod: .*np.where"),
        (dict(mask_mod=lambda b, h, i, j: i - j), TypeError, "mask_mod: it must return a cond"),
        (dict(score_args=(1,)), ValueError, "score_args without"),
        (dict(score_args=X, score_mod=abs), TypeError, "score_args is a ndarray"),
        (dict(dropout_p=0.1), TypeError, "dropout_p=0.1 without seed"),
        (dict(dropout_p=1.0, seed=1), ValueError, "dropout_p=1.0"),
        (dict(dropout_p="a", seed=1), TypeError, "dropout_p='a'"),
        (dict(dropout_p=0.5, seed=-1), ValueError, "seed=-1"),
        (dict(dropout_p=0.5, seed=0.5), TypeError, "seed=0.5"),
    ],
)
def test_errors(options, error, text):
    """Every complaint names the argument, its value and the rule (C8)."""
    for call in (cuflash.attention, cuflash.attention_vjp, cuflash.explain):
        with pytest.raises(error, match=text):
            call(X, X, X, **options)


def test_errors_of_need_and_lengths():
    out, pull = cuflash.attention_vjp(X, X, X)
    with pytest.raises(ValueError, match="bias is not given"):
        pull(out, need=("bias",))
    with pytest.raises(ValueError, match="q_segment_ids alone"):
        cuflash.attention(X, X[..., :3, :], X[..., :3, :], q_segment_ids=np.ones(5, int))
    table = np.ones((2, 2))
    options = dict(score_mod=lambda s, b, h, i, j, t: s + t[i, j], score_args=(table,))
    with pytest.raises(IndexError):
        cuflash.attention(X, X, X, **options)


def test_without_options_nothing_of_them_runs(monkeypatch):
    """A plain call neither builds a program nor looks at one."""

    def never(*_, **__):
        raise AssertionError("a plain call reached the options")

    for target in ("edge.Options", "cpu.cpu_scores.forward", "cpu.cpu_scores.backward", "api.used"):
        monkeypatch.setattr(f"cuflash.{target}", never)
    out, pull = cuflash.attention_vjp(X, X, X, causal=True)
    pull(out)


def test_one_head_without_axes():
    x = np.random.default_rng(0).standard_normal((6, 4))
    options = dict(bias=x @ x.T, sinks=np.ones(1), kv_lens=np.array(5), softcap=2)
    out, pull = cuflash.attention_vjp(x, x, x, **options)
    assert np.allclose(out, reference.attention(x, x, x, **options)[0], rtol=1e-13)
    grads = pull(out, need=("q", "bias", "sinks"))
    want = reference.attention_backward(out, x, x, x, need=("bias", "sinks"), **options)
    for got, expected in zip((grads.dq, grads.dbias, grads.dsinks), (want[0], *want[3:])):
        assert got.shape == expected.shape and np.allclose(got, expected, rtol=1e-12, atol=1e-14)


def test_out_must_not_overlap_an_option():
    q, bias = np.ones((2, 5, 5)), np.zeros((2, 5, 5))
    with pytest.raises(ValueError, match="out shares memory with bias"):
        cuflash.attention(q, q, q, bias=bias, out=bias)


def test_gradients_are_named_and_three():
    grads = cuflash.AttentionGrads(1, 2, 3, dsinks=4)
    dq, dk, dv = grads
    assert (dq, dk, dv, grads.dsinks, grads.dbias) == (1, 2, 3, 4, None)
    assert pickle.loads(pickle.dumps(grads)).dsinks == 4
    assert "dsinks=4" in repr(grads) and grads._replace(dq=5).dq == 5


def test_strides_of_options():
    """Permuted, reversed and repeated arrays are read as what they hold, and their gradients have
    their shape (C7).
    """
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 6, 4))
    base = rng.standard_normal((6, 12))
    for bias in (base.T[::-2], base[::-1, ::2], np.broadcast_to(base[0, :6], (6, 6))):
        options = dict(bias=bias, mask=(base.T > -1)[::2])
        out, pull = cuflash.attention_vjp(q, q, q, **options)
        assert np.allclose(out, reference.attention(q, q, q, **options)[0], rtol=1e-13)
        got = pull(out, need=("bias",)).dbias
        want = reference.attention_backward(out, q, q, q, need=("bias",), **options)[3]
        assert np.allclose(got, want, rtol=1e-12, atol=1e-14)
