"""The rules C11 to C17 one by one: bits, threads, dtypes, accuracy, memory, extreme scores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import cpu_calls
import numpy as np
import pytest
from conftest import np_dtype
from dense import Oracle, compare
from running import attend, check, differentiate, same_bits, to_numpy
from strategies import DTYPES, SWEPT_DIMS, Case

import cuflash

# C11: bits (repeats and batch mates: test_properties)


def test_c11_layout_and_need_change_no_bit(home):
    case = Case(65, 130, 16, 16, 4, 2, (2,), (2,), (2,), "float16", causal=True)
    arrays = case.arrays()
    turned = {n: np.ascontiguousarray(a.swapaxes(1, 2)) for n, a in arrays.items()}
    base = differentiate(home, case, arrays)
    other = differentiate(home, replace(case, layout="bshd"), turned)
    same_bits(*((got.swapaxes(1, 2), want) for got, want in zip(other, base)))


# C12: several threads (streams, devices and graphs: test_gpu.py)


def test_c12_threads(home):
    """Four threads at once, each with its own problem, get what they get alone."""
    cases = [Case(65 + n, 130, 16, 16, 4, 2, causal=True, seed=n) for n in range(4)]
    want = [differentiate(home, case, case.arrays()) for case in cases]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda case: differentiate(home, case, case.arrays()), cases * 8))
    for index, results in enumerate(got):
        same_bits(*zip(results, want[index % 4]))


# C14: dtypes


@pytest.mark.parametrize("dtype", DTYPES)
def test_c14_dtypes(home, dtype):
    case = Case(3, 4, dtype=dtype)
    wide = np.dtype("float64" if dtype == "float64" else "float32")
    out, lse, *grads = differentiate(home, case, case.arrays())
    assert lse.dtype == wide
    assert all(a.dtype == np_dtype(dtype) for a in (out, *grads))
    merged = cuflash.merge([home.to_home(out)] * 2, [home.to_home(lse)] * 2)
    assert [a.dtype for a in to_numpy(home, merged)] == [np_dtype(dtype), wide]


def test_c14_scores_beyond_float16(home):
    """A float16 product of 60000 * 4 stays finite: scores are float32."""
    case = Case(2, 3, 1, 4, dtype="float16", scale=1.0)
    arrays = case.arrays()
    arrays["q"][...], arrays["k"][...] = 60000, [[1], [4], [-4]]
    check(home, case, arrays)


# C15: accuracy, without the allowance for small arrays


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dim", (64, 128))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
def test_c15_accuracy(home, dtype, dim, causal):
    case = Case(512, 512, dim, dim, 2, 2, dtype=dtype, causal=causal, seed=dim)
    check(home, case, strict=True)


def test_c15_the_rule_can_fail():
    """The rule sees a TF32 product, a wrong weight, a NaN and a finite number in place of a NaN."""
    case = Case(64, 64, 64, 64)
    arrays = case.arrays()
    oracle = Oracle(case, *(arrays[n] for n in ("q", "k", "v", "dout")))
    good = oracle.plain_forward[0]
    short = {
        n: (a.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for n, a in arrays.items()
    }
    tf32 = Oracle(case, *(short[n] for n in "qkv")).plain_forward[0]
    holed, shifted = good.copy(), good * (1 + 3e-5)
    holed[0, 3, 4] = np.nan
    arguments = (
        oracle.forward[0],
        oracle.plain_forward[0],
        oracle.bound_forward[0],
        "float32",
        (-2, -1),
    )
    compare("out", good, *arguments)
    for bad in (tf32, holed, shifted):
        with pytest.raises(AssertionError, match="out"):
            compare("out", bad, *arguments)
    with pytest.raises(AssertionError, match="out"):
        compare("out", good, holed, *arguments[1:])


@pytest.mark.parametrize("causal", (False, True))
def test_c15_tf32_is_asked_for(home, causal):
    """precision="tf32" may round q, k, v and P to 11 bits, and no worse."""
    case = Case(130, 130, 64, 64, 2, 1, causal=causal)
    arrays = case.arrays()
    oracle = Oracle(case, *(arrays[n] for n in ("q", "k", "v", "dout")))
    q, k, v, dout = (home.to_home(arrays[n]) for n in ("q", "k", "v", "dout"))
    out, lse = cuflash.attention(q, k, v, causal=causal, precision="tf32", return_lse=True)
    grads = cuflash.attention_backward(dout, q, k, v, out, lse, causal=causal, precision="tf32")
    for got, want in zip(to_numpy(home, (out, *grads[:3])), (oracle.forward[0], *oracle.backward)):
        assert abs(got - want).max() < 8 * 2.0**-11 * abs(want).max()


# Scores of -inf weigh 0, however they come about


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_minus_infinity(home, dtype):
    case = Case(3, 4, 1, 8, dtype=dtype, scale=1.0)
    arrays = case.arrays()
    arrays["q"][...] = 1
    arrays["k"][0, 1:3] = -np.inf
    out, lse = attend(home, case, arrays)
    few = {**arrays, "k": arrays["k"][:, ::3], "v": arrays["v"][:, ::3]}
    want_out, want_lse = attend(home, replace(case, seqlen_k=2), few)
    np.testing.assert_allclose(
        out.astype(float), want_out.astype(float), rtol=1e-2 if dtype != "float64" else 1e-14
    )
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    arrays["k"][...] = -np.inf
    out, lse, dq, dk, dv = differentiate(home, case, arrays)
    assert not out.any() and np.all(np.isneginf(lse)) and not any(a.any() for a in (dk, dv))


# The definition for every head dim (a kernel each on a GPU, so few other facts vary)


@pytest.mark.parametrize("dims", SWEPT_DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(home, dims, dtype):
    case = Case(66, 131, *dims, 2, 1, dtype=dtype, causal=True)
    check(home, case, strict=min(dims) >= 16 and dtype != "float64")


# C16: memory


@pytest.mark.parametrize("dtype, dim", (("float32", 8), ("float16", 16)))
def test_c16_memory_is_linear(home, dtype, dim):
    """Extra memory, forward and backward, stays far below the L x S matrix and grows like L + S."""
    peaks = []
    for length in (2048, 4096):
        case = Case(length, length, dim, dim, dtype=dtype)
        arrays = {n: home.to_home(a) for n, a in case.arrays().items()}

        def call(arrays=arrays):
            out, lse = cuflash.attention(*(arrays[n] for n in "qkv"), return_lse=True)
            cuflash.attention_backward(arrays["dout"], *(arrays[n] for n in "qkv"), out, lse)

        if length == 2048:
            call()  # threads, kernels and caches exist once
        peaks.append(peak_bytes(home, call))
    # 12 MiB covers the tiles of a few threads; the matrix alone would be 64 MiB.
    assert peaks[1] < 12 * 2**20, peaks
    assert peaks[1] < 2.2 * peaks[0] + 2**20, peaks


def peak_bytes(home, call):
    """Largest number of bytes in use at once during a call, beyond what was in use before."""
    if home.is_gpu:
        pool = home.xp.get_default_memory_pool()
        pool.free_all_blocks()
        before = pool.total_bytes()
        call()
        home.synchronize()
        return pool.total_bytes() - before
    return cpu_calls.peak_bytes(call)


# C17: large scores, subnormals


@pytest.mark.parametrize("dtype", ("float32", "float64"))
@pytest.mark.parametrize("q, k", ((1024.0, 97.0), (-1024.0, 97.0), (3e4, 3e4), (1e15, 1e15)))
def test_c17_large_equal_scores(home, dtype, q, k):
    """Three equal scores give P = 1/3, forward and backward, however large they are."""
    case = Case(1, 3, 1, 1, dtype=dtype, scale=1.0)
    arrays = {n: np.ones_like(a) for n, a in case.arrays().items()}
    arrays["q"][...], arrays["k"][...], arrays["v"][...] = q, k, [[3], [6], [9]]
    out, lse, dq, dk, dv = differentiate(home, case, arrays, dlse=False)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(out, 6, rtol=4 * eps)
    np.testing.assert_allclose(dv, 1 / 3, rtol=4 * eps)
    np.testing.assert_allclose(lse, q * k + np.log(3), rtol=4 * eps)
    np.testing.assert_allclose(
        dk[0, :, 0], q * np.array([-1, 0, 1]), rtol=8 * eps, atol=8 * eps * abs(q)
    )
    np.testing.assert_allclose(dq, 0, atol=8 * eps * k)


def test_c17_close_large_scores(home):
    """Scores of 1e5 that differ by 1/4: the weights are those of the differences."""
    case = Case(2, 4, 1, 8, scale=1.0)
    arrays = case.arrays()
    arrays["q"][...], arrays["k"][...] = 1024.0, 97 + np.arange(4.0).reshape(4, 1) / 4096
    oracle = Oracle(case, *(arrays[n] for n in ("q", "k", "v", "dout")))
    out, _, _, _, dv = differentiate(home, case, arrays, dlse=False)
    np.testing.assert_allclose(out, oracle.forward[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dv, oracle.backward[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("which", ("q", "k", "v", "dout"))
def test_c17_float32_subnormals(home, which):
    """Subnormal inputs count as themselves or as 0; no result is off by more than that."""
    case = Case(4, 6)
    arrays = case.arrays()
    arrays[which] *= np.float32(1e-40)
    out, lse, dq, dk, dv = differentiate(home, case, arrays, dlse=False)
    flushed = {**arrays, which: np.zeros_like(arrays[which])}
    for inputs in (arrays, flushed):
        oracle = Oracle(case, *(inputs[n] for n in ("q", "k", "v", "dout")))
        for got, want in zip((out, lse, dq, dk, dv), (*oracle.forward, *oracle.backward)):
            np.testing.assert_allclose(
                got, want, rtol=1e-4, atol=1e-6 if abs(want).max() > 1e-30 else 1e-37
            )
