"""Terms of expressions (`Node`), and how NumPy functions are traced into them, with an `Expr` in
place of each array.

Symbols are s (the score, a float) and b, h, i, j (integers). "element" n is argument n at this
pair, viewed as (*batch, Hq, L, S); "fetch" n is argument n at the operands' indices, and a number
when there are none.
"""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import dataclass

import numpy as np

_RANK = {"bool": 0, "int": 1, "float": 2}
_nodes = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Node:
    """A term: equal terms are one object, so that comparing and hashing cost nothing.

    op is "symbol", "const", "element", "fetch", or a name in OPS; value a symbol's name, a
    constant's value or an argument's number; kind "float", "int" or "bool".
    """

    __slots__ = ("op", "operands", "value", "kind", "__weakref__")

    def __new__(cls, op, operands=(), value=None, kind="float"):
        # repr tells 0.0 from -0.0, 1 from True, and makes one NaN of all.
        key = (op, tuple(map(id, operands)), repr(value), kind)
        with _lock:
            node = _nodes.get(key)
            if node is None:
                node = object.__new__(cls)
                for name, x in zip(cls.__slots__, (op, tuple(operands), value, kind)):
                    object.__setattr__(node, name, x)
                _nodes[key] = node
        return node

    def __setattr__(self, name, value):
        raise AttributeError(f"a Node is frozen: {name} cannot be set")

    def __reduce__(self):
        return Node, (self.op, self.operands, self.value, self.kind)

    def __repr__(self):
        shown = self.op if self.value is None else f"{self.op} {self.value!r}"
        return f"<{self.kind} {shown} of {len(self.operands)}>"


@dataclass(frozen=True)
class Op:
    """One operation: what NumPy calls it, how C++ spells it and its derivatives.

    cpp has one place an operand. `takes` says what operands are turned into: "same" is the widest
    kind among them, "number" that but no bool, else a kind. `gives` is the result's kind, None the
    operands'. `slopes` maps the operands (as Expr) to the derivative by each; None: they are zero.
    """

    ufunc: np.ufunc | None
    cpp: str
    takes: str = "float"
    gives: str | None = None
    slopes: object = None


def _step(x):
    return where(x > 0, 1.0, where(x < 0, -1.0, 0.0))


def _larger(a, b):
    """1 where a > b and half where they are equal, as central differences have it."""
    return where(a > b, 1.0, where(a == b, 0.5, 0.0))


def _power_slopes(a, b):
    return b * a ** (b - 1.0), where(a > 0, a**b * np.log(where(a > 0, a, 1.0)), 0.0)


