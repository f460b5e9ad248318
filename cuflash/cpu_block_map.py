"""Block maps on the NumPy path: every pair's visibility, summed up block by block."""

from __future__ import annotations

import numpy as np

from .blockmap import EMPTY, FULL, PARTIAL
from .cpu_rows import work_size
from .cpu_scores import Tile, flat_place
from .cpu_tiles import key_range, run

_PAIRS = 1 << 21  # of a tile


class _Masks:
    """One query head's masks, as a Tile takes them."""

    def __init__(self, problem, extras, place, h):
        self.problem, self.extras, self.h, self.place = problem, extras, h, (*place, h)
        self.b = extras.first_batch + flat_place(place, problem.batch)


def block_kinds(problem, extras, block, kinds):
    """Write the kinds of a call's blocks.

    Parameters
    ----------
    problem : Problem
        Its band and program hide pairs.
    extras : Extras
    block : tuple (int, int)
        Queries and keys of a block.
    kinds : ndarray of uint8 (*batch or 1, Hq or 1, query blocks, key blocks)
        Zeros, or written fully.
    """
    size_q, size_k = block
    wide = max(size_k, _PAIRS // size_q // size_k * size_k)

    def work(task, _):
        *place, h, m = task
        masks = _Masks(problem, extras, tuple(place), h)
        begin, end = m * size_q, min((m + 1) * size_q, problem.seqlen_q)
        first, last = key_range(problem.band, begin, end, problem.seqlen_k)
        for start in range(first // size_k * size_k, last, wide):
            stop = min(start + wide, problem.seqlen_k)
            tile = Tile(masks, begin, end, start, stop)
            columns = np.arange(start, stop, size_k)
            rows, keys = end - begin, np.minimum(columns + size_k, stop) - columns
            if tile.hidden is None:
                found = np.full(len(columns), FULL)
            else:
                seen = np.add.reduceat((~tile.hidden).sum(axis=0), columns - start)
                found = np.where(seen == 0, EMPTY, np.where(seen == rows * keys, FULL, PARTIAL))
            at = columns[0] // size_k
            kinds[(*place, h, m, slice(at, at + len(columns)))] = found

    run(np.ndindex(kinds.shape[:-1]), work, np.float64, work_size(problem))
