"""The struct that a program becomes: it compiles everywhere, and what it leaves out costs
nothing.
"""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from test_launch_scores import BIAS, TABLE, many, program_of
from test_plan import problem_of

from cuflash import jit, params, score_text
from cuflash.families import Access, device_of, portable
from cuflash.score import OPS, Arg, Expr, constant, element, symbol, trace
from cuflash.score_text import Gradient, Options

SMALL = portable.Tile(16, 16, 1, 1)


def test_without_options_there_is_one_text():
    """Bands, tails and lengths of calls without options share their kernels with no program."""
    assert not Options.of(problem_of())
    assert score_text.text(Options.of(problem_of())) == score_text.PLAIN
    assert score_text.rows(Options.of(problem_of()), forward=True) == ()


def test_equal_functions_are_one_plan():
    """Tracing the same function again makes no new kernel; another constant does."""

    def plan(factor):
        program = program_of(lambda s, i, j: s * factor, [])
        problem = replace(problem_of(), program=program)
        return portable.forward_plan(problem, device_of(80), Access(16, 16))

    assert plan(2.0) == plan(2.0)
    assert plan(2.0) != plan(3.0)


def test_the_statistics_pass_has_no_dropout():
    """But scores that are scaled as the backward kernel's are, whose maxima it finds."""
    dropped = replace(problem_of(), dropout=True)
    plan = portable.forward_plan(dropped, device_of(80), Access(16, 16), stats=True)
    assert "kDropout = false" in plan.score and "kProgram = true" in plan.score
    assert [name for name, _ in plan.operands] == ["first_batch", "scale"]


def every_operation():
    """A program in which each operation of OPS stands once, and a mask of integers and fetches."""
    ids = Arg("free", "int64", 2, "ids")
    flags = Arg("grid", "bool", 0, "flags")
    args = [BIAS, TABLE, ids, flags]

    def score(s, i, j, table, ids):
        x = (s + Expr(element(0, BIAS))) / (1.0 + abs(s)) - table[i % 4, j // 16]
        x = np.maximum(x, np.minimum(np.tanh(x), np.sin(x) * np.cos(x))) ** 1.5
        x = np.where((i < j) & (i != 3) | ~(j >= i), np.exp(-x), np.log1p(np.sqrt(x * x)))
        x = x + np.log(np.expm1(abs(x))) + np.floor(x) - np.ceil(x) + np.sign(x) * (x % 2.0)
        x = x + np.where((x <= 1.0) == (x > 0.5), x // 3.0, 0.0)
        return x * ids[0, i].astype(float) + ids[0, j].astype(bool) + s.astype(int)

    def visible(b, h, i, j, ids):
        return (ids[b, i] == ids[b, j]) & Expr(element(3, flags))

    hidden = trace(visible, [(2, ids)], scored=False)
    return program_of(score, args, hidden)


def ops_of(program):
    seen, waiting = set(), [program.value, program.visible]
    while waiting:
        node = waiting.pop()
        seen.add(node.op)
        waiting += node.operands
    return seen


def test_the_program_of_the_next_test_has_every_operation():
    assert ops_of(every_operation()) >= set(OPS) - {"float"}


def test_every_operation_compiles_forward(nvrtc):
    for capability, dtype in ((75, "bfloat16"), (80, "float64")):
        problem = replace(problem_of(dtype, 16, 16), program=every_operation(), dropout=True)
        device, access = device_of(capability), Access(16, 16)
        plan = portable.forward_plan(problem, device, access, tile=SMALL)
        _, log = jit.compile_text(jit.translation_unit(plan), plan.kernel, f"sm_{capability}")
        assert re.search(r"Used \d+ registers", log)


def test_every_derivative_compiles(gate):
    program = every_operation()
    problem = replace(problem_of("float16", 16, 16), program=program, sinks=True, dropout=True)
    gradients = tuple(
        Gradient(n, along, True, 2)
        for n, along in zip(range(len(program.gradients)), itertools.cycle([(True, False)]))
    )
    device, access = device_of(90), Access(16, 16)
    plan = portable.backward_plan(
        problem, device, access,
        need_dq=True, need_dkv=True, deterministic=True, gradients=gradients,
        tile=SMALL,
    )  # fmt: skip
    # Its assembly takes twice the compiler's time: only beside whole lists.
    arch = "compute_90" if gate.extent == "sample" else "sm_90a"
    made, log = jit.compile_text(jit.translation_unit(plan), plan.kernel, arch)
    assert made.count(b".entry") == 1 or re.search(r"Used \d+ registers", log)


def test_rows_of_a_plan_pack_as_the_compiler_lays_them_out(nvrtc):
    """sizeof, which every kernel asserts, and where the last field lies."""
    options = Options(many(), True, True, (Gradient(0, (True, True), False, 1),), True)
    for table in ("forward", "backward"):
        rows = score_text.rows(options, forward=table == "forward")
        layout = params.layout(table, rows)
        names = [name for name, _ in params.rows(table, rows)]
        words = [kind in params.WORDS for _, kind in params.rows(table, rows)]
        assert words == sorted(words, reverse=True) and sum(words) == layout.num_pointers
        assert len(set(names)) == len(names)


def test_a_constant_derivative_is_seen():
    bias = program_of(lambda s, i, j: s + Expr(element(0, BIAS)), [BIAS])
    assert "kUnit = true" in score_text.text(Options(bias, scaled=True))
    assert "kUnit = false" in score_text.text(Options(many(), scaled=True))
    assert bias.derivative is constant(1.0)
    assert score_text.depends(many().value, "s") and not score_text.depends(symbol("i"), "j")
