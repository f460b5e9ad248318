"""What the NumPy path's loops stand on: slabs of heads, tiles, operands for BLAS, threads.

A *slab* is the heads worked on together: one when heads are large, many when they are small, so
that a NumPy call has enough to do. It is the first axis of every array of a tile: scores are
(n, M, N). It never changes a head's result: all sums run inside one head.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache

import numpy as np
from threadpoolctl import ThreadpoolController

from . import config

# Rows and keys of the largest score tile: 512 KiB of float32, a common level-2 cache. Smaller ones
# lose more to the number of NumPy calls and to BLAS's packing than they gain from the cache.
BLOCK_M = 512
BLOCK_N = 256
_NARROW = 128  # blocks of 96 rows took as long
# Scores that keep a NumPy call busy; tiles smaller than this hold several heads.
_FULL_TILE = 1 << 16
# Below this many multiply-adds a second thread costs more than it brings.
_WORTH_A_THREAD = 1 << 21


class Slab:
    """Heads [start, stop) of an array (*batch, heads, rows, D), counted over batch and heads."""

    def __init__(self, batch, heads, start, stop):
        numbers = start if stop - start == 1 else np.arange(start, stop)
        place = np.unravel_index(numbers, batch + (heads,))
        self.start = start
        self.batch_index, self.head_index = tuple(place[:-1]), place[-1]
        self.count = stop - start
        self.index = self.batch_index + (self.head_index,)

    def with_heads(self, head_index):
        """The index of the batch entries' other heads: a query head's kv head, or the reverse."""
        return self.batch_index + (head_index,)


def row_blocks(seqlen_q, band=None):
    """The blocks of query rows (begin, end): about four a head, so few heads occupy the threads.

    With a narrow band they are as short as it is wide, down to _NARROW rows: a block computes the
    scores of all keys that any of its rows sees, most of them in vain where there are many rows.
    """
    quarter = -(-seqlen_q // 256) * 64
    rows = min(BLOCK_M, max(128, quarter))
    if band is not None:
        rows = min(rows, max(_NARROW, band.hi - band.lo + 1))
    return [(begin, min(begin + rows, seqlen_q)) for begin in range(0, seqlen_q, rows)]


def heads_per_tile(seqlen_q, seqlen_k):
    """How many heads' scores fill a tile: 1 unless there are few rows and keys."""
    rows = max((end - begin for begin, end in row_blocks(seqlen_q)), default=0)
    return max(1, _FULL_TILE // max(1, rows * min(seqlen_k, BLOCK_N)))


def slab_size(num_heads, seqlen_q, seqlen_k):
    """Heads a slab holds: enough to fill a tile, but leaving some slabs for every thread."""
    return max(1, min(heads_per_tile(seqlen_q, seqlen_k), -(-num_heads // 16), 1024))


def key_range(band, row_begin, row_end, seqlen_k):
    """Keys [begin, end) that at least one of the rows may see; empty when begin >= end."""
    if band is None:
        return 0, seqlen_k
    return max(0, row_begin + band.lo), min(seqlen_k, row_end + band.hi)


def key_tiles(begin, end, size=BLOCK_N):
    """[begin, end) cut at multiples of size, so that a key always falls into the same tile."""
    while begin < end:
        stop = min(begin - begin % size + size, end)
        yield begin, stop
        begin = stop


def hidden_pairs(band, row_begin, row_end, key_begin, key_end):
    """(M, N) booleans, True where hidden, or None when every pair of the tile is visible."""
    if band is None:
        return None
    if key_begin >= row_end - 1 + band.lo and key_end - 1 <= row_begin + band.hi:
        return None
    keys, rows = np.arange(key_begin, key_end), np.arange(row_begin, row_end)[:, None]
    hidden = keys > rows + band.hi
    hidden |= keys < rows + band.lo
    return hidden


def split_scale(scale):
    """scale as (power, factor): q takes the power of two without rounding, the scores the rest,
    which in q would add half as much error again to the scores.
    """
    mantissa, exponent = math.frexp(scale)
    if abs(mantissa) == 0.5:
        return scale, 1.0
    return math.ldexp(1.0, exponent), mantissa


class Scratch:
    """One thread's buffers, reused from tile to tile: views of a shape over named blocks."""

    def __init__(self, dtype):
        self.dtype = np.dtype(dtype)
        self.blocks = {}
        self.ones = np.ones((BLOCK_N, 1), dtype)

    def take(self, name, *shape):
        size = math.prod(shape)
        block = self.blocks.get(name)
        if block is None or block.size < size:
            block = self.blocks[name] = np.empty(size, self.dtype)
        return block[:size].reshape(shape)

    def zeros(self, name, *shape):
        block = self.take(name, *shape)
        block[...] = 0
        return block

    def load(self, name, array, index, begin, end, scale=None):
        """Rows [begin, end) of a slab as (n, rows, D) in the computing dtype, times scale.

        The caller's memory itself where BLAS can read it, else a copy: np.matmul would be slow.
        """
        part = array[index + (slice(begin, end),)]
        part = part if part.ndim == 3 else part[None]
        width = part.itemsize * part.shape[-1]
        if (
            scale is None
            and part.dtype == self.dtype
            and part.flags.aligned
            and part.strides[-1] == part.itemsize
            and part.strides[-2] >= width
            and part.strides[-2] % part.itemsize == 0
        ):
            return part
        copy = self.take(name, *part.shape)
        if part.dtype.name == "bfloat16" and copy.dtype == np.float32:
            # A bfloat16 is the upper half of a float32; shifting is faster than ml_dtypes' cast.
            np.left_shift(part.view(np.uint16), 16, out=copy.view(np.uint32), dtype=np.uint32)
        else:
            np.copyto(copy, part)
        if scale is not None:
            copy *= copy.dtype.type(scale)
        return copy


def weighted_sum(weights, rows, hidden, out):
    """``weights @ rows`` into out; hidden pairs, of weight 0, add nothing even to NaN and infinity.

    weights is (n, M, N), rows (n, N, D), hidden None or booleans that broadcast to (n, M, N).
    """
    if hidden is not None:
        special = ~np.isfinite(rows).all(axis=-1)
        if special.any():
            np.matmul(weights, np.where(special[..., None], 0, rows), out=out)
            hidden = np.broadcast_to(hidden, weights.shape)
            for n in np.flatnonzero(special.any(axis=0)):
                term = weights[:, :, n, None] * rows[:, None, n, :]
                silent = hidden[:, :, n, None] | ~special[:, n, None, None]
                out += np.where(silent, 0, term)
            return out
    return np.matmul(weights, rows, out=out)


def run(tasks, work, dtype, work_size):
    """Call ``work(task, scratch)`` for every task, started in order, on several threads, this one
    among them. The first exception is raised once the others have ended their task.
    """
    tasks = iter(tasks)
    lock = threading.Lock()
    errors = []

    def drain():
        scratch = Scratch(dtype)
        # Infinities and NaN pass through as the definition says; a warning would only repeat that.
        with np.errstate(all="ignore"):
            while not errors:
                with lock:
                    task = next(tasks, None)
                if task is None:
                    return
                try:
                    work(task, scratch)
                except BaseException as error:
                    errors.append(error)

    def help_drain():
        with _single_threaded_blas:
            drain()

    threads = min(config.num_threads(), max(1, work_size // _WORTH_A_THREAD))
    helpers = [threading.Thread(target=help_drain, daemon=True) for _ in range(threads - 1)]
    with _single_threaded_blas:
        for helper in helpers:
            helper.start()
        drain()
        for helper in helpers:
            helper.join()
    if errors:
        raise errors[0]


class _SingleThreadedBlas:
    """Keeps BLAS at one thread while any call is inside: `run` is the only parallelism.

    Most libraries have one limit for the process: the first call in sets it, the last out restores
    it. Where each thread has its own (OpenBLAS built on OpenMP), each call keeps its own.
    """

    def __init__(self):
        self.lock = threading.Lock()
        self.inside = 0
        self.shared = []
        self.own = threading.local()

    def __enter__(self):
        shared, own = _blas()
        self.own.limits = _limit(own)
        with self.lock:
            if self.inside == 0:
                self.shared = _limit(shared)
            self.inside += 1

    def __exit__(self, *_):
        _restore(self.own.limits)
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                _restore(self.shared)


@lru_cache(maxsize=1)
def _blas():
    """The process's BLAS libraries, with a limit for all threads and with one for each thread.

    Found once, as it takes milliseconds; NumPy has loaded its own by then.
    """
    found = ThreadpoolController().select(user_api="blas").lib_controllers
    own = [x for x in found if x.internal_api == "openblas" and x.threading_layer == "openmp"]
    return [x for x in found if x not in own], own


def _set(library, count):
    # threadpoolctl 3.8 ignores every Python thread but the first that ever set a shared limit; the
    # counting above makes its guard needless.
    getattr(library, "_real_set_num_threads", library.set_num_threads)(count)


def _limit(libraries):
    """Set each library to one thread; return what `_restore` takes."""
    before = [(x, x.get_num_threads()) for x in libraries]
    for library, _ in before:
        _set(library, 1)
    return before


def _restore(before):
    for library, count in before:
        _set(library, count)


_single_threaded_blas = _SingleThreadedBlas()