OPS = {
    "add": Op(np.add, "({0} + {1})", "number", None, lambda a, b: (1.0, 1.0)),
    "subtract": Op(np.subtract, "({0} - {1})", "number", None, lambda a, b: (1.0, -1.0)),
    "multiply": Op(np.multiply, "({0} * {1})", "number", None, lambda a, b: (b, a)),
    "divide": Op(
        np.true_divide, "({0} / {1})", "float", None, lambda a, b: (1.0 / b, -a / (b * b))
    ),
    "floor_divide": Op(np.floor_divide, "div_floor({0}, {1})", "number"),
    "remainder": Op(
        np.remainder, "mod_floor({0}, {1})", "number", None, lambda a, b: (1.0, -np.floor(a / b))
    ),
    "power": Op(np.power, "pow_of({0}, {1})", "float", None, _power_slopes),
    "maximum": Op(
        np.maximum, "maximum_of({0}, {1})", "number", None,
        lambda a, b: (_larger(a, b), _larger(b, a)),
    ),
    "minimum": Op(
        np.minimum, "minimum_of({0}, {1})", "number", None,
        lambda a, b: (_larger(b, a), _larger(a, b)),
    ),
    "negative": Op(np.negative, "(-{0})", "number", None, lambda a: (-1.0,)),
    "abs": Op(np.absolute, "abs_of({0})", "number", None, lambda a: (_step(a),)),
    "sign": Op(np.sign, "sign_of({0})", "number"),
    "floor": Op(np.floor, "floor_of({0})"),
    "ceil": Op(np.ceil, "ceil_of({0})"),
    "exp": Op(np.exp, "exp_of({0})", "float", None, lambda a: (np.exp(a),)),
    "expm1": Op(np.expm1, "expm1_of({0})", "float", None, lambda a: (np.exp(a),)),
    "log": Op(np.log, "log_of({0})", "float", None, lambda a: (1.0 / a,)),
    "log1p": Op(np.log1p, "log1p_of({0})", "float", None, lambda a: (1.0 / (1.0 + a),)),
    "tanh": Op(np.tanh, "tanh_of({0})", "float", None, lambda a: (1.0 - np.tanh(a) * np.tanh(a),)),
    "sqrt": Op(np.sqrt, "sqrt_of({0})", "float", None, lambda a: (0.5 / np.sqrt(a),)),
    "sin": Op(np.sin, "sin_of({0})", "float", None, lambda a: (np.cos(a),)),
    "cos": Op(np.cos, "cos_of({0})", "float", None, lambda a: (-np.sin(a),)),
    "less": Op(np.less, "({0} < {1})", "same", "bool"),
    "less_equal": Op(np.less_equal, "({0} <= {1})", "same", "bool"),
    "greater": Op(np.greater, "({0} > {1})", "same", "bool"),
    "greater_equal": Op(np.greater_equal, "({0} >= {1})", "same", "bool"),
    "equal": Op(np.equal, "({0} == {1})", "same", "bool"),
    "not_equal": Op(np.not_equal, "({0} != {1})", "same", "bool"),
    "and": Op(np.logical_and, "({0} & {1})", "bool"),
    "or": Op(np.logical_or, "({0} | {1})", "bool"),
    "not": Op(np.logical_not, "(!{0})", "bool"),
    "where": Op(None, "({0} ? {1} : {2})"),
    "float": Op(None, "Accum({0})", "same", "float", lambda a: (1.0,)),
    "int": Op(None, "int({0})", "same", "int"),
    "bool": Op(None, "({0} != 0)", "same", "bool"),
}
CPP = {name: op.cpp for name, op in OPS.items()}
_BY_UFUNC = {op.ufunc: name for name, op in OPS.items() if op.ufunc is not None}
# Ufuncs that others express.
_COMPOSED = {
    np.square: lambda a: a * a,
    np.reciprocal: lambda a: 1.0 / a,
    np.positive: lambda a: a,
    np.fabs: lambda a: abs(a.astype(float)),
    np.tan: lambda a: np.sin(a) / np.cos(a),
    np.exp2: lambda a: np.exp(a * math.log(2.0)),
    np.log2: lambda a: np.log(a) * (1.0 / math.log(2.0)),
    np.log10: lambda a: np.log(a) * (1.0 / math.log(10.0)),
    np.logical_xor: lambda a, b: _expr(a).astype(bool) != _expr(b).astype(bool),
    np.isnan: lambda a: a != a,
    np.isfinite: lambda a: abs(a) < math.inf,
    np.isinf: lambda a: abs(a) == math.inf,
    np.fmax: lambda a, b: where(_expr(a) != a, b, where(_expr(b) != b, a, np.maximum(a, b))),
    np.fmin: lambda a, b: where(_expr(a) != a, b, where(_expr(b) != b, a, np.minimum(a, b))),
    np.logaddexp: lambda a, b: np.maximum(a, b) + np.log1p(np.exp(-abs(_expr(a) - b))),
}
_BITS = {np.bitwise_and: "and", np.bitwise_or: "or", np.invert: "not", np.bitwise_xor: None}
# Booleans of pairs, 32 in a word: of a query's keys, or of a key's queries (mask_bits.py).
BITS, BITS_BY_KEY = "bits", "bits by key"
_TYPES = {"b": "bool", "i": "int", "u": "int", "f": "float", "V": "float"}


