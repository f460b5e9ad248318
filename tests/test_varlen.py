"""Packed sequences equal one call a sequence, forward and backward."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import CUPY
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from packed_cases import PackedCase, check, draw, run
from running import same_bits

import cuflash
from cuflash import reference

# On a GPU each example builds kernels of its own: several processes share them.
PARTS = 1 if CUPY is None else 8
LENGTHS = (5, 0, 130, 1, 9), (7, 3, 64, 0, 9)


def packed(seed=0, dtype="float64", tail=4):
    rng = np.random.default_rng(seed)
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(x)]) for x in LENGTHS)
    shapes = ((cu_q[-1], 4, 8), (cu_k[-1], 2, 8), (cu_k[-1], 2, 6))
    q, k, v = (rng.standard_normal((n + tail, *s)).astype(dtype) for n, *s in shapes)
    q[cu_q[-1] :] = k[cu_k[-1] :] = v[cu_k[-1] :] = np.nan  # in no sequence
    return rng, q, k, v, cu_q, cu_k


def mod(s, b, h, i, j, slopes):
    return s * np.where(b == 2, 0.5, 1.0) + slopes[h] * (i - j)


@pytest.mark.parametrize("options", [
    {}, {"causal": True, "window": (20, 3)}, {"softcap": 2.0, "sinks": np.array([0.5, 0, 1, -1])},
    {"alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4]), "causal": True},
], ids=lambda o: "+".join(o) or "plain")  # fmt: skip
def test_equals_a_loop(options):
    rng, q, k, v, cu_q, cu_k = packed()
    slopes = rng.standard_normal(4)
    (out, lse), pull = cuflash.attention_varlen_vjp(
        q, k, v, cu_q, cu_k, return_lse=True, score_mod=mod, score_args=(slopes,), **options
    )
    dout, dlse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    arrays = tuple(n for n in ("alibi_slopes", "sinks") if n in options)
    grads = pull(dout, dlse, need=("q", "k", "v", *arrays, "score_args"))
    total = {name: 0 for name in arrays}
    for n in range(len(LENGTHS[0])):
        rows, keys = (slice(c[n], c[n + 1]) for c in (cu_q, cu_k))
        given = dict(options, layout="bshd", score_args=(n, slopes),
                     score_mod=lambda s, b, h, i, j, n, t: mod(s, n, h, i, j, t))  # fmt: skip
        want_out, want_lse = reference.attention(q[rows], k[keys], v[keys], **given)
        assert np.allclose(out[rows], want_out, rtol=1e-12, atol=1e-12)
        assert np.allclose(lse[rows], want_lse, rtol=1e-12)
        want = reference.attention_backward(
            dout[rows], q[rows], k[keys], v[keys], dlse=dlse[rows], need=arrays, **given
        )
        for got, expected, at in zip(grads, want, (rows, keys, keys)):
            assert np.allclose(got[at], expected, rtol=1e-8, atol=1e-8)
        for name, grad in zip(arrays, want[3:]):
            total[name] = total[name] + grad
    for name in arrays:
        assert np.allclose(getattr(grads, f"d{name}"), total[name], rtol=1e-8, atol=1e-8)
    assert grads.dscore_args[0].shape == slopes.shape and grads.dscore_args[0].all()
    ends = cu_q[-1], cu_k[-1], cu_k[-1]
    assert not any(x[end:].any() for x, end in zip(grads, ends))
    assert not out[cu_q[-1] :].any() and (lse[cu_q[-1] :] == -np.inf).all()


def test_dropout_counts_sequences_as_batches():
    x = np.ones((8, 1, 4))
    v = np.concatenate([np.eye(4)] * 2)[:, None]
    out = cuflash.attention_varlen(x, x, v, [0, 4, 8], dropout_p=0.5, seed=3)
    kept = cuflash.dropout_mask(3, 2, 1, 4, 4, 0.5)
    assert np.array_equal(out[:, 0].reshape(2, 4, 4) > 0, kept[:, 0])


def test_out_and_none():
    _, q, k, v, cu_q, cu_k = packed(dtype="float32")
    target = np.full((len(q), 4, 6), np.nan, np.float32)
    assert cuflash.attention_varlen(q, k, v, cu_q, cu_k, out=target) is target
    assert np.array_equal(target, cuflash.attention_varlen(q, k, v, list(map(int, cu_q)), cu_k))
    out, pull = cuflash.attention_varlen_vjp(q, k, v, [0], sinks=np.ones(4))
    grads = pull(out, need=("q", "sinks"))
    assert not out.any() and not grads.dq.any() and grads.dsinks.tolist() == [0] * 4


@pytest.mark.parametrize("offsets, error", [
    ([1, 4], ValueError), ([0, 4, 2], ValueError), ([0, 9], ValueError), ([], ValueError),
    ([0, 2.0], TypeError), (np.zeros(2), TypeError), (np.zeros((1, 2), int), ValueError),
    (3, TypeError),
])  # fmt: skip
def test_bad_offsets(offsets, error):
    x = np.ones((8, 2, 4))
    for cu in ((offsets,), ([0, 8] if len(np.shape(offsets)) else [0], offsets)):
        with pytest.raises(error, match="cu_seqlens_"):
            cuflash.attention_varlen(x, x, x, *cu)


def test_bad_arguments():
    x = np.ones((8, 2, 4))
    with pytest.raises(NotImplementedError, match="bias with attention_varlen"):
        cuflash.attention_varlen(x, x, x, [0, 8], bias=np.zeros((8, 8)))
    with pytest.raises(TypeError, match="layout"):
        cuflash.attention_varlen(x, x, x, [0, 8], layout="bhsd")
    with pytest.raises(ValueError, match="q: its shape"):
        cuflash.attention_varlen(x[0], x[0], x[0], [0, 2])
    with pytest.raises(ValueError, match="cu_seqlens_k has 3"):
        cuflash.attention_varlen(x, x, x, [0, 8], [0, 4, 8])
    with pytest.raises(TypeError, match="unexpected keyword"):
        cuflash.attention_varlen(x, x, x, [0, 8], caused=True)


@pytest.mark.parametrize("part", range(PARTS))
def test_any_packed_call(home, part):
    @seed(part)
    @settings(max_examples=settings.default.max_examples if PARTS == 1 else 3)
    @given(st.integers(0, 2**32 - 1))
    def any_call(number):
        check(home, draw(number, longest=700 if home.is_gpu else 60))

    any_call()


# One long and many short sequences, keys without queries and queries without keys, each as long as
# several blocks; and every kernel of Hopper.
@pytest.mark.parametrize("options", [
    {}, dict(causal=True), dict(causal="top_left"), dict(window=(70, 20)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_long_and_short(home, dims, options):
    scale = 8 if home.is_gpu else 1
    lengths_q = (3, 0, 90 * scale, 1, 60 * scale, 16, 0, 2)
    lengths_k = (5, 70 * scale, 90 * scale, 1, 0, 16, 2, 90)
    for dtype in ("float16", "bfloat16", "float32") if home.is_gpu else ("float32",):
        case = PackedCase(lengths_q, lengths_k, (40, 300), (4, 2), dims, dtype, options)
        found = check(home, case)
        same_bits(*zip(found.values(), run(home, case).values()))


def test_offsets_that_only_the_device_knows_are_made_safe(gpu):
    rng = np.random.default_rng(0)
    q, k, v = (gpu.to_home(rng.standard_normal((50, 2, 64)).astype("float16")) for _ in "qkv")
    wild, safe = (gpu.to_home(np.array(x)) for x in ([7, -5, 30, 20, 10**9], [0, 0, 30, 30, 50]))
    for causal in (False, True):
        results = []
        for cu in (wild, safe):
            out, pull = cuflash.attention_varlen_vjp(q, k, v, cu, causal=causal)
            results.append([gpu.asnumpy(x) for x in (out, *pull(out))])
        same_bits(*zip(*results))


def test_a_graph_takes_new_offsets(gpu):
    xp = gpu.xp
    x = gpu.to_home(np.random.default_rng(0).standard_normal((300, 2, 64)).astype("float16"))
    cu, out = gpu.to_home(np.array([0, 100, 300], np.int32)), xp.empty_like(x)
    cuflash.attention_varlen(x, x, x, cu, causal=True, out=out)  # compiles
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cuflash.attention_varlen(x, x, x, cu, causal=True, out=out)
        graph = stream.end_capture()
    gpu.synchronize()
    for offsets in ([0, 100, 300], [0, 7, 280]):
        cu[...] = xp.asarray(np.array(offsets, np.int32))
        gpu.synchronize()
        out.fill(float("nan"))
        gpu.synchronize()
        graph.launch(stream)
        stream.synchronize()
        want = cuflash.attention_varlen(x, x, x, offsets, causal=True)
        same_bits((gpu.asnumpy(out), gpu.asnumpy(want)))
