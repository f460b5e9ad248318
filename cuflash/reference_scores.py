"""The reference's options on scores and weights: every array at full size, in float64."""

from __future__ import annotations

import numpy as np

_OPTIONS = (
    "softcap", "bias", "alibi_slopes", "mask", "q_lens", "kv_lens", "q_segment_ids",
    "kv_segment_ids", "block_map", "sinks", "score_mod", "mask_mod", "score_args", "dropout_p",
    "seed",
)  # fmt: skip


class Scores:
    """What the options make of scores of shape (*batch, Hq, L, S)."""

    def __init__(self, shape, offset, options):
        for name in options:
            if name not in _OPTIONS:
                raise TypeError(f"unknown option {name!r}")
        if options.get("dropout_p") and options.get("seed") is None:
            raise TypeError("dropout_p needs a seed")
        self.shape, self.offset = shape, offset
        self.options = {name: x for name, x in options.items() if x is not None}
        self.args = tuple(self.options.get("score_args", ()))
        self.i = np.arange(shape[-2])[:, None]
        self.j = np.arange(shape[-1])[None, :]

    def full(self, name, axes=0):
        """An option's array as float64, with `axes` more of size 1, or None."""
        if name not in self.options:
            return None
        x = np.asarray(self.options[name])
        x = x if x.dtype == bool or x.dtype.kind in "iu" else x.astype(np.float64)
        return x.reshape(x.shape + (1,) * axes)

    def capped(self, s):
        cap = self.options.get("softcap")
        return s if cap is None else cap * np.tanh(s / cap)

    def before_mod(self, s):
        s = self.capped(s)
        bias, slopes = self.full("bias"), self.full("alibi_slopes", axes=2)
        if bias is not None:
            s = s + bias
        if slopes is not None:
            s = s - slopes * abs(self.i + self.offset - self.j)
        return s

    def value(self, s):
        return self.modified(self.before_mod(s))

    def modified(self, s):
        """score_mod, head by head."""
        if "score_mod" not in self.options:
            return s
        return self.each(lambda b, h, at: self.options["score_mod"](
            s[at], b, h, self.i, self.j, *self.args
        ))  # fmt: skip

    def each(self, function, dtype=np.float64):
        """function(b, h, index) of every head, in one array; b counts over all leading axes."""
        result = np.empty(self.shape, dtype)
        for b, place in enumerate(np.ndindex(self.shape[:-3])):
            for h in range(self.shape[-3]):
                result[(*place, h)] = function(b, h, (*place, h))
        return result

    def slope(self, s):
        """d value / d s."""
        cap = self.options.get("softcap")
        slope = 1.0 if cap is None else 1 - np.tanh(s / cap) ** 2
        return slope * self.mod_slope(self.before_mod(s))

    def mod_slope(self, x):
        """The derivative of score_mod, by differences of fourth order."""
        if "score_mod" not in self.options:
            return np.ones(())
        step = 1e-3 * np.maximum(1, abs(x))
        near = self.modified(x + step) - self.modified(x - step)
        far = self.modified(x + 2 * step) - self.modified(x - 2 * step)
        return (8 * near - far) / (12 * step)

    def visible(self):
        seen = np.ones(self.shape, bool)
        if "mask" in self.options:
            seen &= self.full("mask")
        if "q_lens" in self.options:
            seen &= self.i < self.full("q_lens", axes=3)
        if "kv_lens" in self.options:
            seen &= self.j < self.full("kv_lens", axes=3)
        q_ids, kv_ids = self.full("q_segment_ids"), self.full("kv_segment_ids")
        if q_ids is not None or kv_ids is not None:
            q_ids = kv_ids if q_ids is None else q_ids
            kv_ids = q_ids if kv_ids is None else kv_ids
            seen &= (q_ids[..., :, None] == kv_ids[..., None, :])[..., None, :, :]
        if "block_map" in self.options:
            seen &= self.allowed(self.options["block_map"])
        if "mask_mod" in self.options:
            mod = self.options["mask_mod"]
            seen &= self.each(lambda b, h, at: mod(b, h, self.i, self.j, *self.args), bool)
        return seen

    def allowed(self, block_map):
        """The pairs of the blocks that are not empty; what a full one promises is not looked at."""
        rows, keys = (n // size for n, size in zip((self.i, self.j), block_map.block))
        return np.asarray(block_map.kinds)[..., rows, keys] != 0

    def sinks(self):
        sinks = self.full("sinks")
        return np.broadcast_to(-np.inf if sinks is None else sinks, self.shape[:-2])

    def kept(self):
        """1 / keep where dropout keeps a weight, else 0; 1 everywhere without dropout."""
        if not self.options.get("dropout_p"):
            return np.ones(self.shape)
        limit = max(1, round(256 * (1 - self.options["dropout_p"])))
        seed = self.options["seed"]
        kept = self.each(lambda b, h, at: _bytes(seed, b, h, self.i, self.j) < limit)
        return kept * (256 / limit)

    def gradient(self, name, dx, dsink, s):
        """Of an option's array, summed to its own shape; dx (*batch, Hq, L, S) is by the value of
        the raw scores s, dsink by the rows' sinks.
        """
        shape = np.asarray(self.options[name]).shape
        if name == "sinks":
            return _summed(dsink.sum(axis=(-2, -1)), shape)
        dx = np.where(dx == 0, 0.0, dx * self.mod_slope(self.before_mod(s)))
        if name == "bias":
            return _summed(dx, shape)
        return _summed((-abs(self.i + self.offset - self.j) * dx).sum(axis=(-2, -1)), shape)


def _summed(x, shape):
    """x summed over the axes along which an array of `shape` was repeated."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    repeated = tuple(n for n, size in enumerate(shape) if size == 1 and x.shape[n] != 1)
    return x.sum(axis=repeated, keepdims=True)


def _bytes(seed, b, h, i, j):
    """Philox4x32-7's byte for each pair: key (seed), counter (j // 16, i, h, b)."""
    mask = np.uint64(0xFFFFFFFF)
    zero = np.zeros(np.broadcast_shapes(i.shape, j.shape), np.uint64)
    c0, c1 = zero + (j // 16).astype(np.uint64), zero + i.astype(np.uint64)
    c2, c3 = zero + np.uint64(h), zero + np.uint64(b)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(7):
        x, y = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (y >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            y & mask,
            (x >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            x & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    word = np.choose(j % 16 // 4, (c0, c1, c2, c3))
    return (word >> (8 * (j % 4)).astype(np.uint64)) & np.uint64(255)
