"""How large an expression can get, where that follows from the shapes of a call alone."""

from __future__ import annotations

import math

from .score import ordered

_TRUTHS = (
    "less", "less_equal", "greater", "greater_equal", "equal", "not_equal", "and", "or", "not",
    "bool",
)  # fmt: skip


def largest(node, problem) -> float | None:
    """A bound on an expression's absolute value; None: it depends on what arrays hold."""
    ranges: dict = {}
    for x in ordered(node):
        operands = [ranges[y] for y in x.operands]
        ranges[x] = _leaf(x, problem) if not operands else _range(x.op, operands)
    found = ranges[node]
    return None if found is None else max(map(abs, found))


def _leaf(x, problem):
    if x.op == "const":
        value = float(x.value)
        return (value, value) if math.isfinite(value) else None
    if x.op != "symbol" or x.value == "s":
        return None
    counts = {
        "b": problem.sequences if problem.packed else math.prod(problem.batch),
        "h": problem.num_heads,
        "i": problem.seqlen_q,
        "j": problem.seqlen_k,
    }
    return 0.0, float(max(counts[x.value] - 1, 0))


def _range(op, operands):
    if op in _TRUTHS:
        return 0.0, 1.0
    if op == "where":
        operands = operands[1:]
    if None in operands:
        return None
    if op == "where":
        return min(a for a, _ in operands), max(b for _, b in operands)
    if op in ("float", "int"):
        return operands[0]
    if op == "negative":
        return -operands[0][1], -operands[0][0]
    if op == "abs":
        return 0.0, max(map(abs, operands[0]))
    if op == "sign":
        return -1.0, 1.0
    if op not in ("add", "subtract", "multiply"):
        return None
    (a, b), (c, d) = operands
    if op == "add":
        return a + c, b + d
    if op == "subtract":
        return a - d, b - c
    products = (a * c, a * d, b * c, b * d)
    return min(products), max(products)
