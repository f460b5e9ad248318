"""Options on scores that a Case names, with values drawn from its seed."""

from __future__ import annotations

import numpy as np
from conftest import np_dtype

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
                  for n, x in drawn[name].items()}  # fmt: skip
    return found
