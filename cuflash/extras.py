"""The operands of a call's options, beside q, k and v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Extras:
    """Arrays and numbers that a program, sinks or dropout read; frozen, but arrays are not."""

    args: tuple = ()  # in the order of program.args; grids viewed as (*batch, Hq, L, S)
    sinks: Any = None  # view (*batch, Hq)
    keep: float = 1.0  # probability that dropout keeps a weight, a multiple of 1/256
    seed: Any = None  # int or array of one


NONE = Extras()
