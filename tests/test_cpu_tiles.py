"""How cuflash.cpu does its work: bitwise repetition, threads, errors, memory, tiles."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cpu_calls import arrays, backward, forward, peak_bytes, problem_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cuflash import cpu, cpu_backward, cpu_rows, cpu_tiles
from cuflash.problem import Band


@example(batch=1, seqlen_q=700, seqlen_k=2500)
@settings(max_examples=6, deadline=None)
@given(batch=st.integers(1, 40), seqlen_q=st.integers(1, 60), seqlen_k=st.integers(1, 60))
def test_bitwise_the_same_for_any_number_of_threads_and_batch_mates(batch, seqlen_q, seqlen_k):
    q, k, v, dout, dlse = arrays(14, "float32", (batch,), 2, 1, seqlen_q, seqlen_k, 16, 8)
    results = []
    for threads in ("1", "2", "5"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CUFLASH_NUM_THREADS", threads)
            patch.setattr(cpu_tiles, "_WORTH_A_THREAD", 1)
            out, lse = forward(q, k, v, causal=True)
            results.append((out, lse, *backward(dout, q, k, v, out, lse, dlse, causal=True)))
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert a.tobytes() == b.tobytes()
    last = [np.ascontiguousarray(x[-1:]) for x in (q, k, v)]
    alone, _ = forward(*last, causal=True)
    assert alone.tobytes() == results[0][0][-1:].tobytes()


def test_flat_rows_do_not_depend_on_the_other_heads():
    # Head 1's scores are too large to be exponentiated as they are; head 0 must not notice.
    q, k, v, _, _ = arrays(15, "float32", (), 20, 20, 100, 300, 16, 8)
    q[1] *= 50
    out, _ = forward(q, k, v)
    alone, _ = forward(q[:1], k[:1], v[:1])
    assert alone.tobytes() == out[:1].tobytes()


def blas_threads():
    return [x.get_num_threads() for libraries in cpu_tiles._blas() for x in libraries]


def test_several_calls_at_once_and_blas_gets_its_threads_back():
    q, k, v, dout, _ = arrays(16, "float32", (), 4, 4, 300, 600, 16, 16)
    wanted, lse = forward(q, k, v)
    before = blas_threads()
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda _: forward(q, k, v)[0], range(12)))
        grads = list(pool.map(lambda _: backward(dout, q, k, v, wanted, lse), range(4)))
    assert all((out == wanted).all() for out in outs)
    assert all((a == b).all() for g in grads[1:] for a, b in zip(g, grads[0]))
    assert blas_threads() == before


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_error_in_a_worker_reaches_the_caller(direction, monkeypatch):
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "3")
    monkeypatch.setattr(cpu_tiles, "_WORTH_A_THREAD", 1)
    q, k, v, dout, _ = arrays(17, "float32", (), 2, 2, 600, 3000, 4, 4)
    out, lse = forward(q, k, v)
    calls = []

    def fail(*args):
        calls.append(None)
        if len(calls) == 9:
            raise MemoryError("the ninth tile")
        return cpu_tiles.weighted_sum(*args)

    for module in (cpu_rows, cpu_backward):
        monkeypatch.setattr(module, "weighted_sum", fail)
    with pytest.raises(MemoryError, match="ninth"):
        if direction == "forward":
            forward(q, k, v)
        else:
            backward(dout, q, k, v, out, lse)


def test_memory_grows_with_length_not_with_its_square(monkeypatch):
    monkeypatch.setenv("CUFLASH_NUM_THREADS", "2")
    peaks = []
    for seqlen in (2048, 8192):
        q, k, v, dout, _ = arrays(18, "bfloat16", (), 1, 1, seqlen, seqlen, 16, 16)
        out, lse = forward(q, k, v, causal=True)
        problem = problem_of(q, k, v, causal=True)
        grads = [np.empty_like(x) for x in (q, k, v)]
        peaks.append((
            peak_bytes(lambda: cpu.forward(problem, q, k, v, out, lse)),
            peak_bytes(lambda: cpu.backward(problem, dout, q, k, v, out, lse, None, *grads, True)),
        ))
    # A few tiles for each of two threads; backward also has dq in float32 and three numbers a row.
    tiles = 2 * 5 * 4 * cpu_tiles.BLOCK_M * cpu_tiles.BLOCK_N
    assert peaks[0][0] <= tiles and peaks[1][0] <= tiles
    assert peaks[0][1] <= tiles + 2048 * 4 * 20 and peaks[1][1] <= tiles + 8192 * 4 * 20


def test_many_heads_of_a_single_key():
    q, k, v, dout, _ = arrays(19, "float32", (70_000,), 1, 1, 1, 1, 4, 4)
    out, lse = forward(q, k, v)
    assert (out == v).all()
    dq, dk, dv = backward(dout, q, k, v, out, lse)
    assert (dv == dout).all() and np.abs(dq).max() < 1e-5 and np.abs(dk).max() < 1e-5


@pytest.mark.parametrize("rows", range(1, 12))
@pytest.mark.parametrize("keys", [1, 4, 9])
def test_key_range_and_hidden_pairs_against_brute_force(rows, keys):
    i, j = np.arange(rows)[:, None], np.arange(keys)[None, :]
    for lo in range(-rows, keys + 1):
        for hi in range(-rows - 1, keys + 1):
            band = Band(lo, hi)
            seen = (j >= i + lo) & (j <= i + hi)
            for begin in range(0, rows, 3):
                end = min(begin + 3, rows)
                first, last = cpu_tiles.key_range(band, begin, end, keys)
                block = seen[begin:end]
                assert not block[:, :max(first, 0)].any() and not block[:, max(last, 0):].any()
                if first < last:
                    hidden = cpu_tiles.hidden_pairs(band, begin, end, first, last)
                    part = block[:, first:last]
                    assert part.all() if hidden is None else (hidden == ~part).all()
                    assert hidden is None or hidden.any()


@pytest.mark.parametrize("window", [(63, 0), (64, 63), (300, 0)])
def test_a_narrow_band_computes_few_hidden_scores(window, monkeypatch):
    """At most three times the visible ones: long blocks of rows would make it ten times."""
    computed, product = [], cpu_rows.Queries.product

    def counted(block, keys):
        s = product(block, keys)
        computed.append(s.size)
        return s

    monkeypatch.setattr(cpu_rows.Queries, "product", counted)
    q, k, v, dout, _ = arrays(0, "float32", (), 1, 1, 2048, 2048, 16, 16)
    out, lse = forward(q, k, v, window=window)
    spent, visible = sum(computed), 2048 * (sum(window) + 1)
    assert visible / 2 < spent <= 3.1 * visible
    computed.clear()
    backward(dout, q, k, v, out, lse, window=window)
    assert sum(computed) <= 2 * 3.1 * visible  # once more where out is restored
