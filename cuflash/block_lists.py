"""From a block map to what kernels walk along: for each block of theirs, the blocks it visits.

For NumPy and CuPy alike; no value is looked at, so nothing waits. A row of lists, of int32, is

    how many blocks | how many of them, at the end, are looked at pair by pair | the blocks |
    backward only: how many other blocks of keys add to that block of queries before this one

Blocks of 128 x 128 make 4 * L * S / 128**2 bytes forward (8 backward) for each entry of the map's
own leading axes.
"""

from __future__ import annotations

from typing import NamedTuple

HEAD = 2  # numbers in front of a row's blocks; kHead in attn/block_map.cuh


def rows(problem) -> tuple[tuple[str, str], ...]:
    return () if problem.block_map is None else (("lists", "in"), ("lists_strides", "strides"))


class Cut(NamedTuple):
    """How a kernel cuts a call's pairs, and what it hides beside the map."""

    seqlen_q: int
    seqlen_k: int
    block_m: int
    block_n: int
    band: tuple[int, int] | None  # (lo, hi)
    masked: bool  # whether masks are looked at in partial blocks of the map
    spread: bool = False  # whether lists begin at different blocks, so that sums do not meet

    @property
    def blocks(self) -> tuple[int, int]:
        return -(-self.seqlen_q // self.block_m), -(-self.seqlen_k // self.block_n)


def lists(xp, kinds, block, cut: Cut, backward: bool):
    """The lists, (..., blocks, row_length), of a map's kinds (..., query blocks, key blocks): of
    keys for each block of queries; with ``backward`` of queries for each block of keys, with turns.
    """
    visited, whole = kernel_kinds(xp, kinds, block, cut, backward)
    turns = None
    if backward:
        # Blocks of keys start from the last to the first, and take their turns in that order.
        counts = xp.flip(xp.cumsum(xp.flip(visited, -1), axis=-1, dtype=xp.int32), -1)
        turns = (counts - visited).swapaxes(-1, -2)
        visited, whole = visited.swapaxes(-1, -2), whole.swapaxes(-1, -2)
    rows, count = visited.shape[-2:]
    start = xp.arange(rows)[:, None] * (count if cut.spread else 0) // rows
    # Full blocks, then partial ones, then those that are not visited, each from `start` on.
    place = (2 - whole.astype(xp.int32) - visited.astype(xp.int32)) * count
    place = place + (xp.arange(count) - start) % count
    order = ((xp.sort(place, axis=-1) % count + start) % count).astype(xp.int32)
    total = visited.sum(axis=-1, keepdims=True, dtype=xp.int32)
    partial = total - whole.sum(axis=-1, keepdims=True, dtype=xp.int32)
    parts = [total, partial, order]
    if backward:
        parts.append(xp.take_along_axis(turns, order, axis=-1).astype(xp.int32))
    return xp.ascontiguousarray(xp.concatenate(parts, axis=-1))


def row_length(cut: Cut, backward: bool) -> int:
    return HEAD + 2 * cut.blocks[0] if backward else HEAD + cut.blocks[1]


def kernel_kinds(xp, kinds, block, cut: Cut, backward: bool):
    """(visited, whole): booleans (..., blocks of queries, blocks of keys) of a kernel.

    A block is visited when it meets one of the map that is not empty, and the band; it is whole
    when nothing in it is looked at.
    """
    lengths, sizes = (cut.seqlen_q, cut.seqlen_k), (cut.block_m, cut.block_n)
    spans = [_spans(xp, *side) for side in zip(lengths, sizes, block)]
    met = kinds != 0
    open_ = kinds == 2 if cut.masked else met
    sizes = [last - first + 1 for first, last in spans]
    visited = _count(xp, met, spans) > 0
    whole = _count(xp, open_, spans) == sizes[0][:, None] * sizes[1]
    in_band, inside = _band(xp, cut, backward)
    visited &= in_band
    return visited, whole & visited & inside


def _spans(xp, length, size, own):
    """First and last of the map's blocks that each of the kernel's blocks meets."""
    first = xp.arange(0, length, size)
    last = xp.minimum(first + size, length) - 1
    return first // own, last // own


def _count(xp, flags, spans):
    """How many flags are set among those that each of the kernel's blocks meets."""
    counts = flags.astype(xp.int32)
    for axis, (first, last) in zip((-2, -1), spans):
        counts = xp.cumsum(counts, axis=axis, dtype=xp.int32)
        before = (first > 0).astype(xp.int32)
        shape = (-1, 1) if axis == -2 else (-1,)
        upto = xp.take(counts, xp.maximum(first - 1, 0), axis=axis) * before.reshape(shape)
        counts = xp.take(counts, last, axis=axis) - upto
    return counts


def _band(xp, cut: Cut, backward: bool):
    """Which blocks hold a pair of the band, and which none beyond it or the end of the sequences:
    `band_range` in attn/band.cuh, of forward or backward.
    """
    rows, columns = cut.blocks
    first_i = (xp.arange(rows) * cut.block_m)[:, None]
    first_j = xp.arange(columns) * cut.block_n
    last_i = xp.minimum(first_i + cut.block_m, cut.seqlen_q) - 1
    last_j = xp.minimum(first_j + cut.block_n, cut.seqlen_k) - 1
    # Forward takes no notice of queries beyond the end, which nobody stores.
    inside = first_j + cut.block_n <= cut.seqlen_k
    inside = inside & ((first_i + cut.block_m <= cut.seqlen_q) if backward else (first_i >= 0))
    if cut.band is None:
        return xp.ones_like(inside), inside
    lo, hi = cut.band
    in_band = (last_j >= first_i + lo) & (first_j <= last_i + hi)
    return in_band, inside & (first_j >= last_i + lo) & (last_j <= first_i + hi)
