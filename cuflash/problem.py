"""The facts of one attention call, validated: everything a family, a kernel or the NumPy path needs to know about shapes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Band:
    """Key j is visible to query i when ``i + lo <= j <= i + hi``; lo in [-L, S] and hi in [-L - 1, S], so sums stay small.

    Causal attention is ``hi = offset``; ``window=(left, right)`` is ``lo = offset - left`` and ``hi = offset + right``.
    """

    lo: int
    hi: int


@dataclass(frozen=True)
class Problem:
    """One call's structure, independent of any array library. Shapes follow the layout (*batch, H, L, D)."""

    dtype: str  # "float16", "bfloat16", "float32" or "float64"
    batch: tuple[int, ...]  # broadcast leading axes of q, k and v
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    scale: float  # the resolved value: 1/sqrt(head_dim) when the caller gave None
    band: Band | None = None  # None: every key is visible
    precision: str | None = None  # None or "tf32" (float32 only)

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"