class Expr(np.lib.mixins.NDArrayOperatorsMixin):
    """What a traced function computes with: operators and ufuncs build a Node."""

    __slots__ = ("node",)
    __hash__ = None

    def __init__(self, node):
        self.node = node

    def __array_ufunc__(self, ufunc, method, *inputs, **keywords):
        if method != "__call__" or keywords:
            what = f"np.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}")
            raise _unsupported(what + (f" with {', '.join(keywords)}=" if keywords else ""))
        if ufunc in _COMPOSED:
            return _COMPOSED[ufunc](*inputs)
        if ufunc in _BITS:
            return _bits(ufunc, [term_of(x) for x in inputs])
        if ufunc not in _BY_UFUNC:
            raise _unsupported(f"np.{ufunc.__name__}")
        return Expr(apply(_BY_UFUNC[ufunc], *map(term_of, inputs)))

    def __array_function__(self, function, types, args, keywords):
        if function is np.where and len(args) == 3 and not keywords:
            return where(*args)
        if function is np.clip and not set(keywords) - {"min", "max", "a_min", "a_max"}:
            return _clip(*args, **{name.removeprefix("a_"): x for name, x in keywords.items()})
        fills = {np.zeros_like: 0.0, np.ones_like: 1.0}
        if function in fills and len(args) == 1 and not keywords:
            return Expr(constant(fills[function])).astype(args[0].node.kind)
        raise _unsupported(f"np.{function.__name__}")

    def astype(self, dtype):
        return Expr(_cast(self.node, _TYPES.get(np.dtype(dtype).kind)))

    def clip(self, min=None, max=None):
        return _clip(self, min, max)

    def __bool__(self):
        raise TypeError(
            "the value is known only on the device, so Python's if, and, or, not cannot ask it: "
            "use np.where, and &, |, ~ for conditions"
        )

    def _number(self):
        raise TypeError("a traced value is no Python number: use NumPy's functions, x.astype(...)")

    __int__ = __float__ = __index__ = __complex__ = __len__ = __iter__ = _number

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unsupported(f"the attribute {name!r} of a traced value")

    def __repr__(self):
        return f"Expr({self.node!r})"


class _Array:
    """An array argument of a traced function: it only can be indexed."""

    def __init__(self, number, arg):
        self._number, self._arg, self.ndim = number, arg, arg.ndim

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.ndim:
            raise TypeError(
                f"{self._arg.name}: {len(index)} indices for {self.ndim} axes: give every axis "
                "one index, as in x[h, j]"
            )
        nodes = [term_of(x) for x in index]
        if any(n.kind != "int" for n in nodes):
            raise TypeError(f"{self._arg.name}: each index must be a whole number")
        return Expr(fetch(self._number, self._arg, nodes))

    def __array_ufunc__(self, *_, **__):
        raise TypeError(f"{self._arg.name} is an array: index it, as in x[h] or x[i, j]")

    def __array_function__(self, *_):
        self.__array_ufunc__()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unsupported(f"the attribute {name!r} of an array in score_args")


def _unsupported(what):
    return NotImplementedError(f"{what} has no form on the GPU: use operations out of {_NAMES}")


_NAMES = ", ".join([*(u.__name__ for u in _BY_UFUNC), *(u.__name__ for u in _COMPOSED), "where",
                    "clip"])  # fmt: skip


# ---- building --------------------------------------------------------------------------------


def symbol(name) -> Node:
    return Node("symbol", (), name, "float" if name == "s" else "int")


def constant(value) -> Node:
    kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    if kind == "int" and not -(2**31) <= value < 2**31:
        raise ValueError(f"the constant {value} does not fit into the GPU's 32-bit integers")
    return Node("const", (), value, kind)


def element(number, arg) -> Node:
    return Node("element", (), number, _TYPES[_dtype_kind(arg.dtype)])


def fetch(number, arg, indices=()) -> Node:
    return Node("fetch", tuple(indices), number, _TYPES[_dtype_kind(arg.dtype)])


def _dtype_kind(name):
    return {"bfloat16": "f", BITS: "b", BITS_BY_KEY: "b"}.get(name) or np.dtype(name).kind


def term_of(x) -> Node:
    if isinstance(x, Expr):
        return x.node
    if isinstance(x, (bool, np.bool_)):
        return constant(bool(x))
    if isinstance(x, (int, np.integer)):
        return constant(int(x))
    if isinstance(x, (float, np.floating)):
        return constant(float(x))
    if isinstance(x, np.ndarray) and x.ndim == 0:
        return term_of(x[()])
    raise TypeError(
        f"a traced function met a {type(x).__qualname__}: numbers are constants; pass arrays by "
        "score_args and index them"
    )


