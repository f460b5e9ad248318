"""What kernels read beside q, k and v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Called:
    """The caller's functions as the CPU calls them, and what comes before them."""

    value: Any  # Node of the scores that score_mod takes
    visible: Any  # Node of what hides beside mask_mod, or None
    score_mod: Any  # or None
    mask_mod: Any
    args: tuple


@dataclass(frozen=True)
class Extras:
    """Arrays and numbers that a program, sinks or dropout read."""

    args: tuple = ()  # in the order of program.args; grids viewed as (*batch, Hq, L, S)
    sinks: Any = None  # view (*batch, Hq)
    keep: float = 1.0  # probability that dropout keeps a weight, a multiple of 1/256
    seed: Any = None  # int or array of one
    first_batch: int = 0  # index b of the first batch entry
    packing: Any = None  # of packed sequences on the GPU: launch_packed.Packing
    block_map: Any = None  # a blockmap.MapView
    called: Called | None = None  # on the CPU, in place of the program's value and visible


NONE = Extras()
