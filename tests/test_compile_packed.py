"""The compile gate for packed sequences with options, whose scores count in their own sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from compiling import check
from test_compile import Point, every_gradient, known_architectures
from test_compile import pytestmark as pytestmark

from cuflash import jit
from cuflash.families import Access, device_of, portable, sm90, sm90_backward
from cuflash.score import Arg, Expr, Program, derivative, element, entries, fetch, symbol


def program(function, args, visible=None) -> Program:
    s, b, h, i, j = (Expr(symbol(name)) for name in "sbhij")
    value = function(s, b, h, i, j).node
    slopes = tuple((n.value, n, derivative(value, n)) for n in entries(value))
    seen = None if visible is None else visible(b, h, i, j).node
    return Program(value, seen, tuple(args), derivative(value, symbol("s")), slopes)


def facts() -> dict:
    slopes = Arg("grid", "float32", 0, "alibi_slopes", (False, False))
    offsets, table = Arg("free", "int32", 1, "offsets"), Arg("free", "float32", 2, "score_args[0]")
    alibi = program(
        lambda s, b, h, i, j: s
        - Expr(element(0, slopes)) * abs(i + Expr(fetch(1, offsets, (symbol("b"),))) - j),
        [slopes, offsets],
    )
    traced = program(
        lambda s, b, h, i, j: s * Expr(fetch(0, table, ((b % 3).node, j.node)))
        + np.where(b > 1, 0.5, 0.0) * (i - j),
        [table],
    )
    hidden = program(lambda s, *_: s, [], lambda b, h, i, j: (i + 2 * j + b) % 5 != 0)
    return {
        "alibi": dict(program=alibi),
        "score_mod": dict(program=traced, sinks=True, dropout=True),
        "mask_mod": dict(program=hidden),
        "dropout": dict(dropout=True),
    }


POINTS = (
    (90, "bfloat16", (64, 64), "score_mod", "forward"),
    (80, "float16", (128, 128), "alibi", "forward"),
    (75, "float16", (64, 64), "dropout", "stats"),
    (90, "float32", (64, 64), "mask_mod", "stats"),
    (86, "float64", (40, 72), "score_mod", "forward"),
    (90, "bfloat16", (64, 64), "score_mod", "all deterministic"),
    (90, "float16", (128, 128), "alibi", "all unordered"),
    (75, "float16", (64, 64), "score_mod", "kv unordered"),
    (80, "bfloat16", (256, 256), "mask_mod", "all deterministic"),
    (120, "float32", (64, 64), "alibi", "q deterministic"),
    (90, "bfloat16", (256, 256), "alibi", "all deterministic"),
    *(
        (90, ("float16", "bfloat16")[n % 2], dims, name, "hopper")
        for n, dims in enumerate(((64, 64), (128, 128), (256, 256)))
        for name in ("alibi", "score_mod", "mask_mod", "dropout")
    ),
)


def test_kernels_build_clean(nvrtc, gate):
    jobs, chosen = [], facts()
    for capability, dtype, dims, name, kind in POINTS:
        point = Point(capability, dtype, dims, "packed", 16, kind)
        problem = replace(point.problem(), batch=(), **chosen[name])
        plan = point.plan(problem, gradients=kind.startswith("all") and bool(problem.program))
        arch = jit.architecture(*divmod(capability, 10))
        if capability in known_architectures(nvrtc):
            jobs.append((f"{point}, {name}", plan, arch))
    check(gate.build(jobs, sample=5))


def test_scores_count_in_their_sequence():
    """Only where sequences are packed, whichever way the text is written."""
    device, access = device_of(90), Access(16, 16)
    problem = replace(Point(90, "float16", (64, 64), "packed", 16, "").problem(), batch=())
    problem = replace(problem, **facts()["score_mod"])
    plain = replace(problem, sequences=None)
    text, other = (portable.forward_plan(x, device, access).score for x in (problem, plain))
    assert "at.b" in text and "at.b" not in other
    assert "p.first_batch + batch" in other
    rows = sm90.forward_plan(problem, device, access).score
    assert "q.k_start = at.k_start" in rows and "at.number" in rows


def test_hoppers_backward_builds_clean(nvrtc, gate):
    jobs, device, access = [], device_of(90), Access(16, 16)
    for n, dims in enumerate(((64, 64), (128, 128), (192, 128), (256, 256))):
        for name, chosen in facts().items():
            problem = Point(90, ("float16", "bfloat16")[n % 2], dims, "packed", 16, "").problem()
            problem = replace(problem, batch=(), **chosen)
            refused = sm90_backward.reject(problem, device, access)
            assert (refused is not None) == (dims[0] == 256 and name in ("alibi", "score_mod"))
            if refused is None:
                gradients = every_gradient(problem) if problem.program else ()
                plan = sm90_backward.backward_plan(
                    problem, device, access, need_dq=True, need_dkv=True, deterministic=n % 2 == 0,
                    gradients=gradients,
                )  # fmt: skip
                jobs.append((f"{dims}, {name}", plan, "sm_90a"))
    check(gate.build(jobs, sample=3))
