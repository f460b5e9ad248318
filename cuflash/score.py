"""Scores and masks as expressions: differentiated, evaluated, and written as C++."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .expr import (  # noqa: F401
    BITS,
    BITS_BY_KEY,
    CPP,
    OPS,
    Expr,
    Node,
    apply,
    constant,
    element,
    fetch,
    symbol,
    term_of,
    trace,
)


@dataclass(frozen=True)
class Arg:
    """What is known of an argument when a program is built."""

    kind: str  # "grid": (*batch, Hq, L, S) by strides; "free": indexed; "scalar": a number
    dtype: str  # of a scalar: "int32", or the scores' dtype
    ndim: int
    name: str = ""
    along: tuple[bool, bool] = (True, True)  # of a grid: whether it varies with i, with j


@dataclass(frozen=True)
class Program:
    """All that a call's options make of a score, as functions of s, b, h, i and j."""

    value: Node  # what the softmax sees; the symbol s when the options leave the scores alone
    visible: Node | None = None  # None: every pair is visible (causal and window stay in Band)
    args: tuple[Arg, ...] = ()
    derivative: Node | None = None  # of value by s
    # (argument, element or fetch, derivative of value by that entry) of float arrays
    gradients: tuple[tuple[int, Node, Node], ...] = ()


def ordered(*roots) -> list[Node]:
    """Every node below the roots, operands first."""
    found, stack = {}, [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if node in found:
            continue
        if ready:
            found[node] = None
            continue
        stack.append((node, True))
        stack += [(x, False) for x in reversed(node.operands)]
    return list(found)


def derivative(node, wrt) -> Node:
    """The derivative of an expression by a symbol, an element or a fetch.

    Of a `where` only the branch taken counts: a NaN in the other's slope has no influence.
    """
    slopes = {}  # of the nodes that depend on wrt
    for x in ordered(node):
        if x is wrt:
            slopes[x] = constant(1.0)
        elif x.op == "where":
            parts = [slopes.get(branch) for branch in x.operands[1:]]
            if parts != [None, None]:
                parts = [constant(0.0) if part is None else part for part in parts]
                slopes[x] = apply("where", x.operands[0], *parts)
        elif x.op in OPS and any(y in slopes for y in x.operands) and OPS[x.op].slopes:
            total = None
            for factor, y in zip(OPS[x.op].slopes(*map(Expr, x.operands)), x.operands):
                if y in slopes:
                    term = apply("multiply", term_of(factor), slopes[y])
                    total = term if total is None else apply("add", total, term)
            slopes[x] = total
    return slopes.get(node, constant(0.0))


def entries(node) -> list[Node]:
    """The elements and fetches of float arrays in an expression."""
    leaves = ("element", "fetch")
    return [x for x in ordered(node) if x.op in leaves and x.kind == "float"]


def evaluate(node, env, dtype=np.float64):
    """The expression's value by NumPy, with floats of a dtype.

    env has the symbols, numbers or arrays that broadcast; "element": what gives argument n at
    these pairs; "args": the arguments by number, for fetches.
    """
    values = {}
    for x in ordered(node):
        operands = [values[y] for y in x.operands]
        if x.op == "symbol":
            values[x] = env[x.value]
        elif x.op == "const":
            values[x] = x.value
        elif x.op == "element":
            values[x] = env["element"](x.value)
        elif x.op == "fetch":
            array = env["args"][x.value]
            values[x] = array[tuple(operands)] if isinstance(array, np.ndarray) else array
        elif x.op == "where":
            values[x] = np.where(*operands)
        elif OPS[x.op].ufunc is None:
            target = dtype if x.op == "float" else {"int": np.int64, "bool": np.bool_}[x.op]
            values[x] = np.asarray(operands[0]).astype(target)
        else:
            values[x] = OPS[x.op].ufunc(*operands)
        if x.op in ("element", "fetch") and x.kind == "float" and isinstance(values[x], np.ndarray):
            values[x] = values[x].astype(dtype)
    return values[node]


def render(node, names=None):
    """`render_all` of one node: (lines, expression)."""
    lines, (expression,) = render_all([node], names)
    return lines, expression


def render_all(nodes, names=None):
    """Nodes in C++: lines that define what is used more than once, and the expressions.

    names spells symbols; its "element" and "fetch" are functions of the argument's number (and the
    indices' texts), "divide" one of the node and its operands' texts.
    """
    names = names or {}
    at_pair = names.get("element", lambda n: f"arg{n}(i, j)")
    at_index = names.get("fetch", lambda n, indices: f"arg{n}({', '.join(indices)})")
    divided = names.get("divide", lambda _, a, b: CPP["divide"].format(a, b))
    order = ordered(*nodes)
    uses = dict.fromkeys(nodes, 0)
    for x in [*nodes, *(y for x in order for y in x.operands)]:
        uses[x] = uses.get(x, 0) + 1
    lines, text = [], {}
    for x in order:
        operands = [text[y] for y in x.operands]
        if x.op == "symbol":
            text[x] = names.get(x.value, x.value)
        elif x.op == "const":
            text[x] = _constant_text(x)
        elif x.op == "element":
            text[x] = at_pair(x.value)
        else:
            if x.op == "fetch":
                text[x] = at_index(x.value, operands)
            elif x.op == "divide":
                text[x] = divided(x, *operands)
            else:
                text[x] = CPP[x.op].format(*operands)
            if uses.get(x, 0) > 1 or len(text[x]) > 400:
                kind = {"float": "Accum"}.get(x.kind, x.kind)
                lines.append(f"const {kind} t{len(lines)} = {text[x]};")
                text[x] = f"t{len(lines) - 1}"
    return lines, [text[node] for node in nodes]


def _constant_text(node):
    value = node.value
    if node.kind == "bool":
        return str(value).lower()
    if node.kind == "int":
        return str(value) if value > -(2**31) else "(-2147483647 - 1)"
    if value != value:
        return "(infinity<Accum>() * 0)"
    if math.isinf(value):
        return "infinity<Accum>()" if value > 0 else "(-infinity<Accum>())"
    return f"Accum({value!r})"
