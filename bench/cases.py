"""What is measured, as data. A set is a list of cases; a case is one shape, one direction and one
dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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

    @property
    def name(self):
        mask = "causal" if self.causal else "full"
        sizes = f"b{self.batch} h{self.heads} n{self.seqlen} d{self.head_dim}"
        return f"{self.way} {self.dtype} {sizes} {mask}"

    @property
    def unit(self):
        """What the table gives for it."""
        return "us" if self.host else "TFLOP/s" if self.home == "gpu" else "GFLOP/s"

    @property
    def shape(self):
        return (self.batch, self.heads, self.seqlen, self.head_dim)

    @property
    def flop(self):
        """4 B H L S D, halved when causal, 2.5 times that for the backward pass: products only,
        recompute included.
        """
        forward = (
            4 * self.batch * self.heads * self.seqlen**2 * self.head_dim / (2 if self.causal else 1)
        )
        return forward * (2.5 if self.way == "bwd" else 1)


def _gpu(way):
    return [
        Case(way, "gpu", dtype, _TOKENS // n, _WIDTH // d, n, d, causal)
        for dtype in ("bfloat16", "float16")
        for d in (64, 128)
        for n in (2048, 4096, 8192, 16384)
        for causal in (False, True)
    ]


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


SETS = {"fwd": _gpu("fwd"), "bwd": _gpu("bwd"), "wide": _wide(), "host": _host(), "cpu": _cpu()}
