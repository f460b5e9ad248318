"""A small set of calls for compute-sanitizer: dtypes, both directions, bands, tails, odd strides.

    export PYTHONPATH=.
    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/sanitize_cases.py

and the same with --tool racecheck, synccheck and initcheck. Results are compared with the
reference as well, so the script also fails by itself. It needs a GPU.
"""

from __future__ import annotations

import sys

from strategies import DTYPES, Case

CASES = tuple(
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


def main():
    from conftest import CUPY, NO_GPU
    from running import check, differentiate

    if CUPY is None:
        print(f"needs a GPU: {NO_GPU}", file=sys.stderr)
        return 2
    for number, case in enumerate(CASES, 1):
        print(f"{number}/{len(CASES)} {case}", flush=True)
        check(CUPY, case)
        differentiate(CUPY, case, case.arrays(), deterministic=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
