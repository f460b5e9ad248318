"""A small set of calls for compute-sanitizer: dtypes, both directions, bands, tails, odd strides,
and every kind of Hopper's kernels.

    export PYTHONPATH=.
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize_cases.py

and the same with --tool racecheck, synccheck and initcheck. Results are compared with the
reference as well, so the script also fails by itself. It needs a GPU.
"""

from __future__ import annotations

import sys

import numpy as np
from dense import visible
from strategies import DTYPES, Case

import cuflash

PORTABLE = tuple(
    Case(*lengths, *dims, *heads, dtype=dtype, **band)
    for dtype in DTYPES
    for lengths, dims, heads, band in (
        ((65, 130), (64, 64), (2, 1), dict(causal=True)),
        ((130, 65), (40, 24), (1, 1), dict(window=(33, 7))),
        ((1, 257), (64, 64), (4, 2), {}),
        (
            (17, 33),
            (128, 128),
            (1, 1),
            dict(strides=("step2", "pitch+3", "reversed", "offset1", "fortran")),
        ),
    )
)


# Keys by head dim: whole blocks of both directions, whole blocks of the late forward; with others a
# sequence ends inside a block.
_WHOLE = {64: (384, 2176), 128: (640, 2560), 256: (320, 2240)}
HOPPER = tuple(
    Case(*lengths, dim, dim, *heads, dtype=dtype, **band)
    for dim, (few, many) in _WHOLE.items()
    for dtype, lengths, heads, band in (
        ("float16", (256, few), (2, 1), {}),
        ("bfloat16", (200, 330), (3, 3), {}),
        ("bfloat16", (192, many), (1, 1), {}),
        ("float16", (70, 2100), (4, 2), {}),
        ("bfloat16", (100, 300), (4, 2), dict(causal="top_left")),
        ("float16", (260, 600), (1, 1), dict(window=(33, 7), causal_offset=150)),
    )
)
CASES = PORTABLE + HOPPER
# Random block maps, whose blocks kernels meet whole on Hopper, in part elsewhere.
MAPS = tuple(
    Case(300, 520, dim, dim, 4, 2, (2,), (2,), (2,), dtype=dtype, scores=("block_map",), **band)
    for dim, dtype in ((64, "float16"), (128, "bfloat16"), (256, "bfloat16"), (40, "float32"))
    for band in ({}, dict(causal=True))
)

# The ways a case is differentiated, beside the ordered one with all gradients.
_UNORDERED = dict(deterministic=False)
_PARTS = (dict(need=("q",)), dict(need=("q",), deterministic=False), dict(need=("k", "v")))


def ways(case):
    """Keywords of attention_backward."""
    return (_UNORDERED, *_PARTS) if case in HOPPER else (_UNORDERED,)


def arrays_of(case):
    """The case's arrays, NaN in the keys and values that no query sees."""
    arrays = case.arrays()
    band = {n: x for n, x in case.options.items() if n in ("causal", "causal_offset", "window")}
    unseen = np.flatnonzero(~visible(case.seqlen_q, case.seqlen_k, **band).any(axis=0))
    for name in "kv":
        arrays[name][..., unseen, :] = np.nan
    return arrays


def sanitize(home, case):
    """All calls of a case; the ordered gradients and the results are compared."""
    from running import check, differentiate

    arrays = arrays_of(case)
    check(home, case, arrays)
    for way in ways(case):
        differentiate(home, case, arrays, **way)


def map_of(case):
    """Blocks that Hopper's kernels meet whole where they run."""
    lengths = case.seqlen_q, case.seqlen_k
    block = (40, 64) if case.dtype == "float32" else (128, 128)
    shape = (case.num_heads, *(-(-n // size) for n, size in zip(lengths, block)))
    return cuflash.BlockMap(np.random.default_rng(case.head_dim).integers(0, 3, shape), block)


def sanitize_map(home, case):
    from score_cases import check

    check(home, case, options=dict(block_map=map_of(case)))


def main():
    from conftest import CUPY, NO_GPU

    if CUPY is None:
        print(f"needs a GPU: {NO_GPU}", file=sys.stderr)
        return 2
    for number, case in enumerate(CASES, 1):
        print(f"{number}/{len(CASES)} {case}", flush=True)
        sanitize(CUPY, case)
    for number, case in enumerate(MAPS, 1):
        print(f"map {number}/{len(MAPS)} {case}", flush=True)
        sanitize_map(CUPY, case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
