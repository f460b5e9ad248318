"""From the caller's arrays to a backend, which takes (*batch, H, L, D), and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .arrays import check_output, dtype_name
from .checks import DTYPES, check_flag, check_need, check_operand
from .extras import Extras
from .options import DEFAULTS, Options, used
from .problem import Call, call_of

_FLOAT32 = np.dtype("float32")
_FLOAT64 = np.dtype("float64")
GRADIENTS = ("q", "k", "v")
OPTION_GRADIENTS = ("bias", "alibi_slopes", "sinks", "score_args")
ALL_GRADIENTS = GRADIENTS + OPTION_GRADIENTS

# The options that shape the problem, in the order of call_of's parameters.
SHAPING = {
    "layout": "bhsd",
    "scale": None,
    "causal": False,
    "causal_offset": None,
    "window": None,
    "precision": None,
}


class _Gradients(NamedTuple):
    dq: Any = None
    dk: Any = None
    dv: Any = None


class AttentionGrads(_Gradients):
    """Gradients by name; None where `need` left one out. Each has its input's shape and dtype.

    As a tuple these are dq, dk and dv. Those of the options are attributes beside them: dbias,
    dalibi_slopes, dsinks, and dscore_args, a tuple with None for what is no float array.
    """

    dbias = dalibi_slopes = dsinks = dscore_args = None

    def __new__(
        cls, dq=None, dk=None, dv=None, dbias=None, dalibi_slopes=None, dsinks=None,
        dscore_args=None,
    ):  # fmt: skip
        grads = super().__new__(cls, dq, dk, dv)
        grads.dbias, grads.dalibi_slopes = dbias, dalibi_slopes
        grads.dsinks, grads.dscore_args = dsinks, dscore_args
        return grads

    def __repr__(self):
        named = {**self._asdict(), **self.__dict__}
        return f"AttentionGrads({', '.join(f'{name}={x!r}' for name, x in named.items())})"


def split_options(function: str, given: dict) -> tuple[tuple, dict]:
    """From **options those for call_of, in order, and those on scores that are used."""
    if given.keys() <= SHAPING.keys():
        return tuple({**SHAPING, **given}.values()), {}
    for name in given:
        if name not in SHAPING and name not in DEFAULTS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    shaping = {name: value for name, value in given.items() if name in SHAPING}
    scored = used({name: value for name, value in given.items() if name in DEFAULTS})
    return tuple({**SHAPING, **shaping}.values()), scored


def check_wanted(need, scores: dict) -> tuple[bool, ...]:
    """Which of ALL_GRADIENTS `need` names; those of options that are not given are errors."""
    wanted = check_need(need, ALL_GRADIENTS)
    for name, want in zip(ALL_GRADIENTS, wanted):
        if want and name not in GRADIENTS and name not in scores:
            raise ValueError(f"need={need!r}: {name!r} is asked for, but {name} is not given")
    return wanted


def scored(home, call: Call, shaping, options, first_batch=0, packing=None) -> Options:
    """The options on scores of a call; b counts from first_batch."""
    _, _, causal, causal_offset, *_ = shaping
    return Options(home, call, options, causal, causal_offset, first_batch, packing)


def resolve(q, k, v, shaping: tuple) -> Call:
    dtypes = (q.dtype, k.dtype, v.dtype)
    if dtypes[0] is dtypes[1] is dtypes[2]:
        dtypes = (dtype_name(dtypes[0]),) * 3
    else:
        dtypes = tuple(map(dtype_name, dtypes))
    return call_of(dtypes, q.shape, k.shape, v.shape, *shaping)


def inner_view(home, call: Call, x):
    """The view (*batch, H, L, D)."""
    if x.ndim == 2:
        x = x[None]
    elif call.layout == "bshd":
        x = x.swapaxes(-3, -2)
    batch = call.problem.batch
    return x if x.shape[:-3] == batch else home.xp.broadcast_to(x, (*batch, *x.shape[-3:]))


def inner_lse(call: Call, x):
    """The view (*batch, H, L)."""
    if x.ndim == 1:
        return x[None]
    return x.swapaxes(-2, -1) if call.layout == "bshd" else x


def _of_sequences(call: Call, packing) -> Call:
    """The call of all rows as that of the sequences packed in them."""
    problem = replace(call.problem, band=None, sequences=packing.sequences)
    return replace(call, problem=problem)


def forward(home, q, k, v, out, return_lse, options, scores=None, first_batch=0, packing=None):
    q, k, v = home.adopt("q", q), home.adopt("k", k), home.adopt("v", v)
    call = resolve(q, k, v, options)
    if return_lse is not True and return_lse is not False:
        return_lse = check_flag("return_lse", return_lse)
    read = (("q", q), ("k", k), ("v", v))
    extra = {}
    if packing is not None:
        call = _of_sequences(call, packing)
        extra = {"extras": Extras(packing=packing)}
    problem = call.problem
    if scores:
        scores = scored(home, call, options, scores, first_batch, packing)
        problem, extra = scores.problem, {"extras": scores.extras}
        read += scores.arrays()
    if out is None:
        o, handle = home.new(call.out_shape, q.dtype)
    else:
        o = home.adopt("out", out, writable=True)
        dtype = dtype_name(o.dtype)
        check_operand("out", o.shape, dtype, call.out_shape, problem.dtype, "the result")
        check_output("out", o, read)
    lse = lse_handle = None
    if return_lse:
        lse, lse_handle = home.new(call.lse_shape, np.dtype(problem.lse_dtype))
    if call.trivial:
        o.fill(0)
        if return_lse:
            lse.fill(-np.inf)
            if problem.sinks:
                inner_lse(call, lse)[...] = scores.extras.sinks[..., None]
    elif call.direct:
        home.backend.forward(problem, q, k, v, o, lse, **extra)
    else:
        views = (inner_view(home, call, x) for x in (q, k, v, o))
        inner = None if lse is None else inner_lse(call, lse)
        home.backend.forward(problem, *views, inner, **extra)
    if packing is not None and return_lse and problem.sinks:
        packing.hide_tail(lse)
    result = home.finish(handle) if out is None else out
    return (result, home.finish(lse_handle)) if return_lse else result


def backward(
    home, operands: dict, wanted, deterministic: bool, shaping: tuple, scores=None, first_batch=0,
    packing=None,
) -> AttentionGrads:  # fmt: skip
    arrays = {name: home.adopt(name, x) for name, x in operands.items()}
    inputs = [arrays[name] for name in GRADIENTS]
    call = resolve(*inputs, shaping)
    extra, finish = {}, tuple
    if packing is not None:
        call = _of_sequences(call, packing)
        extra = {"extras": Extras(packing=packing)}
    problem = call.problem
    for name, like in (("dout", "out"), ("out", "attention's result")):
        x = arrays[name]
        check_operand(name, x.shape, dtype_name(x.dtype), call.out_shape, problem.dtype, like)
    for name in ("lse", "dlse"):
        if name in arrays:
            x = arrays[name]
            want = call.lse_shape, problem.lse_dtype
            check_operand(name, x.shape, dtype_name(x.dtype), *want, "attention's lse")
    if scores:
        scores = scored(home, call, shaping, scores, first_batch, packing)
        problem = scores.problem
        if scores.untraced is not None:
            raise scores.untraced
        targets = ScoreGradients(home, scores, wanted[len(GRADIENTS) :], call.trivial)
        finish = targets.finish
        extra = {"extras": scores.extras, "dargs": targets.dargs, "dsinks": targets.dsinks}
    if not any(wanted):
        return AttentionGrads()
    if call.direct and not call.trivial:
        rooms = [home.new(x.shape, x.dtype) if n else (None, None) for x, n in zip(inputs, wanted)]
        inner = [target for target, _ in rooms]
        home.backend.backward(problem, *_operands(arrays), *inner, deterministic, **extra)
        grads = [None if h is None else home.finish(h) for _, h in rooms]
        return AttentionGrads(*grads, *finish())
    gradients = [_Gradient(home, call, x) if n else None for x, n in zip(inputs, wanted)]
    if call.trivial:
        for gradient in filter(None, gradients):
            gradient.result.fill(0)
        if scores and problem.sinks and call.problem.seqlen_k == 0 and "dlse" in arrays:
            dlse = inner_lse(call, arrays["dlse"])
            targets.sinks_alone(dlse if packing is None else packing.without_tail(dlse))
    else:
        views = {
            name: inner_lse(call, x) if name in ("lse", "dlse") else inner_view(home, call, x)
            for name, x in arrays.items()
        }
        rooms = [None if g is None else g.target for g in gradients]
        home.backend.backward(problem, *_operands(views), *rooms, deterministic, **extra)
        for gradient in filter(None, gradients):
            gradient.reduce()
    grads = [None if g is None else home.finish(g.handle) for g in gradients]
    return AttentionGrads(*grads, *finish())


def _operands(arrays: dict) -> tuple:
    return (*[arrays[name] for name in ("dout", "q", "k", "v", "out", "lse")], arrays.get("dlse"))


class _Gradient:
    """One input's gradient: the backend's target, of the full batch, and the result."""

    def __init__(self, home, call: Call, x):
        self.result, self.handle = home.new(x.shape, x.dtype)
        own = self.result[None] if x.ndim == 2 else self.result
        if x.ndim > 2 and call.layout == "bshd":
            own = own.swapaxes(-3, -2)
        batch = call.problem.batch
        self._own = own[(None,) * (len(batch) + 3 - own.ndim)]
        self._axes = tuple(n for n, size in enumerate(batch) if size != self._own.shape[n])
        self.target = self._own
        if self._axes and not call.trivial:
            self.target = home.xp.empty((*batch, *own.shape[-3:]), x.dtype)

    def reduce(self) -> None:
        """Sum over the batch axes along which the input was broadcast."""
        if self._axes:
            # Sums of 16-bit gradients are taken in float32 and rounded once.
            dtype = _FLOAT64 if self.target.dtype == _FLOAT64 else _FLOAT32
            self._own[...] = self.target.sum(axis=self._axes, dtype=dtype, keepdims=True)


class ScoreGradients:
    """What a backend adds to: dargs, an array or None for each of the program's arguments as the
    program views it, and dsinks, (*batch, Hq) with 1 along the axes of a broadcast, or None.
    """

    def __init__(self, home, scores, wanted, trivial):
        self.home, self.scores, self.wanted = home, scores, wanted
        self.names = ("bias", "alibi_slopes", "sinks")
        # NumPy's sums are taken in float64, whatever the caller's dtype.
        self.dtype = np.dtype("float64" if home.xp is np else scores.number)
        dargs = [None] * len(scores.args)
        self.dsinks, self._handles = None, {}
        program = None if trivial else scores.problem.program
        summed = {n for n, _, _ in program.gradients} if program else ()
        for name in self._asked():
            given, number, view = scores.own[name]
            if number is None:
                self.dsinks = home.xp.zeros(view.shape, self.dtype)
            elif dargs[number] is None and home.xp is np:
                dargs[number] = np.zeros(view.shape, self.dtype)
            elif dargs[number] is None:  # the result itself
                result, self._handles[name] = home.new(tuple(given.shape), view.dtype)
                if number not in summed:
                    result.fill(0)
                dargs[number] = result.reshape(view.shape)
        self.dargs = tuple(dargs)

    def _asked(self):
        """The options' names whose gradients are wanted, single score_args included."""
        own, found = self.scores.own, []
        for name, want in zip(self.names, self.wanted):
            if want and name not in own:
                raise ValueError(f"need: {name!r} is asked for, but {name} is not given")
            found += [name] * want
        if self.wanted[len(self.names)]:
            if "score_args" not in self.scores.options:
                raise ValueError("need: 'score_args' is asked for, but score_args is not given")
            found += [name for name in self._float_args() if name is not None]
        return found

    def _float_args(self):
        """The names of score_args, None for what is no float array."""
        own = self.scores.own
        names = [f"score_args[{n}]" for n in range(len(self.scores.options["score_args"]))]
        return [n if n in own and dtype_name(own[n][2].dtype) in DTYPES else None for n in names]

    def sinks_alone(self, dlse):
        """dsinks where there is no key: lse is the sink."""
        if self.dsinks is not None:
            total = dlse.sum(axis=-1, dtype=self.dtype)
            axes = tuple(n for n, size in enumerate(self.dsinks.shape) if size == 1)
            self.dsinks[...] = total.sum(axis=axes, keepdims=True) if axes else total

    def finish(self) -> list:
        results = [self._one(n) if want else None for n, want in zip(self.names, self.wanted)]
        args = None
        if self.wanted[len(self.names)]:
            args = tuple(None if n is None else self._one(n) for n in self._float_args())
        return [*results, args]

    def _one(self, name):
        if name in self._handles:
            return self.home.finish(self._handles[name])
        given, number, view = self.scores.own[name]
        total = self.dsinks if number is None else self.dargs[number]
        result, handle = self.home.new(tuple(given.shape), view.dtype)
        with np.errstate(over="ignore"):  # beyond a 16-bit dtype's range is infinity
            result[...] = total.reshape(result.shape)
        return self.home.finish(handle)
