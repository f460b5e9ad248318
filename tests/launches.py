"""The modules that need CuPy, without it: host arrays stand in CuPy's place, and what would be
launched is kept to be looked at.
"""

import ctypes
import importlib
import re
import struct
import sys

import fake_cupy
import numpy as np
import pytest
from conftest import np_dtype
from test_plan import HOPPER

import cuflash
from cuflash import arrays, jit, params, tensormap
from cuflash.families import portable

TILE = portable.Tile(64, 64, 4, 1)  # asks for the portable family
_MODULES = (
    "launch_steps", "launch_block_map", "launch_mask_bits", "launch_backward", "launch",
    "launch_packed",
)  # fmt: skip


@pytest.fixture(scope="module")
def gpu_side():
    """(cupy, launch_steps, launch): the modules that need CuPy, on host arrays in its place. What
    they launch is appended to ``launch.log`` as (plan, blocks, fields by name).
    """
    patch = pytest.MonkeyPatch()
    cupy = fake_cupy.build()
    cupy.zeros = lambda size, dtype: cupy.ndarray(None, base=np.zeros(size, dtype))
    cupy.cuda.alloc = lambda size: _Counter(cupy)
    patch.setitem(sys.modules, "cupy", cupy)
    before = {name: getattr(cuflash, name) for name in _MODULES if hasattr(cuflash, name)}
    for name in _MODULES:
        patch.delitem(sys.modules, f"cuflash.{name}", raising=False)
    found = [importlib.import_module(f"cuflash.{name}") for name in _MODULES]
    steps, _, _, backward, launch, _ = found
    steps.device_facts = lambda device_id: HOPPER
    cupy.stream_number = 0
    steps.stream_id = lambda stream: cupy.stream_number
    launch.log = []

    def kernel(plan, device_id):
        def function(device, blocks, address):
            assert device == device_id
            launch.log.append((plan, blocks, fields_of(plan, address)))

        return function

    patch.setattr(jit, "kernel", kernel)
    patch.setattr(jit, "attributes", lambda function: {"registers": 128, "local_bytes": 0})
    patch.setattr(tensormap, "missing", lambda: None)
    patch.setattr(launch, "Encoder", Encoder)
    patch.setattr(backward, "Encoder", Encoder)
    yield cupy, steps, launch
    patch.undo()
    for name in _MODULES:
        sys.modules.pop(f"cuflash.{name}", None)
        if hasattr(cuflash, name):
            delattr(cuflash, name)
    for name, module in before.items():
        setattr(cuflash, name, module)
        sys.modules[f"cuflash.{name}"] = module


@pytest.fixture
def on_host(gpu_side, monkeypatch):
    """(cupy, launch) of `gpu_side`, where the public functions find them, too."""
    cupy, _, launch = gpu_side
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nvrtc", cupy.cuda.nvrtc)
    arrays.cupy_home.cache_clear()
    yield cupy, launch
    arrays.cupy_home.cache_clear()


class Encoder:
    """In place of tensor maps: text that says what is described."""

    made = 0

    def __init__(self, array, rows):
        self.text = f"{array.shape} {array.strides} {rows} rows from "

    def map(self, pointer):
        Encoder.made += 1
        return (self.text + str(pointer)).encode().ljust(128)


def mapped(tensor_map):
    """What Encoder was asked to describe: (shape, strides, where it begins)."""
    found = re.fullmatch(r"(\(.*?\)) (\(.*?\)) \d+ rows from (\d+) *\0*", tensor_map.decode())
    shape, strides, start = found.groups()
    return eval(shape), eval(strides), int(start)


class _Counter:
    """Memory of the device that is set to zero."""

    def __init__(self, cupy):
        self._cupy, self.ptr = cupy, 0

    def memset_async(self, value, size):
        assert (value, size) == (0, 4)
        self.ptr = 0xC0FFEE00
        self._cupy.log.append("zeroed")


def fields_of(plan, address):
    """The struct that a launch would pass, as {name: value}; lists for strides and sizes."""
    rows = params.rows(plan.params, plan.operands)
    code = "@" + "".join(params.KINDS[kind][1] for _, kind in rows) + "0q"
    (place,) = struct.unpack("P", ctypes.string_at(address, 8))
    values = list(struct.unpack(code, ctypes.string_at(place, struct.calcsize(code))))
    fields = {}
    for name, kind in rows:
        count = params.KINDS[kind][2]
        fields[name] = values[:count] if count > 1 else values[0]
        del values[:count]
    return fields


def arrays_of(cupy, problem, batch=None):
    """Contiguous q, k, v, out and lse."""
    dtype, batch = np_dtype(problem.dtype), problem.batch if batch is None else batch
    heads, kv_heads = problem.num_heads, problem.num_kv_heads
    shapes = [
        (heads, problem.seqlen_q, problem.head_dim),
        (kv_heads, problem.seqlen_k, problem.head_dim),
        (kv_heads, problem.seqlen_k, problem.head_dim_v),
        (heads, problem.seqlen_q, problem.head_dim_v),
    ]
    arrays = [cupy.ndarray((*batch, *shape), dtype) for shape in shapes]
    return [*arrays, cupy.ndarray((*batch, heads, problem.seqlen_q), np.dtype(problem.lse_dtype))]
