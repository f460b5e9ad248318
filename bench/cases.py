"""What is measured, as data. A set is a list of cases; a case is one shape, one direction and one
dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .scores import DOCUMENTS, MAP_BLOCK, map_kinds

_TOKENS = 16384  # batch * seqlen of the GPU tables: the convention of the FlashAttention papers
_WIDTH = 2048  # heads * head_dim, likewise


@dataclass(frozen=True)
class Case:
    """q, k, v and dout have shape (batch, heads, seqlen, head_dim); ``way`` is "fwd" or "bwd"."""

    way: str
    home: str  # "gpu" or "cpu"
    dtype: str
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool = False
    host: bool = field(default=False)  # the host's time a call counts, not the device's
    kv_heads: int = 0  # 0: as many as heads
    seqlen_k: int = 0  # 0: seqlen
    head_dim_v: int = 0  # 0: head_dim
    left: int | None = None  # with causal: keys before a query's own that it sees
    option: str = ""  # on scores: a name in scores.py

    @property
    def name(self):
        mask = "causal" if self.causal else "full"
        mask += f" window {self.left + 1}" if self.left is not None else ""
        mask += f" {self.option}" if self.option else ""
        heads = f"h{self.heads}" + (f"/{self.kv_heads}" if self.kv_heads else "")
        lengths = f"n{self.seqlen}" + (f"x{self.seqlen_k}" if self.seqlen_k else "")
        dims = f"d{self.head_dim}" + (f",{self.head_dim_v}" if self.head_dim_v else "")
        return f"{self.way} {self.dtype} b{self.batch} {heads} {lengths} {dims} {mask}"

    @property
    def unit(self):
        """What the table gives for it."""
        return "us" if self.host else "TFLOP/s" if self.home == "gpu" else "GFLOP/s"

    @property
    def shapes(self):
        """Of q, k, v and dout."""
        head_dim_v, keys = self.head_dim_v or self.head_dim, self.seqlen_k or self.seqlen
        query = (self.batch, self.heads, self.seqlen)
        key = (self.batch, self.kv_heads or self.heads, keys)
        return (
            (*query, self.head_dim), (*key, self.head_dim), (*key, head_dim_v),
            (*query, head_dim_v),
        )  # fmt: skip

    @property
    def lengths(self):
        """Queries and keys of a sequence."""
        return self.seqlen, self.seqlen_k or self.seqlen

    @property
    def pairs(self):
        """Unmasked pairs of query and key of a head: half of all when causal without a window, as
        the FlashAttention papers count, else exactly.
        """
        rows, keys = self.lengths
        if self.option in ("segments", "documents"):
            return int((np.bincount(np.arange(rows) * DOCUMENTS // rows) ** 2).sum())
        if self.option.endswith(" map"):
            return int(np.count_nonzero(map_kinds(self.option, rows))) * MAP_BLOCK**2
        if self.option == "lengths":
            return rows * (keys - keys // 8)
        if not self.causal:
            return rows * keys
        if self.left is None and rows == keys:
            return rows * keys / 2
        last = np.arange(keys - rows, keys)
        first = np.maximum(0, last - (keys if self.left is None else self.left))
        return int((last - first + 1).sum())

    @property
    def flop(self):
        """Two for each multiplication of a product, by unmasked pairs, 2.5 times that for the
        backward pass: products only, recompute included.
        """
        dims = self.head_dim + (self.head_dim_v or self.head_dim)
        forward = 2 * self.batch * self.heads * self.pairs * dims
        return forward * (2.5 if self.way == "bwd" else 1)


def _gpu(way):
    return [
        Case(way, "gpu", dtype, _TOKENS // n, _WIDTH // d, n, d, causal)
        for dtype in ("bfloat16", "float16")
        for d in (64, 128, 256)
        for n in (512, 1024, 2048, 4096, 8192, 16384)
        for causal in (False, True)
    ]


def _shapes(way):
    """What differs from the square problems of one head dim in some way, beside those."""
    def case(d, n=4096, causal=False, **other):
        width = max(d, other.get("head_dim_v", 0))
        return Case(
            way, "gpu", "bfloat16", max(1, _TOKENS // n), _WIDTH // width, n, d, causal, **other
        )

    both = (False, True)
    cases = [case(d, causal=causal) for d in (64, 96, 128, 192, 256) for causal in both]
    cases += [case(d, head_dim_v=128, causal=causal) for d in (64, 192) for causal in both]
    cases += [case(d, causal=causal) for d in (40, 72, 80, 112) for causal in both]
    cases += [case(128, kv_heads=kv, causal=causal) for kv in (4, 2) for causal in both]
    cases += [case(128, 2048, seqlen_k=8192, causal=causal) for causal in both]
    cases += [case(d, 16384, True, left=left) for d in (64, 128) for left in (None, 1023)]
    return cases


def _scores(way):
    """Options on scores, beside the same call without; FlexAttention has some of them."""
    names = (
        "", "softcap", "score_mod", "alibi", "bias", "float32 bias", "mask", "lengths", "segments",
        "documents", "dropout", "packed",
    )  # fmt: skip
    names += ("bias and its gradient",) if way == "bwd" else ()
    cases = [Case(way, "gpu", "bfloat16", 2, 16, 8192, 128, option=name) for name in names]
    return [*cases, Case(way, "gpu", "bfloat16", 2, 16, 8192, 128, True, left=1023)]


def _maps(way):
    """Block maps of whole blocks, beside the same call without."""
    names = ("", "banded map", "document map", "random map")
    return [Case(way, "gpu", "bfloat16", 1, 16, 16384, 128, option=name) for name in names]


def _wide():
    """The dtypes that tensor cores of 16 bits do not serve."""
    return [
        Case(way, "gpu", dtype, 4, _WIDTH // d, 4096, d, causal)
        for dtype in ("float32", "float64")
        for way in ("fwd", "bwd")
        for d in (64, 128)
        for causal in (False, True)
    ]


def _host():
    """A call so small that the GPU waits for the host: what is measured is the library's own
    overhead.
    """
    return [Case(way, "gpu", "bfloat16", 1, 8, 128, 64, host=True) for way in ("fwd", "bwd")]


def _cpu():
    shapes = ((1, 8, 2048, 64), (1, 8, 4096, 128))
    runs = (("fwd", "float32"), ("bwd", "float32"), ("fwd", "float64"))
    return [Case(way, "cpu", dtype, *shape) for way, dtype in runs for shape in shapes]


SETS = {
    "fwd": _gpu("fwd"),
    "bwd": _gpu("bwd"),
    "shapes": _shapes("fwd") + _shapes("bwd"),
    "scores": _scores("fwd") + _scores("bwd"),
    "maps": _maps("fwd") + _maps("bwd"),
    "wide": _wide(),
    "host": _host(),
    "cpu": _cpu(),
}
