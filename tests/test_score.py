"""Expressions: operations against NumPy, derivatives against finite differences, errors."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from cuflash import score
from cuflash.score import Arg, Expr, Program, derivative, entries, evaluate, render, symbol, trace

I, J = np.arange(5)[:, None], np.arange(7)[None, :]
S = np.random.default_rng(3).standard_normal((5, 7))
TABLE = np.random.default_rng(4).standard_normal((5, 7))
ARGS = ((0, Arg("free", "float64", 2, "score_args[0]")), (1, Arg("scalar", "float64", 0, "c")))

FUNCTIONS = {
    "arithmetic": lambda s, b, h, i, j, t, c: (s * 2 - j) / (i + 1.5) + c * s - (-s),
    "whole numbers": lambda s, b, h, i, j, t, c: s + (i - j) // 2 + (i - 2 * j) % 3,
    "float remainder": lambda s, b, h, i, j, t, c: s % 0.7 + s // 0.6,
    "elementary": lambda s, b, h, i, j, t, c: (
        np.exp(s) + np.log(s * s + 1) + np.sin(s) * np.cos(s) + np.sqrt(s * s + c * c)
    ),
    "softcap": lambda s, b, h, i, j, t, c: c * np.tanh(s / c),
    "where": lambda s, b, h, i, j, t, c: np.where(i >= j, 30 * np.tanh(s / 30), s * c),
    "where hides NaN": lambda s, b, h, i, j, t, c: np.where(s > 0, np.log(s), 0.0),
    "min max abs": lambda s, b, h, i, j, t, c: (
        np.maximum(s, c) + np.minimum(s, 0.2) * abs(s) + np.clip(s, -0.5, 0.5)
    ),
    "powers": lambda s, b, h, i, j, t, c: s**3 + s**2 + np.abs(s) ** c + 2.0**s + (i + 1) ** 2,
    "others": lambda s, b, h, i, j, t, c: (
        np.log1p(s * s) + np.expm1(s) + np.square(s) + np.logaddexp(s, 0.1) + np.exp2(s)
        + np.sign(j)
    ),
    "logic": lambda s, b, h, i, j, t, c: np.where(
        (i > j) & ~(j == 2) | np.logical_xor(i == 1, j == 1), s, np.fmax(s, t[j % 5, i])
    ),
    "fetch": lambda s, b, h, i, j, t, c: s * t[i, j] + t[i, -1 - j] * t[i, j] * c + t[h, j],
    "casts": lambda s, b, h, i, j, t, c: s + (i - j).astype(np.float64) / 3 + (s > 0) * c,
}


def env(s=S, table=TABLE, c=0.7):
    return dict(s=s, b=2, h=3, i=I, j=J, args=(table, c), element=lambda n: (table, c)[n])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_value(name):
    """What was traced computes what NumPy computes by calling the function."""
    node = trace(FUNCTIONS[name], ARGS)
    with np.errstate(all="ignore"):
        want = FUNCTIONS[name](S, 2, 3, I, J, TABLE, 0.7)
        got = evaluate(node, env())
    assert np.allclose(got, want, rtol=1e-13, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivative_by_s(name):
    function, step = FUNCTIONS[name], 1e-6
    with np.errstate(all="ignore"):
        args = (2, 3, I, J, TABLE, 0.7)
        want = (function(S + step, *args) - function(S - step, *args)) / (2 * step)
        got = evaluate(derivative(trace(function, ARGS), symbol("s")), env())
    assert np.allclose(np.broadcast_to(got, want.shape), want, rtol=1e-6, atol=1e-8)


def test_derivative_by_entries():
    """Each entry of a table receives the terms of all the fetches that read it."""
    function, step = FUNCTIONS["fetch"], 1e-6
    node = trace(function, ARGS)
    found = [x for x in entries(node) if x.value == 0]
    assert len(found) == 3
    got = np.zeros_like(TABLE)
    for x in found:
        slope = np.broadcast_to(evaluate(derivative(node, x), env()), S.shape)
        index = tuple(
            np.broadcast_to(evaluate(y, env()), S.shape) % size
            for y, size in zip(x.operands, TABLE.shape)
        )
        np.add.at(got, index, slope)
    want = np.zeros_like(TABLE)
    for place in np.ndindex(TABLE.shape):
        nudge = np.zeros_like(TABLE)
        nudge[place] = step
        sides = [function(S, 2, 3, I, J, TABLE + n, 0.7).sum() for n in (nudge, -nudge)]
        want[place] = (sides[0] - sides[1]) / (2 * step)
    assert np.allclose(got, want, rtol=1e-6, atol=1e-6)


def test_ties_share_the_slope():
    node = derivative(trace(lambda s, b, h, i, j: np.maximum(s, 0.0) + abs(s)), symbol("s"))
    assert evaluate(node, env(s=np.array([-1.0, 0.0, 1.0]))).tolist() == [-1.0, 0.5, 2.0]


def test_nan_passes_max_and_min():
    node = trace(lambda s, b, h, i, j: np.maximum(np.minimum(s, 1.0), 0.0))
    assert math.isnan(evaluate(node, env(s=np.array([np.nan])))[0])


def test_equal_expressions_are_one():
    one, two = (trace(FUNCTIONS["elementary"], ARGS) for _ in range(2))
    assert one is two and hash(one) == hash(two)
    assert Program(one) == Program(two) and hash(Program(one)) == hash(Program(two))
    assert pickle.loads(pickle.dumps(one)) is one

    def scaled(by):
        return trace(lambda s, b, h, i, j: s * by)

    assert scaled(2.0) is not scaled(3.0) and scaled(0.0) is not scaled(-0.0)


def test_long_chains():
    """Depth and sharing cost neither recursion nor exponential time."""

    def function(s, b, h, i, j):
        for _ in range(3000):
            s = s * s * 0.5
        return s

    node = trace(function)
    assert evaluate(node, env(s=np.array([2.0])))[0] == 2.0
    assert len(score.ordered(derivative(node, symbol("s")))) < 30_000
    assert max(map(len, render(node)[0])) < 1000


def test_simplified():
    s, i = symbol("s"), symbol("i")
    assert trace(lambda s, b, h, i, j: (s + 0) * 1 - 0.0) is s
    assert trace(lambda s, b, h, i, j: s / 1.0) is s
    assert trace(lambda b, h, i, j: np.where(True, i, j) if False else i + 0, scored=False) is i
    assert trace(lambda s, b, h, i, j: s * 0 + np.float32(2) ** 2).kind == "float"
    assert derivative(trace(lambda s, b, h, i, j: s + i), s).value == 1.0


def test_render():
    node = trace(lambda s, b, h, i, j, t: np.where(i >= j, np.tanh(s) * np.tanh(s) + t[h], -np.inf),
                 ((2, Arg("free", "float32", 1)),))  # fmt: skip
    lines, text = render(node, {"s": "x"})
    assert lines == ["const Accum t0 = tanh_of(x);"]
    assert text == "((i >= j) ? ((t0 * t0) + arg2(h)) : (-infinity<Accum>()))"


@pytest.mark.parametrize(
    "function, error, text",
    [
        (lambda s, b, h, i, j: s if s > 0 else 0.0, TypeError, "np.where"),
        (lambda s, b, h, i, j: s if i and j else 0.0, TypeError, "np.where"),
        (lambda s, b, h, i, j: np.arctan(s), NotImplementedError, "np.arctan"),
        (lambda s, b, h, i, j: np.cumsum(s), NotImplementedError, "np.cumsum"),
        (lambda s, b, h, i, j: np.add.reduce(s), NotImplementedError, "np.add.reduce"),
        (lambda s, b, h, i, j: s.mean(), NotImplementedError, "'mean'"),
        (lambda s, b, h, i, j: math.exp(s), TypeError, "no Python number"),
        (lambda s, b, h, i, j: None, TypeError, "NoneType"),
        (lambda s, b, h, i, j: s + np.ones(3), TypeError, "score_args"),
        (lambda s, b, h, i, j: s + i**j, NotImplementedError, "power of integers"),
        (lambda s, b, h, i, j: i << 2, NotImplementedError, "left_shift"),
        (lambda s, b, h, i, j: i & j, NotImplementedError, "bitwise_and of numbers"),
        (lambda s, b, h, i, j: s + 2**40 * i, ValueError, "32-bit"),
    ],
)
def test_errors(function, error, text):
    with pytest.raises(error, match=text):
        trace(function)


def test_array_errors():
    for function in (lambda s, b, h, i, j, t: s + t, lambda s, b, h, i, j, t: s + t[i]):
        with pytest.raises(TypeError, match="index"):
            trace(function, ARGS[:1])
    with pytest.raises(TypeError, match="whole number"):
        trace(lambda s, b, h, i, j, t: t[s, j], ARGS[:1])
    with pytest.raises(AttributeError, match="frozen"):
        symbol("s").kind = "int"
    assert isinstance(Expr(symbol("s")) + 1, Expr)
