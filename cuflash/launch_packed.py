"""Packed sequences on CuPy arrays: what each query and each key sees, from the offsets at which the
sequences begin. All of it is computed on the device, and nothing is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np

from . import launch_steps as steps
from .families import portable
from .launch_steps import Step
from .params import SPARE_ROWS

UNBOUNDED = 1 << 40  # beyond every array
_ROOM = 1 << 10  # rows that indices of 32 bits need beyond the arrays (kNowhere in interval.cuh)
_OFFSETS = ("int32", "int64")  # dtypes that offsets.cu reads


@dataclass(frozen=True)
class Packing:
    """A call's sequences as kernels read them: kernels_cu/attn/interval.cuh."""

    sequences: int
    q_offsets: Any  # cupy.ndarray (sequences + 1,) of int32
    shifts: Any  # (sequences,) of int32: keys - queries of each
    intervals: tuple  # of the queries, of the keys: (rows + SPARE_ROWS, 2) of int32
    places: tuple  # the same, (rows + SPARE_ROWS, 4); () where no score reads them

    def hide_tail(self, lse) -> None:
        """Of lse (rows, Hq): -inf behind the last sequence, where a sink is no part of any row."""
        lse[...] = cupy.where(self._inside(lse.shape[0])[:, None], lse, -np.inf)

    def without_tail(self, dlse):
        """dlse (Hq, rows), 0 behind the last sequence."""
        return cupy.where(self._inside(dlse.shape[-1]), dlse, dlse.dtype.type(0))

    def _inside(self, rows: int):
        return cupy.arange(rows, dtype=np.int64) < self.q_offsets[-1]


def pack(device_id: int, q_offsets, k_offsets, rows, window, shift, places: bool) -> Packing:
    """What kernels read of a call's sequences, on the current stream.

    Parameters
    ----------
    device_id : int
    q_offsets, k_offsets : cupy.ndarray (sequences + 1,) of int, or numpy.ndarray
        Those on the device may hold anything: offsets.cu makes them safe.
    rows : tuple of int
        How many queries and keys there are.
    window : tuple (left, right)
        As of `attention`; None is no bound.
    shift : int or None
        Query i of a sequence stands at key i + shift; None: as far as it has more keys.
    places : bool
        Whether scores read the indices of pairs.

    Raises
    ------
    NotImplementedError
        More rows than 32 bits count, with those of a block.
    """
    if max(rows) > 2**31 - _ROOM:
        raise NotImplementedError(f"{max(rows)} packed rows: kernels count fewer than 2**31 - 1024")
    given = [_on_device(x) for x in (q_offsets, k_offsets)]
    if given[0].dtype != given[1].dtype:
        given = [x.astype(np.int64) for x in given]
    sequences = len(given[0]) - 1
    cleaned = cupy.empty((2, sequences + 1), np.int32)
    shifts = cupy.empty(max(sequences, 1), np.int32)
    plan = portable.offsets_plan(given[0].dtype.name)
    q_begin = cleaned.data.ptr
    k_begin = q_begin + 4 * (sequences + 1)
    Step.of(plan, 1, sequences, *rows).launch(
        device_id, *(x.data.ptr for x in given), q_begin, k_begin, shifts.data.ptr
    )
    padded = [n + SPARE_ROWS for n in rows]
    intervals = tuple(cupy.empty((n, 2), np.int32) for n in padded)
    found = tuple(cupy.empty((n, 4), np.int32) for n in padded) if places else ()
    plan = portable.intervals_plan()
    left, right = (UNBOUNDED if x is None else min(int(x), UNBOUNDED) for x in window)
    shift_value = 0 if shift is None else min(max(int(shift), -UNBOUNDED), UNBOUNDED)
    Step.of(
        plan, -(-sum(padded) // plan["kThreads"]), sequences, *rows, left, right, shift_value,
        int(shift is None),
    ).launch(
        device_id, q_begin, k_begin, *(x.data.ptr for x in intervals),
        *([x.data.ptr for x in found] or (0, 0)),
    )  # fmt: skip
    packing = Packing(sequences, cleaned[0], shifts, intervals, found)
    steps.kept((packing, given, cleaned))
    return packing


def _on_device(offsets):
    """Contiguous, of a dtype that offsets.cu reads."""
    if isinstance(offsets, np.ndarray):
        return cupy.asarray(offsets.astype(np.int64))
    if offsets.dtype.name not in _OFFSETS:
        offsets = offsets.astype(np.int64)
    return cupy.ascontiguousarray(offsets)
