"""What the tests of other array libraries share: inputs, a comparison, and which GPUs there are."""

import importlib.util
import os

import ml_dtypes  # noqa: F401  (NumPy then knows the name bfloat16)
import numpy as np
import pytest

# JAX would take most of the GPU's memory, which the other libraries of a test need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 4e-6, "float64": 1e-13}
HAVE = {name: importlib.util.find_spec(name) is not None for name in ("torch", "jax", "cupy")}


def gpu_count():
    if not HAVE["cupy"] or importlib.util.find_spec("cuflash.launch") is None:
        return 0
    import cupy

    try:
        return cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


GPUS = gpu_count()
needs_gpu = pytest.mark.skipif(GPUS == 0, reason="no CUDA device, or no CuPy")
needs_two = pytest.mark.skipif(GPUS < 2, reason="fewer than two CUDA devices")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def inputs(dtype="float32", layout="bhsd", batch=2):
    generator = np.random.default_rng(7)
    shapes = [(batch, 4, 5, 8), (batch, 2, 7, 8), (1, 2, 7, 16)]
    result = [generator.standard_normal(shape).astype(np.dtype(dtype)) for shape in shapes]
    return [np.ascontiguousarray(x.swapaxes(1, 2)) for x in result] if layout == "bshd" else result


def close(actual, expected, dtype="float32", factor=1):
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=factor * TOLERANCE[dtype] * scale)
