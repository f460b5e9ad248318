"""Masks as bits: when they pay, what they become, their kernels through the compiler, and on a GPU
that results are the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiling import check
from score_cases import check as check_scores
from score_cases import check_agreement, masks_as_bits, score_options
from strategies import Case, thinned
from test_compile import Point, every_gradient, score_programs
from test_launch_scores import program_of
from test_plan import problem_of
from test_score_rows import as_booleans, as_words

from cuflash import mask_bits
from cuflash.families import Access, device_of, portable, sm90_backward
from cuflash.score import BITS, BITS_BY_KEY, Arg, Expr, element, evaluate, symbol

HOPPER = device_of(90)
IDS = [Arg("grid", "int32", 0, "segment_ids", along) for along in ((True, False), (False, True))]
BIAS, TABLE = Arg("grid", "float16", 0, "bias"), Arg("free", "float32", 2, "score_args[0]")
MASK = Arg("grid", "bool", 0, "mask")


def segments(value=lambda s, i, j, *_: s, more=()):
    same = Expr(element(0, IDS[0])) == Expr(element(1, IDS[1]))
    return program_of(value, [*IDS, *more], (same & (Expr(symbol("i")) != 3)).node)


def test_what_masks_share():
    problem = problem_of(batch=(2,), length=64, program=segments())
    ids = np.broadcast_to(np.zeros((2, 1, 64, 1), np.int32), (2, 2, 64, 1))
    assert mask_bits.own_axes(problem, (ids, ids)) == (2, 1)
    alone = np.broadcast_to(np.zeros(64, np.int32)[:, None], (2, 2, 64, 1))
    assert mask_bits.own_axes(problem, (alone, alone)) == (1, 1)
    by_head = replace(problem.program, visible=(Expr(symbol("h")) > 0).node)
    assert mask_bits.own_axes(replace(problem, program=by_head), ()) == (1, 2)
    by_batch = replace(problem.program, visible=(Expr(symbol("b")) > Expr(symbol("j"))).node)
    assert mask_bits.own_axes(replace(problem, program=by_batch), ()) == (2, 1)


def test_when_bits_pay():
    """Where at least four heads share them, and the call is large."""
    program = segments()

    def pays(length=4096, batch=(2,), heads=2, **change):
        problem = problem_of(batch=batch, length=length, num_heads=heads, program=program)
        ids = np.broadcast_to(np.zeros(1, np.int32), (*batch, heads, length, 1))
        return mask_bits.pays(replace(problem, **change), (ids, ids))

    assert pays() and not pays(length=256) and not pays(batch=(1,))
    assert not pays(program=None) and not pays(sequences=3)
    assert not pays(program=program_of(lambda s, i, j: s, []))


def test_what_a_program_becomes():
    """Arguments that only masks read are gone, the others keep their order, and expressions and
    gradients mean what they meant.
    """
    program = segments(
        lambda s, i, j, table: s * table[i % 4, 0] + Expr(element(2, BIAS)), [BIAS, TABLE]
    )
    problem = problem_of(length=64, program=program)
    for by_key, kind in ((False, BITS), (True, BITS_BY_KEY)):
        changed, kept = mask_bits.rewritten(problem, by_key)
        made = changed.program
        assert kept == (2, 3) and [arg.dtype for arg in made.args] == ["float16", "float32", kind]
        assert made.visible == element(2, made.args[-1])
        assert [n for n, *_ in made.gradients] == [n - 2 for n, *_ in program.gradients]
        rng = np.random.default_rng(0)
        arrays = {2: rng.random((8, 8)), 3: rng.random((4, 3))}
        i, j = np.indices((8, 8))
        env = dict(s=rng.random((8, 8)), b=0, h=0, i=i, j=j)
        for numbers, roots in ((0, program), (2, made)):
            args = {n - numbers: x for n, x in arrays.items()}
            env |= dict(args=args, element=args.__getitem__)
            found = [evaluate(x, env) for x in (roots.value, roots.derivative)]
            found += [evaluate(term, env) for *_, term in roots.gradients]
            if roots is program:
                want = found
        assert all(np.array_equal(a, b) for a, b in zip(found, want)) and len(want) > 2
    assert replace(changed, program=program) == problem


def test_rows_hold_whatever_block_begins_in_the_sequence():
    for length in (1, 31, 32, 33, 255, 256, 257, 8192, 8191):
        words = mask_bits.row_words(length)
        assert words % 8 == 0 and 32 * words >= length - 1 + 256
    seen = np.random.default_rng(0).random((3, 77)) < 0.5
    assert np.array_equal(as_booleans(as_words(seen), 77), seen)


@pytest.fixture
def at_once():
    with masks_as_bits():
        yield


# ---- through the compiler ----------------------------------------------------------------------


def _jobs():
    """Kernels that read bits, and those that write them."""
    programs, access = score_programs(), Access(16, 16)
    programs["mask"] = dict(program=program_of(lambda s, i, j: s, [MASK], element(0, MASK)))
    names = ("mask", "bias, slopes and mask", "everything")
    points = [(name, dim, mask) for name in names for dim in (64, 128, 256)
              for mask in ("band", "tail")]  # fmt: skip
    for n, (name, dim, mask) in enumerate(points):
        point = Point(90, ("float16", "bfloat16")[n % 2], (dim, dim), mask, 16, "hopper")
        for block_map in (None, (128, 128)):
            given = replace(point.problem(), block_map=block_map, **programs[name])
            problem, _ = mask_bits.rewritten(given, False)
            yield f"{point}, {name}, map {block_map}", point.plan(problem), "sm_90a"
            problem, _ = mask_bits.rewritten(given, True)
            if sm90_backward.reject(problem, HOPPER, access) is not None:
                continue
            plan = sm90_backward.backward_plan(
                problem, HOPPER, access, need_dq=True, need_dkv=True, deterministic=True,
                gradients=every_gradient(problem) if dim < 256 and block_map is None else (),
            )  # fmt: skip
            yield f"backward {point}, {name}, map {block_map}", plan, "sm_90a"
        inner = replace(point.problem(), program=programs[name]["program"])
        for by_key in (False, True):
            plan = portable.mask_bits_plan(inner, by_key)
            yield f"mask_bits {by_key}, {point}, {name}", plan, "sm_90a"
    for kind, by_key in (("forward", False), ("stats", True), ("all deterministic", True)):
        point = Point(90, "float16", (64, 64), "band", 16, kind)
        problem = replace(point.problem(), **programs["everything"])
        yield f"{point}", point.plan(mask_bits.rewritten(problem, by_key)[0]), "sm_90a"


def test_kernels_build_clean(gate):
    check(gate.build(_jobs(), sample=5))


# ---- on a GPU ------------------------------------------------------------------------------------


MASKS = (
    ("mask",), ("segments",), ("q_lens", "kv_lens"), ("mask_mod", "bias"),
    ("mask", "segments", "softcap", "dropout"), ("kv_lens", "alibi_slopes", "sinks"),
    ("mask", "block_map"),
)  # fmt: skip
SHAPES = (("float16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float16", 40))
BANDS = (dict(), dict(causal=True), dict(window=(60, 20)))


@pytest.mark.parametrize("shape, scores, band", thinned(5, SHAPES, MASKS, BANDS), ids=str)
def test_results_are_the_same(gpu, at_once, shape, scores, band):
    """Against the reference: lengths that end inside words and blocks, NaN in what is hidden."""
    dtype, dim = shape
    case = Case(
        330, 290, dim, dim, 4, 2, (2,), (2,), (2,), dtype=dtype, scores=scores, seed=dim, **band
    )
    arrays = case.arrays()
    if "kv_lens" in scores:
        ends = np.asarray(score_options(case)["kv_lens"])
        for n, end in enumerate(ends):
            arrays["k"][n, :, end:], arrays["v"][n, :, end:] = np.nan, np.inf
    check_scores(gpu, case, arrays)


@pytest.mark.parametrize("causal", (False, True))
def test_many_blocks(gpu, causal):
    """Bits that pay by themselves, against the same mask as a bias of -inf."""
    xp = gpu.xp
    mask = xp.random.default_rng(3).random((2048, 2048)) < 0.3
    mask[7] = False
    bias = xp.where(mask, 0, -xp.inf).astype(np.float16)
    ways = [dict(mask=mask, causal=causal), dict(bias=bias, causal=causal)]
    check_agreement(gpu, (1, 8, 2048, 64), "float16", ways, 0.01)


def test_it_is_said(gpu, at_once):
    import cuflash

    if gpu.xp.cuda.Device().compute_capability != "90":
        pytest.skip("needs compute capability 9.0")
    q = gpu.xp.zeros((1, 4, 64, 64), np.float16)
    mask = gpu.xp.ones((64, 64), bool)
    assert "a function of masks; hidden keys" in str(cuflash.explain(q, q, q, mask=mask))
