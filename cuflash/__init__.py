"""Exact attention, forward and backward, for NumPy, CuPy, PyTorch and JAX arrays.

The whole interface is here; `cuflash.reference` holds the dense float64 definition that the tests
compare with. Importing this package imports NumPy and nothing of CUDA: CuPy is loaded by the first
call that brings GPU arrays.
"""

from . import reference
from .api import AttentionGrads, attention, attention_backward, attention_vjp
from .blockmap import BlockMap, block_map
from .philox import dropout_mask
from .tools import compile, explain, merge
from .varlen import attention_varlen, attention_varlen_vjp

__version__ = "0.1.0"

__all__ = [
    "AttentionGrads",
    "BlockMap",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_vjp",
    "attention_vjp",
    "block_map",
    "compile",
    "dropout_mask",
    "explain",
    "merge",
    "reference",
]
