"""Gradients of the arrays among a call's options: room for them, and back into their own shapes."""

from __future__ import annotations

import numpy as np

from .arrays import dtype_name
from .checks import DTYPES


class ScoreGradients:
    """What a backend adds to, by `need`.

    Attributes
    ----------
    dargs : tuple of array or None
        For each of the program's arguments, in its own shape as the program views it.
    dsinks : array or None
        (*batch, Hq), of size 1 along the axes along which sinks are broadcast.
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
        """dbias, dalibi_slopes, dsinks, dscore_args for the caller."""
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
