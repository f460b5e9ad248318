"""Options on scores in the Hopper family's backward, without a GPU: plans and kernels through the
compiler.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compiling import check
from test_launch_scores import program_of
from test_sm90_backward import BASE, HOPPER

from cuflash import families, score_text
from cuflash.arrays import home_of
from cuflash.edge import resolve, scored, split_options
from cuflash.families import Access, sm90_backward
from cuflash.problem import Band
from cuflash.score import Arg
from cuflash.score_bounds import largest
from cuflash.score_text import Gradient, Options

L, S = 512, 768


def mod(s, b, h, i, j):
    return 20 * np.tanh(s / 20) + (h + 1) * 0.01 * (i - j)


ALONE = {
    "softcap": dict(softcap=20.0),
    "bias": dict(bias=np.zeros((L, S), np.float16)),
    "alibi_slopes": dict(alibi_slopes=np.ones(4, np.float32)),
    "mask": dict(mask=np.ones((L, S), bool)),
    "lengths": dict(q_lens=np.full(2, L), kv_lens=np.full(2, S)),
    "segments": dict(
        q_segment_ids=np.zeros((2, L), np.int32), kv_segment_ids=np.zeros((2, S), np.int32)
    ),
    "sinks": dict(sinks=np.zeros(4, np.float32)),
    "dropout": dict(dropout_p=0.1, seed=1),
    "score_mod": dict(score_mod=mod),
}
OPTIONS = {**ALONE, "all": {k: x for some in ALONE.values() for k, x in some.items()}}


def problem_of(options, head_dim=128, causal=False):
    """A problem with options as a call has them."""
    q, k = np.empty((2, 4, L, head_dim), np.float16), np.empty((2, 2, S, head_dim), np.float16)
    home = home_of([("q", q)])
    shaping, scores = split_options("test", dict(options, causal=causal))
    return scored(home, resolve(q, k, k, shaping), shaping, scores).problem


def gradients_of(problem):
    """Those of every array, summed as it lies along queries and keys."""
    found = []
    for n, (number, _, term) in enumerate(problem.program.gradients):
        arg = problem.program.args[number]
        measured = largest(term, problem) is None
        found.append(Gradient(n, arg.along, measured, 2 if measured else 1))
    return tuple(found)


def squares_of(problem):
    """The bias's gradient by squares of dS."""
    return tuple(
        replace(g, words=0)
        for g in gradients_of(problem)
        if problem.program.args[problem.program.gradients[g.number][0]].name == "bias"
    )


def plan_of(problem, gradients=(), tile=None, need_dq=True, deterministic=True):
    return sm90_backward.backward_plan(
        problem,
        HOPPER,
        Access(16, 16),
        need_dq=need_dq,
        need_dkv=True,
        deterministic=deterministic,
        gradients=gradients,
        tile=tile,
    )


def _plans():
    """Every option alone at a head dimension and form each, all at each kernel."""
    dims = (64, 128, 256, 96, 192)
    for n, (name, options) in enumerate(OPTIONS.items()):
        for causal in (False, True):
            for head_dim in {128, dims[(n + causal) % 5]} if name != "all" else {64, 256}:
                if name == "all" and causal:
                    continue
                yield (name, head_dim, causal), plan_of(problem_of(options, head_dim, causal))
    for names, head_dim in (
        (("bias",), 128), (("alibi_slopes",), 128), (("softcap", "bias"), 64),
        (("softcap", "bias"), 128),
    ):  # fmt: skip
        problem = problem_of({k: x for n in names for k, x in ALONE[n].items()}, head_dim)
        yield (names, head_dim, "gradients"), plan_of(problem, gradients_of(problem))


# kernels_cu/bwd_sm90.cu says what that costs.
MAY_SPILL = str(("softcap", 128, True))


def test_kernels_compile(gate):
    """Nothing else spills, no product is serialised, and nothing is warned of."""
    built = gate.build([(str(key), plan, "sm_90a") for key, plan in _plans()], sample=6)
    check([x for x in built if x.name != MAY_SPILL])
    check([x for x in built if x.name == MAY_SPILL], may_spill=True)


