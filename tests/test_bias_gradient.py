"""The gradient of a bias with an entry for each pair on a GPU: on Hopper squares of dS, summed over the
heads that share the bias.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import CUPY, np_dtype
from score_cases import check, run, score_options, to_home
from strategies import Case, thinned

import cuflash
from cuflash import prebuild

pytestmark = pytest.mark.skipif(CUPY is None, reason="needs a GPU")

BATCH, HEADS = 2, 4
# Of (B, H, L, S): which axes are the bias's own.
SHAPES = {"all": (1, 1), "heads": (0, 1), "batch": (1, 0), "none": (0, 0)}
FORMS = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window=(70, 9), causal_offset=40),
    "mask": dict(scores=("mask",)),
    "dropout": dict(scores=("dropout",)),
    "sinks": dict(scores=("sinks",)),
    "softcap": dict(scores=("softcap",)),
}


def poison(gpu):
    """What the next calls allocate holds NaN."""
    gpu.xp.full(1 << 26, np.nan, np.float32)


def bias_of(case, own, dtype, seed=0):
    shape = (*(n if axis else 1 for n, axis in zip((*case.batch, case.num_heads), own)),
             case.seqlen_q, case.seqlen_k)  # fmt: skip
    return np.random.default_rng(seed).standard_normal(shape).astype(np_dtype(dtype))


def case_of(form, head_dim, lengths, dtype, group=1, heads=HEADS, batch=BATCH):
    return Case(
        *lengths, head_dim, head_dim, heads, heads // group, (batch,), (batch,), (batch,),
        dtype=dtype, **FORMS[form],
    )  # fmt: skip


@pytest.mark.parametrize("shape, form, head_dim", thinned(5, SHAPES, FORMS, (64, 128, 256)))
def test_against_the_reference(gpu, shape, form, head_dim):
    number = list(FORMS).index(form) + list(SHAPES).index(shape)
    lengths = ((200, 333), (64, 128), (257, 70), (130, 500))[number % 4]
    dtype = ("float16", "bfloat16")[number // 2 % 2]
    case = case_of(form, head_dim, lengths, dtype, group=(1, 2, 4)[number % 3])
    options = score_options(case)
    options["bias"] = bias_of(case, SHAPES[shape], (dtype, "float32")[number % 2])
    poison(gpu)
    check(gpu, case, options=options)


@pytest.mark.parametrize("head_dim", (64, 192))
@pytest.mark.parametrize("causal", (False, True))
def test_squares_are_used_where_the_gpu_has_them(gpu, head_dim, causal):
    case = case_of("causal" if causal else "full", head_dim, (200, 300), "float16")
    q, k, v, dout = (gpu.to_home(case.arrays()[n]) for n in ("q", "k", "v", "dout"))
    for own, expected in (((1, 1), True), ((0, 0), True), (None, False)):
        bias = np.zeros((1, 300), np.float16) if own is None else bias_of(case, own, "float16")
        options = {**case.options, "bias": gpu.to_home(bias)}
        plans = prebuild.plans_of_call(dout, q, k, v, options, need=("q", "bias"))
        kernels = {plan.kernel for plan in plans}
        hopper = any(kernel.startswith("bwd_sm90") for kernel in kernels)
        assert ("pair_gradient" in kernels) == (hopper and expected)


@pytest.mark.parametrize("deterministic", (True, False))
@pytest.mark.parametrize("need", (("bias",), ("q", "bias"), ("k", "v", "bias")))
def test_any_gradients_beside_it(gpu, need, deterministic):
    case = case_of("causal", 128, (150, 150), "bfloat16", group=2)
    arrays, bias = case.arrays(), bias_of(case, (0, 1), "float32")
    q, k, v, dout = (gpu.to_home(arrays[n]) for n in ("q", "k", "v", "dout"))
    options = {**case.options, "bias": gpu.to_home(bias)}
    poison(gpu)
    _, pull = cuflash.attention_vjp(q, k, v, **options)
    found = pull(dout, need=need, deterministic=deterministic)
    whole = pull(dout, need=("q", "k", "v", "bias"), deterministic=deterministic)
    got, want = (gpu.asnumpy(x.dbias).astype(np.float64) for x in (found, whole))
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max() and want.any()
    for name, a, b in zip("qkv", found, whole):
        assert (a is None) == (name not in need)


# Many blocks, far more than SMs, of heads that share every square: each waits for its turn.
SHARING = (
    ("full", 64, (128, 300), 1, 64, 8),
    ("full", 64, (700, 700), 4, 32, 4),
    ("full", 128, (2000, 260), 2, 16, 4),
    ("full", 256, (300, 1500), 4, 16, 3),
    ("causal", 64, (700, 700), 4, 32, 4),
    ("causal", 64, (70, 70), 1, 64, 20),
    ("causal", 128, (600, 600), 2, 16, 3),
    ("window", 64, (900, 900), 1, 24, 3),
    ("mask", 128, (500, 900), 8, 16, 2),
)


@pytest.mark.parametrize("shape", ("none", "batch", "heads"))
@pytest.mark.parametrize("form, head_dim, lengths, group, heads, batch", SHARING)
def test_turns_end_and_repeat(gpu, form, head_dim, lengths, group, heads, batch, shape):
    """Bit by bit the same again, whatever workspaces held, and near the sum in any order."""
    case = case_of(form, head_dim, lengths, "float16", group, heads, batch)
    options = to_home(gpu, score_options(case))
    options["bias"] = gpu.to_home(bias_of(case, SHAPES[shape], "float32"))
    arrays = case.arrays()
    q, k, v, dout = (gpu.to_home(arrays[n]) for n in ("q", "k", "v", "dout"))
    _, pull = cuflash.attention_vjp(q, k, v, **case.options, **options)
    found = []
    for n in range(4):
        poison(gpu)
        grads = pull(dout, need=("q", "k", "v", "bias"), deterministic=n < 3)
        found.append([gpu.asnumpy(x) for x in (*grads[:3], grads.dbias)])
    for again in found[1:3]:
        assert all(np.array_equal(a, b) for a, b in zip(found[0], again))
    got, want = found[3][3], found[0][3]
    assert np.isfinite(want).all() and want.any()
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize("value", (np.inf, np.nan))
def test_what_is_not_finite_stays_where_it_is_seen(gpu, value):
    """A row of dout that is not finite spoils its own row of the bias's gradient only."""
    case = case_of("causal", 64, (130, 130), "float16")
    arrays = case.arrays()
    arrays["dout"][0, 1, 77] = value
    found, _ = run(gpu, case, arrays, {"bias": bias_of(case, (0, 1), "float32")}, ("q", "bias"))
    dbias = found[5]
    odd = ~np.isfinite(dbias)
    assert odd[0, 1, 77, :78].all() and not dbias[0, 1, 77, 78:].any()
    odd[0, 1, 77] = False
    assert not odd.any()
