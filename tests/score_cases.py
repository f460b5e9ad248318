"""Options on scores that a Case names, with values drawn from its seed, and their checks."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
from conftest import np_dtype
from dense import ROUNDOFF
from strategies import forced_tile

import cuflash
from cuflash import mask_bits, reference
from cuflash.reference_scores import Scores

SCORES = (
    "softcap", "bias", "alibi_slopes", "mask", "q_lens", "kv_lens", "segments", "sinks",
    "score_mod", "mask_mod", "dropout",
)  # fmt: skip


def score_mod(s, b, h, i, j, table, factor):
    """Smooth in s, and a function of all that it may read."""
    return factor * s + table[h, j] * np.tanh(s) - (i - j) * 0.01 + np.where(b > 0, 0.5, 0.0)


def mask_mod(b, h, i, j, *_):
    return (i + 2 * j + h + b) % 5 != 0


def score_options(case):
    """The options that case.scores names, as NumPy arrays, numbers and functions."""
    rng = np.random.default_rng(case.seed + 1)
    batch, heads = case.batch, case.num_heads
    lengths = case.seqlen_q, case.seqlen_k
    grid = (*batch, heads, *lengths)
    bias = (*(n if rng.random() < 0.5 else 1 for n in grid[:-1]), grid[-1])[rng.integers(2) :]
    real = np.dtype("float64" if case.dtype == "float64" else "float32")
    bias_dtype = np_dtype(case.dtype) if rng.random() < 0.5 else real
    drawn = {
        "softcap": dict(softcap=float(rng.uniform(0.5, 3))),
        "bias": dict(bias=rng.standard_normal(bias).astype(bias_dtype)),
        "alibi_slopes": dict(alibi_slopes=rng.uniform(-0.2, 0.2, heads).astype(real)),
        "mask": dict(mask=rng.random((heads, *lengths)) < 0.7),
        "q_lens": dict(q_lens=rng.integers(0, lengths[0] + 1, batch)),
        "kv_lens": dict(kv_lens=rng.integers(0, lengths[1] + 1, batch).astype(np.int32)),
        "segments": dict(
            q_segment_ids=rng.integers(0, 3, (*batch, lengths[0])),
            kv_segment_ids=rng.integers(0, 3, lengths[1]),
        ),
        "sinks": dict(sinks=rng.standard_normal((*batch, heads)).astype(real)),
        "score_mod": dict(
            score_mod=score_mod,
            score_args=(rng.standard_normal((heads, lengths[1])).astype(real), 0.9),
        ),
        "mask_mod": dict(mask_mod=mask_mod),
        "dropout": dict(dropout_p=float(rng.uniform(0.05, 0.9)), seed=int(rng.integers(2**63))),
    }
    found = {}
    for name in case.scores:
        found |= {n: np.asarray(x) if isinstance(x, np.integer) else x
                  for n, x in drawn.get(name, {}).items()}  # fmt: skip
    if "block_map" in case.scores:
        found["block_map"] = random_map(rng, grid, Scores(grid, 0, found).visible())
    return found


def block_sums(x, block):
    """Sums of the last two axes, block by block."""
    for axis, size in zip((-2, -1), block):
        x = np.add.reduceat(x, np.arange(0, x.shape[axis], size), axis=axis)
    return x


def random_map(rng, grid, seen):
    """A map for scores of shape grid, full only where all pairs of a block are seen."""
    sizes = (16, 40, 64, 128, 256)
    block = tuple(int(rng.choice(sizes)) for _ in range(2))
    whole = block_sums(~seen, block) == 0
    kinds = rng.integers(0, 3, whole.shape)
    return cuflash.BlockMap(np.where(whole, kinds, np.minimum(kinds, 1)), block)


OPTIONAL = ("bias", "alibi_slopes", "sinks")


def to_home(home, options):
    """The options with their arrays on a home."""

    def move(x):
        if isinstance(x, cuflash.BlockMap):
            return cuflash.BlockMap(home.to_home(x.kinds), x.block)
        return home.to_home(x) if isinstance(x, np.ndarray) else x

    return {
        name: tuple(map(move, x)) if name == "score_args" else move(x)
        for name, x in options.items()
    }


def run(home, case, arrays, options, need=("q", "k", "v")):
    """out, lse and the gradients asked for, in NumPy."""
    q, k, v, dout, dlse = (home.to_home(arrays[n]) for n in ("q", "k", "v", "dout", "dlse"))
    keywords = {**case.options, **to_home(home, options)}
    with forced_tile(case, home):
        (out, lse), pull = cuflash.attention_vjp(q, k, v, return_lse=True, **keywords)
    grads = pull(dout, dlse, need=need)
    found = [out, lse, *grads, *(getattr(grads, f"d{name}") for name in OPTIONAL)]
    found = [None if x is None else home.asnumpy(x) for x in found]
    return found, grads.dscore_args


def close(name, got, want, dtype, loose=1e-8):
    assert got.shape == want.shape, f"{name}: {got.shape}, expected {want.shape}"
    got = np.asarray(got, np.float64)
    assert np.array_equal(np.isfinite(got), np.isfinite(want)), name
    odd = ~np.isfinite(want)
    assert np.array_equal(got[odd], want[odd], equal_nan=True), name
    if got.size:
        size = 1 + abs(np.where(odd, 0, want)).max()
        factor = 16 if dtype in ("float16", "bfloat16") else 64
        allowed = max(factor * ROUNDOFF[dtype], loose if dtype == "float64" else 0) * size
        error = abs(np.where(odd, 0, got - np.where(odd, 0, want))).max()
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def check(home, case, arrays=None, options=None):
    """out, lse and every gradient against the reference."""
    arrays = case.arrays() if arrays is None else arrays
    options = score_options(case) if options is None else options
    asked = tuple(n for n in OPTIONAL if n in options)
    args = ("score_args",) if "score_args" in options else ()
    found, _ = run(home, case, arrays, options, ("q", "k", "v", *asked, *args))
    keywords = {**case.options, **options}
    inputs = [arrays[n] for n in "qkv"]
    want = dict(zip(("out", "lse"), reference.attention(*inputs, **keywords)))
    grads = reference.attention_backward(
        arrays["dout"], *inputs, dlse=arrays["dlse"], need=asked, **keywords
    )
    want |= dict(zip(("q", "k", "v", *asked), grads))
    for name, got in zip(("out", "lse", "q", "k", "v", *OPTIONAL), found):
        assert (got is None) == (name not in want)
        if got is not None:
            own = case.dtype
            if name in OPTIONAL:
                assert got.dtype == options[name].dtype
            close(name, got, want[name], own)


@contextlib.contextmanager
def _limits(**limits):
    """mask_bits.py with other limits; what was decided for equal calls is forgotten."""
    before = {name: getattr(mask_bits, name) for name in limits}
    steps = sys.modules.get("cuflash.launch_steps")

    def put(values):
        vars(mask_bits).update(values)
        if steps is not None:
            steps._prepared.clear()

    try:
        put(limits)
        yield
    finally:
        put(before)


def masks_as_bits():
    """Bits for every call with masks, however small."""
    return _limits(LEAST_PAIRS=0, SHARED_BY=0)


def without_masks():
    """Ends or lists for every call with lengths or segments alone."""
    return _limits(LENGTH_PAIRS=0, SEGMENT_PAIRS=0, SEGMENT_KEYS=0)


def check_agreement(gpu, shape, dtype, ways, allowed):
    """Two ways to say the same, keywords of a call each, on arrays too large for the reference: out
    and gradients within a part of their largest value.
    """
    rng = gpu.xp.random.default_rng(shape[-1])
    q, k, v, dout = (
        rng.standard_normal(shape, dtype=np.float32).astype(np_dtype(dtype)) for _ in range(4)
    )
    found = []
    for options in ways:
        out, pullback = cuflash.attention_vjp(q, k, v, **options)
        found.append([x.astype(np.float32) for x in (out, *pullback(dout))])
    for got, want in zip(*found, strict=True):
        size = float(abs(want).max())
        assert size > 0.1 and float(abs(got - want).max()) <= allowed * size
