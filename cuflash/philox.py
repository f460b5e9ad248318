"""Dropout's random bits: Philox4x32-7, a pure function of (seed, b, h, i, j).

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011): seven rounds are the fewest
that pass BigCrush. The key is the seed, low word first, the counter (j // 16, i, h, b). The 16
bytes of its four words, each low byte first, serve the keys j % 16 = 0 .. 15: a weight is kept
when its byte is below 256 * keep.
"""

from __future__ import annotations

import math
from numbers import Real

import numpy as np

from .checks import is_bool, is_int, show

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox4x32(counter, key):
    """Four words for each counter, of four arrays that broadcast, and a key of two words."""
    x = [np.asarray(word, np.uint64) for word in counter]
    for turn in range(7):
        keys = [np.uint64((word + turn * step) & 0xFFFFFFFF) for word, step in zip(key, _WEYL)]
        first, second = x[0] * _MULTIPLIERS[0], x[2] * _MULTIPLIERS[1]
        x = [
            (second >> _WORD) ^ x[1] ^ keys[0],
            second & _LOW,
            (first >> _WORD) ^ x[3] ^ keys[1],
            first & _LOW,
        ]
    return x


def kept(seed, b, h, rows, keys, keep):
    """Which weights of one head dropout keeps, for rows and keys from a begin to an end."""
    first = keys[0] // 16
    groups = np.arange(first, -(-keys[1] // 16))
    words = philox4x32((groups, np.arange(*rows)[:, None], h, b), (seed & 0xFFFFFFFF, seed >> 32))
    words = np.stack(np.broadcast_arrays(*words), axis=-1).astype("<u4")
    numbers = words.view(np.uint8).reshape(words.shape[0], -1)
    return numbers[:, keys[0] - 16 * first : keys[1] - 16 * first] < round(256 * keep)


def check_dropout(dropout_p) -> float:
    """The probability to keep a weight, rounded to 1/256."""
    rule = "it must be a number of at least 0 and below 1"
    if is_bool(dropout_p) or not isinstance(dropout_p, Real):
        raise TypeError(f"dropout_p={show(dropout_p)}: {rule}")
    p = float(dropout_p)
    if not 0 <= p < 1 or math.isnan(p):
        raise ValueError(f"dropout_p={show(dropout_p)}: {rule}")
    return max(1, round(256 * (1 - p))) / 256


def check_seed(seed) -> int:
    rule = "it must be a whole number from 0 to 2**64 - 1"
    if not is_int(seed):
        raise TypeError(f"seed={show(seed)}: {rule}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={show(seed)}: {rule}")
    return int(seed)


def dropout_mask(seed, batch, num_heads, seqlen_q, seqlen_k, dropout_p):
    """Which weights :func:`cuflash.attention` keeps for a seed.

    Parameters
    ----------
    seed : int
        From 0 to 2**64 - 1.
    batch : int or tuple of int
        The leading axes.
    num_heads, seqlen_q, seqlen_k : int
    dropout_p : float
        Probability to drop, from 0 to below 1; 1 - dropout_p is rounded to a multiple of 1/256 (at
        least 1/256), by which kept weights are divided.

    Returns
    -------
    ndarray of bool, (*batch, num_heads, seqlen_q, seqlen_k)
        True where a weight is kept.

    Raises
    ------
    TypeError, ValueError
        An argument of a wrong kind or range.

    Examples
    --------
    >>> import cuflash
    >>> cuflash.dropout_mask(7, 2, 4, 3, 5, 0.5).shape
    (2, 4, 3, 5)
    """
    seed, keep = check_seed(seed), check_dropout(dropout_p)
    batch = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    sizes = {"num_heads": num_heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    for name, size in (*(("batch", n) for n in batch), *sizes.items()):
        if not is_int(size):
            raise TypeError(f"{name}={show(size)}: it must be a whole number")
        if size < 0:
            raise ValueError(f"{name}={size}: it must be at least 0")
    mask = np.ones((*batch, num_heads, seqlen_q, seqlen_k), bool)
    if dropout_p == 0 or not mask.size:
        return mask
    for b, head in enumerate(mask.reshape(-1, num_heads, seqlen_q, seqlen_k)):
        for h in range(num_heads):
            head[h] = kept(seed, b, h, (0, seqlen_q), (0, seqlen_k), keep)
    return mask
