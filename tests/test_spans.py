"""Lengths and segments without masks: when calls are worth it, their kernels through the compiler, and on a
GPU results against the reference.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from compiling import check
from score_cases import check as check_scores
from score_cases import check_agreement, without_masks
from strategies import Case, thinned
from test_compile import Point
from test_gpu import poison
from test_launch_scores import program_of
from test_plan import problem_of

from cuflash import mask_bits
from cuflash.block_lists import Cut
from cuflash.families import Access, device_of, portable, sm90, sm90_backward
from cuflash.score import Arg, Expr, constant, element, symbol

HOPPER, WHOLE = device_of(90), Access(16, 16)
ENDS = [Arg("grid", "int32", 0, name, (False, False)) for name in ("q_lens", "kv_lens")]
IDS = [Arg("grid", "int32", 0, "ids", along) for along in ((True, False), (False, True))]


def shorter(name, n):
    return Expr(symbol(name)) < Expr(element(n, ENDS[n]))


SAME = Expr(element(0, IDS[0])) == Expr(element(1, IDS[1]))


def test_when_they_do_without_masks():
    def spans(seen, args=ENDS, backward=False, value=lambda s, i, j: s, dim=64, **change):
        problem = problem_of(batch=(4,), length=2048, dim=dim, program=program_of(value, args, seen))
        found = mask_bits.unmasked(replace(problem, **change), backward)
        if found:
            assert found[0].lengths == (args is ENDS) and bool(found[0].block_map) == (args is IDS)
        return found and found[1]

    both = shorter("i", 0) & shorter("j", 1)
    assert spans(both.node) == spans((Expr(constant(True)) & both).node) == (0, 1)
    assert spans(shorter("i", 0).node) == (0, None) and spans(shorter("j", 1).node) == (None, 1)
    assert spans(SAME.node, IDS) == spans(SAME.node, IDS, True, dim=128) == (0, 1)
    assert spans(SAME.node, IDS, dim=192) == (0, 1) and spans(SAME.node, IDS, True, dim=192) is False
    other = Expr(symbol("i")) < Expr(symbol("j"))
    for seen in (both & other, both & SAME, other, SAME & other):
        assert spans(seen.node, IDS) is False
    assert spans(both.node, value=lambda s, i, j: s * 2) is False
    for change in (
        dict(sinks=True), dict(dropout=True), dict(sequences=3), dict(block_map=(128, 128)),
    ):  # fmt: skip
        assert spans(both.node, **change) is False
    assert spans(both.node, seqlen_q=255) is False and spans(SAME.node, IDS, seqlen_q=1023) is False
    for change in (dict(seqlen_k=2046), dict(seqlen_k=2049), dict(seqlen_q=(1 << 17) + 1)):
        assert spans(SAME.node, IDS, **change) is False


# ---- through the compiler ----------------------------------------------------------------------


ALL, OTHERS = ((1, 1, 1),), ((1, 1, 0), (1, 0, 1), (0, 1, 0))  # need_dq, need_dkv, deterministic


def _jobs(gradients, *dims):
    for dims, mask in itertools.product(dims, ("band", "whole", "tail")):
        point = Point(90, ("float16", "bfloat16")[mask == "whole"], dims, mask, 16, "hopper")
        by_ids = program_of(lambda s, i, j: s, IDS, SAME.node)
        for changes in (dict(lengths=True), dict(program=by_ids, block_map=(128, 128))):
            problem, widest = replace(point.problem(), **changes), max(dims)
            listed = problem.block_map is not None
            plans = []
            if not listed or widest <= mask_bits.SEGMENT_DIMS[0]:
                plans.append(sm90.forward_plan(problem, HOPPER, WHOLE, paired=(1,) * listed))
            if not listed or widest <= mask_bits.SEGMENT_DIMS[1]:
                plans.append(portable.forward_plan(problem, HOPPER, WHOLE, stats=True))
                for q, kv, ordered in gradients:
                    plan = sm90_backward.backward_plan(
                        problem, HOPPER, WHOLE, need_dq=bool(q), need_dkv=bool(kv),
                        deterministic=bool(ordered),
                    )  # fmt: skip
                    plans += [plan, portable.cast_plan(problem, plan, whole=True)][: 1 + q]
            for plan in plans:
                if plan.kernel != "cast":
                    assert (plan["kLengths"], plan["kBlockMap"]) == (not listed, listed)
                yield f"{point}, {plan}", plan, "sm_90a"
    for block, backward in (((128, 64), False), ((64, 32), False), ((64, 128), True)):
        plan = portable.span_lists_plan(Cut(2048, 2048, *block, None, True), backward)
        yield f"{plan}", plan, "sm_90a"


def test_kernels_build_clean(gate):
    check(gate.build(_jobs(ALL, (64, 64), (128, 128), (192, 128), (256, 256)), sample=6))


def test_kernels_of_other_gradients_compile(gate):
    """As those without lengths (test_sm90_backward.py), with which they share the notes: a few bytes are
    spilled outside of the loops, as with head dimensions between.
    """
    jobs = [*_jobs(OTHERS, (64, 64), (128, 128), (256, 256)), *_jobs(ALL, (40, 72))]
    check(gate.build(jobs, sample=4), may_spill=True, excused="arrive is injected")


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def at_once():
    with without_masks():
        yield


def lengths_of(case, sides, dtype):
    """Of a batch entry each: none, all, more than there are, and any."""
    rng = np.random.default_rng(case.seed)
    found = {}
    for name, size in (("q_lens", case.seqlen_q), ("kv_lens", case.seqlen_k)):
        ends = [size + 3, -1, 0, *rng.integers(1, size, 4)]
        found[name] = rng.permutation(ends)[: case.batch[0]].astype(dtype)
    return {name: x for name, x in found.items() if name[0] in sides}


def hide(arrays, ends):
    """NaN and inf in what no pair sees."""
    for name, of in (("q_lens", ("q", "dout")), ("kv_lens", ("k", "v"))):
        for n, end in enumerate(ends.get(name, ())):
            for x, odd in zip(of, (np.nan, np.inf)):
                arrays[x][n, :, max(end, 0) :] = odd
    return arrays


BANDS = (dict(), dict(causal=True), dict(window=(60, 20)), dict(causal=True, causal_offset=40))
SHAPES = (("float16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float16", 40))


GIVEN = ("qk", "int32", 330, 290), ("k", "int64", 256, 384), ("q", "int16", 500, 130)


@pytest.mark.parametrize("shape, given, band", thinned(5, SHAPES, GIVEN, BANDS), ids=str)
def test_lengths(gpu, at_once, shape, given, band):
    """Against the reference, out of memory full of NaN, with NaN and inf behind the ends."""
    (dtype, dim), (sides, integers, queries, keys) = shape, given
    case = Case(
        queries, keys, dim, dim, 2, 1, (4,), (4,), (4,), dtype=dtype, seed=dim + keys, **band
    )
    ends = lengths_of(case, sides, integers)
    poison(gpu, case)
    check_scores(gpu, case, hide(case.arrays(), ends), ends)


KINDS = "sorted", "unsorted", "one", "apart"
NARROW = (*SHAPES[:2], ("bfloat16", 192), ("float16", 40))


@pytest.mark.parametrize("shape, kind, band", thinned(5, NARROW, KINDS, BANDS), ids=str)
def test_segments(gpu, at_once, shape, kind, band):
    """With NaN in keys that nobody sees, and ids beyond 32 bits."""
    dtype, dim = shape
    case = Case(420, 390, dim, dim, 2, 1, (2,), (2,), (2,), dtype=dtype, seed=dim, **band)
    rng = np.random.default_rng(dim)
    ids = {n: rng.integers(0, 4, (2, x)) for n, x in (("q", case.seqlen_q), ("kv", case.seqlen_k))}
    if kind != "unsorted":
        ids = {n: np.sort(x, -1) for n, x in ids.items()}
    if kind in ("one", "apart"):
        ids = {n: np.full_like(x, n == "q" and kind == "apart") for n, x in ids.items()}
    ids["kv"][1, 200:] = 1 << 40  # whom no query has
    arrays = case.arrays()
    for name in "kv":
        arrays[name][1, :, 200:] = np.nan
    poison(gpu, case)
    check_scores(gpu, case, arrays, {f"{n}_segment_ids": x for n, x in ids.items()})


@pytest.mark.parametrize("deterministic", (True, False))
@pytest.mark.parametrize("dim", (64, 128))
def test_every_order_of_sums(gpu, at_once, dim, deterministic):
    """Each part of the gradients, with and without turns: the same numbers, and with them the same bits."""
    import cuflash

    case = Case(900, 1100, dim, dim, 4, 2, (3,), (3,), (3,), dtype="bfloat16", seed=5)
    ends = {n: gpu.to_home(x) for n, x in lengths_of(case, "qk", np.int32).items()}
    ids = {
        "q_segment_ids": gpu.to_home(np.arange(900) // 300),
        "kv_segment_ids": gpu.to_home(np.arange(1100) // 300),
    }
    q, k, v, dout = (gpu.to_home(case.arrays()[n]) for n in ("q", "k", "v", "dout"))
    for options in (ends, ids, {**ends, "causal": True}):
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        found = [
            cuflash.attention_backward(
                dout, q, k, v, out, lse, deterministic=deterministic, need=need, **options
            )
            for need in (("q", "k", "v"), ("q", "k", "v"), ("q",), ("k", "v"))
        ]
        for name in ("dq", "dk", "dv"):
            whole, *others = [gpu.asnumpy(getattr(x, name)).astype(np.float32)
                              for x in found if getattr(x, name) is not None]  # fmt: skip
            for other in others:
                assert np.isfinite(other).all()
                if deterministic or name != "dq":
                    assert np.array_equal(whole, other)
                else:
                    assert abs(whole - other).max() <= 0.02 * abs(whole).max()


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("dim", (64, 128, 256))
def test_many_blocks(gpu, dim, causal):
    """Large calls, by themselves, against the same as a bias of -inf."""
    xp, size = gpu.xp, 2048
    lens = xp.asarray([1500, 2048])
    ids = xp.arange(size) // 500
    same = ids[:, None] == ids
    inside = xp.arange(size) < lens[:, None]
    pairs = [
        (dict(q_segment_ids=ids), same),
        (dict(q_lens=lens, kv_lens=lens), (inside[:, :, None] & inside[:, None, :])[:, None]),
    ]
    for options, seen in pairs:
        bias = xp.where(seen, 0, -xp.inf).astype(np.float16)
        ways = [dict(options, causal=causal), dict(bias=bias, causal=causal)]
        check_agreement(gpu, (2, 8, size, dim), "bfloat16", ways, 0.02)


def test_it_is_said(gpu, at_once):
    import cuflash

    if gpu.xp.cuda.Device().compute_capability != "90":
        pytest.skip("needs compute capability 9.0")
    q = gpu.xp.zeros((1, 4, 64, 64), np.float16)
    lens, ids = gpu.xp.ones(1, np.int32), gpu.xp.zeros(64, np.int32)
    assert "as the ends of queries and keys" in str(cuflash.explain(q, q, q, kv_lens=lens))
    assert "in blocks that lists name" in str(cuflash.explain(q, q, q, q_segment_ids=ids))