def _expr(x) -> Expr:
    return Expr(term_of(x))


def where(condition, x, y) -> Expr:
    return Expr(apply("where", *map(term_of, (condition, x, y))))


def _clip(x, min=None, max=None):
    x = x if min is None else np.maximum(x, min)
    return x if max is None else np.minimum(x, max)


def _bits(ufunc, nodes):
    if any(n.kind != "bool" for n in nodes):
        raise _unsupported(f"np.{ufunc.__name__} of numbers")
    return Expr(apply(_BITS[ufunc] or "not_equal", *nodes))


def _cast(node, kind) -> Node:
    if kind not in _RANK:
        raise _unsupported("a cast to anything but bool, int and float")
    if node.kind == kind:
        return node
    if node.op == "const" and (kind != "int" or math.isfinite(node.value)):
        return constant({"float": float, "int": int, "bool": bool}[kind](node.value))
    return Node(kind, (node,), None, kind)


def apply(name, *operands) -> Node:
    """The node of an operation: operands cast, constants folded, x * 1 and x + 0 left out."""
    op = OPS[name]
    if name == "where":
        kind = max((x.kind for x in operands[1:]), key=_RANK.get)
        operands = (_cast(operands[0], "bool"), *(_cast(x, kind) for x in operands[1:]))
        if operands[1] is operands[2]:
            return operands[1]
        if operands[0].op == "const":
            return operands[2 - bool(operands[0].value)]
        return Node(name, operands, None, kind)
    kinds = [x.kind for x in operands]
    if kinds == ["bool"] * 2 and name in ("add", "multiply"):  # as NumPy has it
        return apply("or" if name == "add" else "and", *operands)
    kind = op.takes
    if kind in ("same", "number"):
        kind = max(kinds, key=_RANK.get)
        if kind == "bool" and op.takes == "number":
            kind = "int"
    if name in ("floor", "ceil") and "float" not in kinds:
        return operands[0]
    if name == "power" and operands[1].op == "const":
        whole = operands[1].value
        if whole in range(5):
            base = operands[0] if operands[1].kind == "int" else _cast(operands[0], "float")
            return _whole_power(base, int(whole))
    if name == "power" and "float" not in kinds:
        raise _unsupported("a power of integers by anything but the constants 0 to 4")
    operands = tuple(_cast(x, kind) for x in operands)
    simple = _simplified(name, operands, kind)
    return simple if simple is not None else Node(name, operands, None, op.gives or kind)


def _whole_power(base, exponent):
    result = constant(1) if base.kind == "int" else constant(1.0)
    for _ in range(exponent):
        result = apply("multiply", result, base)
    return result


def _simplified(name, operands, kind):
    if all(x.op == "const" for x in operands) and OPS[name].ufunc is not None:
        with np.errstate(all="ignore"):
            value = OPS[name].ufunc(*(x.value for x in operands)).item()
        return constant(value)
    a, b = operands if len(operands) == 2 else (None, None)
    if name == "multiply" and _is(a, 1):
        return b
    if name in ("multiply", "divide") and _is(b, 1):
        return a
    if name == "add" and _is(a, 0):
        return b
    if name in ("add", "subtract") and _is(b, 0):
        return a
    if name == "negative" and operands[0].op == "negative":
        return operands[0].operands[0]
    if name in ("and", "or") and "const" in (a.op, b.op):
        known, other = (a, b) if a.op == "const" else (b, a)
        return known if known.value == (name == "or") else other
    return None


def _is(node, value):
    return node is not None and node.op == "const" and node.value == value


def trace(function, args=(), scored=True) -> Node:
    """What a function of (s, b, h, i, j, *args), or (b, h, i, j, *args), computes.

    args are (number in the program, Arg); scored says whether s comes first, or what stands for it.
    """
    symbols = [Expr(symbol(name)) for name in "bhij"]
    if scored is not False:
        symbols.insert(0, Expr(symbol("s")) if scored is True else scored)
    given = [Expr(fetch(n, arg)) if arg.ndim == 0 else _Array(n, arg) for n, arg in args]
    return term_of(function(*symbols, *given))
