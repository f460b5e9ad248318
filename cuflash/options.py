"""The options that act on scores and weights: checked, and made one program with its operands.

All that a pair's score or visibility depends on, but its band, is written here once as an
expression of (s, b, h, i, j), in the contract's order.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from numbers import Real

import numpy as np

from .arrays import dtype_name
from .blockmap import BlockMap
from .checks import DTYPES, is_bool, is_int, show
from .extras import Called, Extras
from .philox import check_dropout, check_seed
from .score import Arg, Expr, Program, constant, derivative, element, entries, fetch, symbol, trace

# What "not used" means for each.
DEFAULTS = {
    "softcap": None,
    "bias": None,
    "alibi_slopes": None,
    "mask": None,
    "q_lens": None,
    "kv_lens": None,
    "q_segment_ids": None,
    "kv_segment_ids": None,
    "block_map": None,
    "sinks": None,
    "score_mod": None,
    "mask_mod": None,
    "score_args": (),
    "dropout_p": 0.0,
    "seed": None,
}
_ARRAYS = (
    "bias", "alibi_slopes", "mask", "q_lens", "kv_lens", "q_segment_ids", "kv_segment_ids", "sinks",
)  # fmt: skip
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def used(options: dict) -> dict:
    """Those not at their default. Arrays are never compared: that would read the GPU."""
    found = {}
    for name, value in options.items():
        default = DEFAULTS[name]
        if default is None:
            off = value is None
        elif name == "score_args":
            off = type(value) in (tuple, list) and not value
        else:
            off = type(value) in (int, float) and value == 0
        if not off:
            found[name] = value
    return found


def arrays_of(options: dict) -> list:
    """(name, array) of every array among the options."""
    found = [(name, options[name]) for name in _ARRAYS if name in options]
    args = options.get("score_args", ())
    if not isinstance(args, (tuple, list)):
        raise TypeError(
            f"score_args is a {type(args).__qualname__}, but it must be a tuple of arrays and "
            "numbers"
        )
    return found + [(f"score_args[{n}]", x) for n, x in enumerate(args) if not _is_number(x)]


def _is_number(x) -> bool:
    return is_bool(x) or isinstance(x, Real)


class Options:
    """One call's options: `problem`, with program, sinks, dropout and block map, and `extras`."""

    def __init__(
        self, home, call, options: dict, causal, causal_offset, first_batch=0, packing=None
    ):
        self.home, self.options = home, options
        problem = call.problem
        self.batch, self.heads = problem.batch, problem.num_heads
        self.seqlens = problem.seqlen_q, problem.seqlen_k
        # None: a number for each of the packed sequences.
        self.offset = self.seqlens[1] - self.seqlens[0] if packing is None else None
        self.packing = packing
        if causal_offset is not None:
            self.offset = int(causal_offset)
        elif isinstance(causal, str) and causal == "top_left":
            self.offset = 0
        self.number = problem.lse_dtype
        self.args, self.operands = [], []  # of the program: what they are, and the arrays
        self.untraced = None  # why score_mod has no derivative
        self.traced_mask = None  # mask_mod as a Node
        self.own = {}  # name: (the caller's array, its number in the program or None, its view)
        value = self._value()
        visible = self._visible()
        program = None
        mods = "score_mod" in options or "mask_mod" in options
        if value is not symbol("s") or visible is not None or mods:
            program = _program(value, visible, tuple(self.args))
        keep, seed = self._dropout()
        sinks = self._sinks()
        block_map = self._block_map()
        self.problem = replace(
            problem,
            program=program,
            sinks=sinks is not None,
            dropout=seed is not None,
            block_map=block_map and block_map.block,
        )
        called = self._called() if home.xp is np else None
        operands = tuple(self.operands)
        self.extras = Extras(operands, sinks, keep, seed, first_batch, packing, block_map, called)

    def arrays(self) -> tuple:
        """(name, array) of all that is read."""
        return tuple((name, view) for name, (_, _, view) in self.own.items())

    # ---- operands ----

    def _take(self, name, dtypes):
        array = self.home.adopt(name, self.options[name])
        dtype = dtype_name(array.dtype)
        if dtype not in dtypes:
            raise TypeError(f"{name}: its dtype is {dtype}, but it must be {' or '.join(dtypes)}")
        return array

    def _fit(self, name, array, shape, what):
        own = (1,) * (len(shape) - array.ndim) + array.shape
        if len(own) > len(shape) or any(n not in (1, full) for n, full in zip(own, shape)):
            raise ValueError(
                f"{name}: its shape is {array.shape}, but it must broadcast to {what} = {shape}"
            )
        return array.reshape(own) if array.ndim == 0 else array[(None,) * (len(own) - array.ndim)]

    def _grid(self, name, array):
        """One more argument, with axes (*batch, Hq, L, S), of that size or 1, read at each pair."""
        along = tuple(n > 1 for n in array.shape[-2:])
        arg = Arg("grid", dtype_name(array.dtype), array.ndim, name, along)
        shape = (*self.batch, self.heads, *self.seqlens)
        self.own[name] = self.options[name], len(self.args), array
        self.args.append(arg)
        repeated = array.shape != shape  # with stride 0
        self.operands.append(self.home.xp.broadcast_to(array, shape) if repeated else array)
        return Expr(element(len(self.args) - 1, arg))

    def _scalar(self, name, value):
        dtype = "int32" if isinstance(value, int) else self.number
        arg = Arg("scalar", dtype, 0, name)
        self.args.append(arg)
        self.operands.append(value)
        return Expr(fetch(len(self.args) - 1, arg))

    def _offset(self):
        if self.offset is not None:
            return self._scalar("offset", self.offset)
        arg = Arg("free", "int32", 1, "offsets")
        self.args.append(arg)
        self.operands.append(self.packing.shifts)
        return Expr(fetch(len(self.args) - 1, arg, (symbol("b"),)))

    def _per_head(self, name):
        array = self._take(name, DTYPES)
        return self._fit(name, array, (*self.batch, self.heads), "(..., Hq)")

    def _per_length(self, name, length):
        array = self._take(name, _INTEGERS)
        return self._fit(name, array, (*self.batch, length), "(..., length)")

    # ---- the program ----

    def _value(self):
        options = self.options
        s, i, j = (Expr(symbol(name)) for name in "sij")
        if "softcap" in options:
            cap = self._scalar("softcap", _softcap(options["softcap"]))
            s = cap * np.tanh(s / cap)
        if "bias" in options:
            shape = (*self.batch, self.heads, *self.seqlens)
            bias = self._fit("bias", self._take("bias", DTYPES), shape, "(..., Hq, L, S)")
            s = s + self._grid("bias", bias)
        if "alibi_slopes" in options:
            slopes = self._grid("alibi_slopes", self._per_head("alibi_slopes")[..., None, None])
            s = s + -slopes * abs(i + self._offset() - j)
        self.given = self._score_args()
        self.before_mod = s.node
        return self._traced("score_mod", s) if "score_mod" in options else s.node

    def _score_args(self):
        options, given = self.options, []
        if "score_args" in options and not {"score_mod", "mask_mod"} & set(options):
            raise ValueError("score_args without score_mod or mask_mod: they would have no effect")
        for n, x in enumerate(options.get("score_args", ())):
            name = f"score_args[{n}]"
            if _is_number(x):
                whole = is_bool(x) or is_int(x)
                x = int(x) if whole else float(x)
                if whole and not -(2**31) <= x < 2**31:
                    raise ValueError(f"{name}={x}: whole numbers must fit into 32 bits")
                arg = Arg("scalar", "int32" if whole else self.number, 0, name)
                self.operands.append(x)
            else:
                array = self.home.adopt(name, x)
                dtype = dtype_name(array.dtype)
                if dtype not in (*DTYPES, *_INTEGERS, "bool"):
                    raise TypeError(f"{name}: its dtype is {dtype}, but it must be real")
                arg = Arg("free", dtype, array.ndim, name)
                self.own[name] = x, len(self.args), array
                self.operands.append(array)
            given.append((len(self.args), arg))
            self.args.append(arg)
        return given

    def _traced(self, name, s=False):
        function = self.options[name]
        if not callable(function):
            raise TypeError(f"{name}={show(function)}: it must be a function or None")
        try:
            return trace(function, self.given, s)
        except (TypeError, IndexError, NotImplementedError, ValueError) as error:
            if self.home.xp is np and isinstance(error, NotImplementedError):
                if name == "score_mod":
                    self.untraced = NotImplementedError(f"{name}: its gradient: {error}")
                return constant(True) if s is False else s.node
            kind = TypeError if isinstance(error, IndexError) else type(error)
            raise kind(f"{name}: {error}") from error

    def _visible(self):
        options = self.options
        i, j = (Expr(symbol(name)) for name in "ij")
        seen = Expr(constant(True))
        if "mask" in options:
            shape = (*self.batch, self.heads, *self.seqlens)
            mask = self._fit("mask", self._take("mask", ("bool",)), shape, "(..., Hq, L, S)")
            seen = seen & self._grid("mask", mask)
        for name, place in (("q_lens", i), ("kv_lens", j)):
            if name in options:
                array = self._take(name, _INTEGERS)
                lens = self._fit(name, array, self.batch, "the leading axes")
                seen = seen & (place < self._grid(name, lens[..., None, None, None]))
        seen = self._segments(seen)
        self.before_mask = None if seen.node is constant(True) else seen.node
        if "mask_mod" in options:
            node = self._traced("mask_mod")
            if node.kind != "bool":
                raise TypeError("mask_mod: it must return a condition, as in i >= j")
            self.traced_mask = node
            seen = seen & Expr(node)
        return None if seen.node is constant(True) else seen.node

    def _segments(self, seen):
        options = self.options
        names = [n for n in ("q_segment_ids", "kv_segment_ids") if n in options]
        if not names:
            return seen
        if len(names) == 1 and self.seqlens[0] != self.seqlens[1]:
            raise ValueError(
                f"{names[0]} alone, with {self.seqlens[0]} queries and {self.seqlens[1]} keys: "
                "with different lengths both q_segment_ids and kv_segment_ids must be given"
            )
        q_ids = self._per_length(names[0], self.seqlens[0])[..., None, :, None]
        k_ids = self._per_length(names[-1], self.seqlens[1])[..., None, None, :]
        return seen & (self._grid(names[0], q_ids) == self._grid(names[-1], k_ids))

    # ---- what is no part of the program ----

    def _called(self):
        functions = [self.options.get(name) for name in ("score_mod", "mask_mod")]
        if functions == [None, None]:
            return None
        args = tuple(self.operands[n] for n, _ in self.given)
        return Called(self.before_mod, self.before_mask, *functions, args)

    def _block_map(self):
        given = self.options.get("block_map")
        if given is None:
            return None
        if not isinstance(given, BlockMap):
            raise TypeError(
                f"block_map is a {type(given).__qualname__}, but it must be a BlockMap or None"
            )
        return given.fit(self.home, (*self.batch, self.heads), self.seqlens)

    def _sinks(self):
        if "sinks" not in self.options:
            return None
        sinks = self._per_head("sinks")
        self.own["sinks"] = self.options["sinks"], None, sinks
        sinks = sinks.astype(self.number)
        return self.home.xp.broadcast_to(sinks, (*self.batch, self.heads))

    def _dropout(self):
        options = self.options
        if "seed" in options:
            seed = check_seed(options["seed"])
        if "dropout_p" not in options:
            return 1.0, None
        keep = check_dropout(options["dropout_p"])
        if "seed" not in options:
            raise TypeError(
                f"dropout_p={options['dropout_p']} without seed: a whole number must say which "
                "weights are dropped"
            )
        return keep, seed


def _softcap(value) -> float:
    rule = "it must be None or a positive number"
    if is_bool(value) or not isinstance(value, Real):
        raise TypeError(f"softcap={show(value)}: {rule}")
    if not 0 < value < 3e38 or not math.isfinite(value):
        raise ValueError(f"softcap={show(value)}: {rule}, finite in float32")
    return float(value)


@lru_cache(maxsize=1024)
def _program(value, visible, args) -> Program:
    found = tuple((x.value, x, derivative(value, x)) for x in entries(value))
    gradients = tuple(entry for entry in found if args[entry[0]].kind != "scalar")
    return Program(value, visible, args, derivative(value, symbol("s")), gradients)
