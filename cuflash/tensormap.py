"""Tensor maps: how the bulk copy engine (TMA) finds a box of an array.

A map describes an array as (outer batch, inner batch, head, row, column); kernels ask for boxes of
64 columns by some rows, written to shared memory in the 128-byte swizzle that wgmma reads.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

BOX_COLUMNS = 64  # 128 bytes of a 16-bit type
MAX_STRIDE = 1 << 40  # bytes


def unfit(array) -> str | None:
    """Why no map can describe a view (*batch, heads, rows, columns), or None.

    Columns must be contiguous, every other stride and the address multiples of 16 bytes, no stride
    negative.
    """
    if array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        return "its columns are not contiguous"
    if array.data.ptr % 16 != 0:
        return f"its address {array.data.ptr:#x} is not a multiple of 16 bytes"
    for size, stride in zip(array.shape[:-1], array.strides[:-1]):
        if size > 1 and (stride % 16 != 0 or not 0 <= stride < MAX_STRIDE):
            return f"a stride of {stride} bytes is not a multiple of 16 from 0 to 2**40"
    return None


@lru_cache(maxsize=None)
def missing() -> str | None:
    """Why no map can be made here, or None."""
    try:
        from cuda.bindings import driver  # noqa: F401
    except ImportError as error:
        return f"they are made by cuda.bindings, which cannot be imported ({error})"
    return None


def why_not(**arrays) -> str | None:
    """Why maps cannot describe all the arrays, which go by their names, or None."""
    for name, array in arrays.items():
        reason = unfit(array)
        if reason is not None:
            return f"{name}: {reason}"
    return missing()


class Encoder:
    """Makes the maps of arrays of one shape and one set of strides, as 128 bytes each.

    Parameters
    ----------
    array : cupy.ndarray (*batch, heads, rows, columns)
        At most two batch axes, and ``unfit(array)`` is None.
    rows : int
        Of a box, at most 256.

    Raises
    ------
    ImportError
        cuda.bindings is not installed.
    """

    def __init__(self, array, rows: int):
        from cuda.bindings import driver

        integer, wide = driver.cuuint32_t, driver.cuuint64_t
        sizes = [1] * (5 - array.ndim) + list(array.shape)
        strides = [0] * (5 - array.ndim) + list(array.strides)
        # The stride of an axis of one element is of no consequence.
        strides = [s if n > 1 else 16 for n, s in zip(sizes, strides)]
        types = driver.CUtensorMapDataType
        is_half = array.dtype.name == "float16"
        self._encode = driver.cuTensorMapEncodeTiled
        self._before = (
            types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
            if is_half
            else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            5,
        )
        self._after = (
            [wide(n) for n in reversed(sizes)],
            [wide(s) for s in reversed(strides[:-1])],
            [integer(n) for n in (BOX_COLUMNS, rows, 1, 1, 1)],
            [integer(1)] * 5,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )

    def map(self, pointer: int) -> bytes:
        """The map of the array that begins at ``pointer``.

        Raises
        ------
        RuntimeError
            The driver refused it.
        """
        error, tensor_map = self._encode(*self._before, pointer, *self._after)
        if int(error) != 0:
            raise RuntimeError(f"cuTensorMapEncodeTiled: {error.name}")
        return ctypes.string_at(tensor_map.getPtr(), 128)
