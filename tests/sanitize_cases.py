"""A small set of calls for compute-sanitizer: dtypes, both directions, bands, tails, odd strides,
and every kind of Hopper's kernels.

    export PYTHONPATH=.
    compute-sanitizer --report-api-errors no --error-exitcode 1 python tests/sanitize_cases.py

and the same with --tool racecheck, synccheck and initcheck; `sanitize_cases.py 2 8` runs the second
of eight parts, several of which may run side by side. Results are compared with the reference as
well, so the script also fails by itself. It needs a GPU.

memcheck and initcheck find nothing. racecheck and synccheck find nothing in the portable kernels; in
Hopper's they report the patterns of sanitize_patterns.py, and what they report must be one of them.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
from dense import visible
from packed_cases import PackedCase
from strategies import DTYPES, Case

import cuflash
from cuflash.reference_scores import Scores

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
# Options on scores in the Hopper family, together and with sequences that end inside a block.
SCORED = tuple(
    Case(*lengths, dim, dim, 4, 2, (2,), (2,), (2,), dtype=dtype, scores=scores, **band)
    for dim, dtype, lengths, scores, band in (
        (64, "bfloat16", (200, 330), ("softcap", "bias", "mask", "sinks"), {}),
        (128, "float16", (130, 301), ("alibi_slopes", "segments", "dropout"), dict(causal=True)),
        (256, "bfloat16", (70, 258), ("score_mod", "kv_lens", "q_lens", "mask_mod"), {}),
    )
)
# Packed sequences: blocks that several of them share, rows behind the last one.
PACKED = tuple(
    PackedCase(
        (3, 0, 150, 70), (90, 60, 150, 0), (9, 40), (2, 1), (dim, dim), dtype, dict(band), scores
    )
    for dim, dtype, band, scores in (
        (64, "float16", (("causal", True),), ()),
        (128, "bfloat16", (("window", (40, 9)),), ()),
        (256, "bfloat16", (), ()),
        (64, "float32", (("causal", True),), ()),
        (64, "bfloat16", (), ("alibi_slopes", "sinks", "dropout")),
    )
)
# Options on scores, in Hopper's backward: keys of both warpgroups, shared keys, a fragment kept for
# gradients of arrays, in both kernels; hidden pairs in each.
SCORED += tuple(
    Case(130, 200, dim, dim, 4, 2, (2,), (2,), (2,), dtype=dtype, scores=scores, **band)
    for dim, dtype, scores, band in (
        (64, "float16", ("softcap", "bias", "mask", "alibi_slopes"), {}),
        (128, "bfloat16", ("segments", "sinks", "dropout"), {}),
        (128, "float16", ("bias", "sinks"), dict(causal=True)),
        (256, "bfloat16", ("softcap", "kv_lens", "dropout"), {}),
        (256, "float16", ("bias", "mask_mod", "score_mod"), dict(window=(70, 9))),
    )
)
# Random block maps, whose blocks kernels meet whole on Hopper, in part elsewhere; alone and beside
# masks.
MAPS = tuple(
    Case(300, 520, dim, dim, 4, 2, (2,), (2,), (2,), dtype=dtype, scores=scores, **band)
    for dim, dtype in ((64, "float16"), (128, "bfloat16"), (256, "bfloat16"), (40, "float32"))
    for scores, band in (
        (("block_map",), {}),
        (("block_map",), dict(causal=True)),
        (("block_map", "mask", "softcap"), {}),
    )
)

CASES = PORTABLE + HOPPER + SCORED
HIDING = {"mask", "mask_mod", "segments", "q_lens", "kv_lens"}  # which may be read as bits

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
    import packed_cases
    import score_cases
    from running import check, differentiate

    if isinstance(case, PackedCase):
        packed_cases.check(home, case)
        return
    if case.scores:
        score_cases.check(home, case)
        if HIDING & set(case.scores):
            for way in (score_cases.masks_as_bits, score_cases.without_masks):
                with way():
                    score_cases.check(home, case)
        return
    arrays = arrays_of(case)
    check(home, case, arrays)
    for way in ways(case):
        differentiate(home, case, arrays, **way)


def map_options(case):
    """The case's options, the map in blocks that Hopper's kernels meet whole where they run."""
    from score_cases import block_sums, score_options

    others = replace(case, scores=tuple(name for name in case.scores if name != "block_map"))
    options = score_options(others)
    if "mask" in options:  # full blocks beside partial ones
        options["mask"][..., :256] = True
    block = (40, 64) if case.dtype == "float32" else (128, 128)
    grid = (*case.batch, case.num_heads, case.seqlen_q, case.seqlen_k)
    whole = block_sums(~Scores(grid, 0, options).visible(), block) == 0
    kinds = np.random.default_rng(case.head_dim).integers(0, 3, whole.shape)
    kinds = np.where(whole, kinds, np.minimum(kinds, 1))
    return {**options, "block_map": cuflash.BlockMap(kinds, block)}


def sanitize_map(home, case):
    from score_cases import check

    check(home, case, options=map_options(case))


def part_of(cases, arguments):
    """All cases, or every PARTS-th from the PART-th on, as the command line says."""
    if not arguments:
        return cases
    part, parts = (int(x) for x in arguments)
    if not 1 <= part <= parts:
        raise SystemExit(f"part {part} of {parts}")
    return cases[part - 1 :: parts]


def main(arguments=()):
    from conftest import CUPY, NO_GPU

    if CUPY is None:
        print(f"needs a GPU: {NO_GPU}", file=sys.stderr)
        return 2
    cases = part_of(CASES + PACKED + MAPS, arguments)
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} {case}", flush=True)
        (sanitize_map if case in MAPS else sanitize)(CUPY, case)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
