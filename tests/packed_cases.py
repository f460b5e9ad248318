"""Packed batches that a seed or a test draws, and their check against float64 on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from conftest import np_dtype
from score_cases import close

import cuflash

NAMES = ("out", "lse", "dq", "dk", "dv", "dalibi_slopes", "dsinks")


def score_mod(s, b, h, i, j, table, slopes):
    """A function of all that it may read; entries by (b, h), and by j alone."""
    return s * np.where(b % 2 == 1, 0.5, 1.0) + table[b % 3, h] * (i - j) * 0.05 + slopes[j % 5]


def mask_mod(b, h, i, j, *_):
    return (i + 2 * j + h + b) % 5 != 0


@dataclass(frozen=True)
class PackedCase:
    """One call of attention_varlen; NaN lies behind the last sequence."""

    lengths_q: tuple
    lengths_k: tuple
    tails: tuple = (0, 0)
    heads: tuple = (2, 1)
    dims: tuple = (64, 64)
    dtype: str = "float32"
    options: dict = field(default_factory=dict)  # numbers
    scores: tuple = ()  # names of options with arrays or functions
    on_device: bool = True  # the offsets
    deterministic: bool = True
    seed: int = 0

    @property
    def offsets(self):
        return [np.concatenate([[0], np.cumsum(x, dtype=int)]) for x in
                (self.lengths_q, self.lengths_k)]  # fmt: skip

    def arrays(self):
        rng = np.random.default_rng(self.seed)
        rows = [int(x[-1]) + tail for x, tail in zip(self.offsets, self.tails)]
        (heads, kv_heads), (dim, dim_v) = self.heads, self.dims
        shapes = {
            "q": (rows[0], heads, dim), "k": (rows[1], kv_heads, dim),
            "v": (rows[1], kv_heads, dim_v), "dout": (rows[0], heads, dim_v),
        }  # fmt: skip
        made = {n: rng.standard_normal(s).astype(np_dtype(self.dtype)) for n, s in shapes.items()}
        number = "float64" if self.dtype == "float64" else "float32"
        made["dlse"] = rng.standard_normal((rows[0], heads)).astype(number)
        for name, x in made.items():
            x[self.offsets[name in "kv"][-1] :] = np.nan
        return made

    def keywords(self):
        """All options, arrays as NumPy's."""
        rng, heads = np.random.default_rng(self.seed + 1), self.heads[0]
        real = "float64" if self.dtype == "float64" else "float32"
        drawn = {
            "softcap": dict(softcap=1.5),
            "alibi_slopes": dict(alibi_slopes=rng.uniform(-0.2, 0.2, heads).astype(real)),
            "sinks": dict(sinks=rng.standard_normal(heads).astype(real)),
            "score_mod": dict(
                score_mod=score_mod,
                score_args=tuple(rng.standard_normal(s).astype(real) for s in ((3, heads), 5)),
            ),
            "mask_mod": dict(mask_mod=mask_mod),
            "dropout": dict(dropout_p=0.4, seed=int(rng.integers(2**63))),
        }
        found = dict(self.options)
        for name in self.scores:
            found |= drawn[name]
        return found


def draw(seed, dtypes=("float16", "bfloat16", "float32", "float64"), longest=150) -> PackedCase:
    """The case of a seed."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(0, 7))
    longest = (3, 40, longest)[int(rng.integers(3))]
    lengths = rng.integers(0, longest + 1, (2, count)) * (rng.random((2, count)) < 0.85)
    if rng.random() < 0.4:
        lengths[1] = lengths[0]
    kv_heads = int(rng.integers(1, 3))
    window = [None if rng.random() < 0.3 else int(rng.integers(0, longest)) for _ in "lr"]
    options = [
        {}, dict(causal=True), dict(causal="top_left"), dict(window=tuple(window)),
        dict(causal=True, window=tuple(window)),
        dict(causal=True, causal_offset=int(rng.integers(-9, 10))),
    ][int(rng.integers(6))]  # fmt: skip
    all_scores = ("softcap", "alibi_slopes", "sinks", "score_mod", "mask_mod", "dropout")
    chosen = rng.random(6) < (0.0 if rng.random() < 0.5 else 0.5)
    dims = ((64, 64), (128, 128), (40, 72), (8, 17), (192, 128))
    return PackedCase(
        tuple(map(int, lengths[0])),
        tuple(map(int, lengths[1])),
        tuple(map(int, rng.integers(0, 30, 2) * (rng.random(2) < 0.5))),
        (kv_heads * int(rng.integers(1, 4)), kv_heads),
        dims[int(rng.integers(len(dims)))],
        str(rng.choice(dtypes)),
        options,
        tuple(name for name, on in zip(all_scores, chosen) if on),
        bool(rng.integers(2)),
        bool(rng.random() < 0.7),
        int(seed),
    )


def move(home, x):
    if isinstance(x, np.ndarray):
        return home.to_home(x)
    return tuple(move(home, y) for y in x) if isinstance(x, tuple) else x


def run(home, case: PackedCase, given=None):
    """By name: out, lse and all gradients, in NumPy."""
    arrays = {n: move(home, x) for n, x in (given or case.arrays()).items()}
    keywords = {n: x if n == "window" else move(home, x) for n, x in case.keywords().items()}
    offsets = case.offsets
    if case.on_device:
        offsets = [home.to_home(x.astype(np.int32)) for x in offsets]
    q, k, v = (arrays[n] for n in "qkv")
    room = home.to_home(np.full((*q.shape[:2], v.shape[2]), np.nan, np.dtype(q.dtype)))
    target = room if case.seed % 2 else None
    (out, lse), pull = cuflash.attention_varlen_vjp(
        q, k, v, *offsets, out=target, return_lse=True, **keywords
    )
    assert target is None or out is target
    asked = [n for n in ("alibi_slopes", "sinks", "score_args") if n in keywords]
    grads = pull(
        arrays["dout"], arrays["dlse"], need=("q", "k", "v", *asked),
        deterministic=case.deterministic,
    )  # fmt: skip
    found = dict(zip(NAMES, (out, lse, *grads, grads.dalibi_slopes, grads.dsinks)))
    for n, x in enumerate(grads.dscore_args or ()):
        found[f"dscore_args[{n}]"] = x
    return {n: home.asnumpy(x) for n, x in found.items() if x is not None}


def check(home, case: PackedCase):
    """Everything that the call gives, against the same on the CPU in float64."""
    from conftest import NUMPY

    arrays = case.arrays()
    found = run(home, case, arrays)
    exact = {n: x.astype(np.float64) for n, x in arrays.items()}
    want = run(NUMPY, case, exact)
    assert found.keys() == want.keys()
    for name, x in want.items():
        dtype = case.dtype if name in ("out", "dq", "dk", "dv") else found[name].dtype.name
        if name not in ("out", "lse") and case.dtype in ("float16", "bfloat16"):
            dtype = case.dtype  # of what the gradient is a sum of
        close(name, found[name], x, dtype)
    return found