def _squares(spilling):
    """A bias's gradient alone and beside each option, at each kernel, those that spill or the
    others.
    """
    spill = {("mask", 128), ("dropout", 128), ("dropout", 256), ("alibi_slopes", 256), ("softcap", 128)}
    for name in ("bias", "causal", "mask", "dropout", "sinks", "softcap", "alibi_slopes"):
        options = {**ALONE["bias"], **ALONE.get(name, {})}
        for head_dim in (64, 128, 192, 256):
            problem = problem_of(options, head_dim, causal=name == "causal")
            for ordered in (True, False):
                may = (name, head_dim) in spill or head_dim == 128 and not ordered
                if may == spilling:
                    plan = plan_of(problem, squares_of(problem), None, ordered, ordered)
                    yield f"{name}, {head_dim}, {ordered}", plan, "sm_90a"


def test_kernels_with_squares_compile(gate):
    check(gate.build(_squares(False), sample=4))


def test_kernels_with_squares_and_more_compile(gate):
    """Their scores take the registers: up to ten are spilled, as beside sums of integers."""
    check(gate.build(_squares(True), sample=2), may_spill=True)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("head_dim", (16, 64, 96, 128, 192, 256))
def test_every_option_has_a_plan(name, head_dim):
    """The family refuses none, its tile fits, and the kernel reads what the launch writes."""
    problem = problem_of(OPTIONS[name], head_dim)
    family, rejections = families.choose(problem, HOPPER, Access(16, 16), "backward")
    assert family is sm90_backward and rejections == []
    found = [()]
    if problem.program is not None and problem.program.gradients:
        found += [gradients_of(problem), squares_of(problem)]
    for gradients in found:
        options = Options.of(problem, gradients=gradients)
        tile = sm90_backward.tile_of(problem, options)
        assert sm90_backward.takes(problem, tile)
        plan = plan_of(problem, gradients)
        assert plan.smem_bytes <= HOPPER.smem_per_block
        assert plan.operands == score_text.rows(options, forward=False)
        assert ("kProgram = true" in plan.score) and "quick_tanh" in plan.score


def test_what_still_hinders_is_named():
    problem = problem_of(OPTIONS["all"])
    reason = sm90_backward.reject(replace(problem, dtype="float32"), HOPPER, Access(16, 16))
    assert reason == "it multiplies 16-bit types, not float32"
    reason = sm90_backward.reject(problem, families.device_of(80), Access(16, 16))
    assert "compute capability 9.0" in reason


def test_tiles_leave_room():
    """Kept fragments, many grids, and elements of every pair beside a band take the wide kernel."""
    def kernel(options, head_dim=128, causal=False, gradients=False):
        problem = problem_of(options, head_dim, causal)
        return plan_of(problem, gradients_of(problem) if gradients else ()).kernel

    bent = {**ALONE["softcap"], **ALONE["bias"]}
    assert kernel(bent) == "bwd_sm90" and kernel(bent, gradients=True) == "bwd_sm90_wide"
    assert kernel(ALONE["bias"]) == "bwd_sm90"
    assert kernel(ALONE["bias"], gradients=True) == "bwd_sm90"
    assert kernel(ALONE["bias"], causal=True) == "bwd_sm90_wide"
    assert kernel(ALONE["bias"], head_dim=64, causal=True) == "bwd_sm90"
    assert kernel(OPTIONS["all"], head_dim=64) == "bwd_sm90_wide"
    table = program_of(lambda s, i, j, t: s + t[i % 4], [Arg("free", "float32", 1, "t")])
    assert plan_of(replace(BASE, program=table)).kernel == "bwd_sm90_wide"


def test_plain_plans_have_no_score():
    for band in (None, Band(-9, 9)):
        plan = plan_of(replace(BASE, band=band))
        assert plan.score == score_text.PLAIN and plan.operands == ()
