"""Where a call's arrays live: a `Home` stands for one library on one device.

All arrays of a call share one home: there are no hidden transfers. NumPy and CuPy are here;
`foreign` has all else that speaks DLPack, and is loaded when such an array first arrives. CuPy is
never imported before a GPU array is there.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cached_property, lru_cache

import numpy as np

CPU = -1  # the device number of host memory
MIN_CAPABILITY = 75
INSTALL = "pip install 'cuflash[cuda13]' (or 'cuflash[cuda12]', whichever matches the driver)"

_NO_SCOPE = nullcontext()
_DTYPE_NAMES = {np.dtype(name): name for name in ("float16", "float32", "float64")}


def dtype_name(dtype) -> str:
    """The name of a native float, or NumPy's own text ('int64', '>f4')."""
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        # ml_dtypes registers bfloat16 with NumPy; its name needs no import here.
        if dtype.name != "bfloat16" or not dtype.isnative:
            return str(dtype)
        name = _DTYPE_NAMES[dtype] = "bfloat16"
    return name


class Home:
    """NumPy arrays, and the interface of every home."""

    kind = "NumPy"  # as messages print it
    device = CPU
    foreign = False  # whether arrays have to pass through `adopt` at all
    xp = np  # numpy or cupy: what `adopt` gives

    @property
    def inline(self) -> bool:
        """Whether `scope` may be skipped; only CuPy's home changes it from call to call."""
        return True

    @cached_property
    def backend(self):
        """The module with forward, backward and merge."""
        from . import cpu

        return cpu

    def scope(self):
        """Context with the right device and stream, for adopt, new and the work."""
        return _NO_SCOPE

    def adopt(self, name: str, x, writable: bool = False):
        """`x` as an array of `xp`, sharing its memory, or BufferError."""
        if writable and not x.flags.writeable:
            raise ValueError(f"{name}: the array is read-only, but results are written into it")
        return x if type(x) is np.ndarray else np.asarray(x)  # a memory map, say

    def new(self, shape, dtype):
        """An uninitialised C-contiguous array, and the handle that `finish` takes later."""
        array = np.empty(shape, dtype)
        return array, array

    def finish(self, handle):
        """The result in the caller's library."""
        return handle


class _CupyHome(Home):
    kind = "CuPy"

    def __init__(self, cupy, device: int):
        self.xp = cupy
        self.device = device
        self._current = cupy.cuda.runtime.getDevice

    @property
    def inline(self) -> bool:
        return self._current() == self.device

    @cached_property
    def backend(self):
        from . import launch

        return launch

    def scope(self):
        # With a device comes its current stream.
        return self.xp.cuda.Device(self.device)

    def adopt(self, name, x, writable=False):
        return x

    def new(self, shape, dtype):
        try:
            array = self.xp.ndarray(shape, dtype)
        except MemoryError as error:
            # CuPy's own class: programs catch it to free its pools.
            error.args = (
                f"no memory on CUDA device {self.device} for a result of shape {shape} and dtype "
                f"{dtype}: {error}",
            )
            raise
        return array, array


NUMPY = Home()


def home_of(items) -> Home:
    """The one home of all arrays of a call, from at least one (name, array)."""
    first = items[0][1]
    kind = type(first)
    if kind is np.ndarray:
        if all([type(x) is kind for _, x in items]):
            return NUMPY
    else:
        cupy = sys.modules.get("cupy")  # not imported: no argument can be one of its arrays
        if cupy is not None and kind is getattr(cupy, "ndarray", None):
            device = first.data.device_id
            if all([type(x) is kind and x.data.device_id == device for _, x in items]):
                return cupy_home(device)
    return _sort_out(items)


def _sort_out(items) -> Home:
    """home_of beyond its two common cases, and its complaints."""
    first_name, first = items[0]
    kind, device = _kind_and_device(first_name, first)
    for name, x in items[1:]:
        kind_x, device_x = _kind_and_device(name, x)
        if kind_x != kind:
            raise TypeError(
                f"{name} is a {kind_x} array, but {first_name} is a {kind} array: the arrays of "
                "one call must come from one library (nothing is transferred silently)"
            )
        if device_x != device:
            raise ValueError(
                f"{name} is on {_device_text(device_x)}, but {first_name} is on "
                f"{_device_text(device)}: the arrays of one call must be on one device"
            )
    if kind == "NumPy":
        return NUMPY
    if kind == "CuPy":
        return cupy_home(device)
    from . import foreign

    return foreign.home(kind, device, first_name, first)


def _kind_and_device(name: str, x) -> tuple[str, int]:
    if isinstance(x, np.ndarray):
        if isinstance(x, (np.ma.MaskedArray, getattr(np, "matrix", ()))):
            raise TypeError(
                f"{name} is a {type(x).__module__}.{type(x).__qualname__}, which has rules of its "
                "own that attention would ignore: pass a plain numpy.ndarray"
            )
        return "NumPy", CPU
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, getattr(cupy, "ndarray", ())):
        return "CuPy", x.data.device_id
    # The instance is asked: the class of values that JAX traces lacks the method.
    if hasattr(x, "__dlpack__") and not isinstance(x, (type, np.generic)):
        from . import foreign

        return foreign.kind_and_device(name, x)
    hint = ""
    if isinstance(x, (list, tuple, int, float, np.generic)):
        hint = "; numpy.asarray makes one"
    elif hasattr(type(x), "__cuda_array_interface__"):
        hint = "; cupy.asarray makes one without a copy"
    raise TypeError(
        f"{name} is a {type(x).__module__}.{type(x).__qualname__}, but it must be an array: "
        f"NumPy, CuPy, PyTorch, JAX or another that has __dlpack__{hint}"
    )


def _device_text(device: int) -> str:
    return "the CPU" if device == CPU else f"CUDA device {device}"


@lru_cache(maxsize=None)
def cupy_home(device: int) -> Home:
    """The home of CuPy arrays on one device, which is checked once."""
    cupy = require_cupy()
    check_device(cupy, device)
    return _CupyHome(cupy, device)


def require_cupy():
    """CuPy, with NVRTC, a driver and a GPU; ImportError or RuntimeError."""
    cupy = import_cupy()
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise RuntimeError(
            f"CuPy finds no usable CUDA driver: {error}. Install NVIDIA's driver, or update it"
        ) from error
    if count == 0:
        raise RuntimeError(
            "CuPy finds no CUDA device: NVIDIA's driver is there, but it shows no GPU to this "
            "process"
        )
    return cupy


def import_cupy():
    """CuPy with NVRTC, all that compiling needs; ImportError or RuntimeError."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"GPU attention needs CuPy, which cannot be imported ({error}): {INSTALL}"
        ) from error
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        raise RuntimeError(
            f"NVRTC, CUDA's run-time compiler, cannot be loaded ({error}): {INSTALL}"
        ) from error
    return cupy


def check_device(cupy, device: int) -> None:
    """RuntimeError for a GPU that is too old for the kernels."""
    capability = cupy.cuda.Device(device).compute_capability
    if int(capability) < MIN_CAPABILITY:
        raise RuntimeError(
            f"CUDA device {device} has compute capability {capability[:-1]}.{capability[-1]}, but "
            f"the kernels need at least {MIN_CAPABILITY // 10}.{MIN_CAPABILITY % 10} (Turing); "
            "NumPy arrays run on the CPU"
        )


def check_output(name: str, x, inputs) -> None:
    """x, to be written, must not share memory with itself or with (name, array) of inputs."""
    if x.size == 0:
        return
    low, high, separate = _reach(x.shape, x.strides, x.itemsize)
    if not separate:
        raise ValueError(
            f"{name}: elements share memory (shape {x.shape}, strides {x.strides}), but each "
            "result needs its own place"
        )
    if isinstance(x, np.ndarray):
        meeting = [item for item in inputs if np.may_share_memory(x, item[1])]
    else:
        start, memory = x.data.ptr, x.data.mem
        if type(memory) is sys.modules["cupy"].cuda.memory.PooledMemory:
            # Pieces that CuPy's pool has handed out do not overlap.
            inputs = [
                item for item in inputs
                if item[1].data.mem is memory or type(item[1].data.mem) is not type(memory)
            ]  # fmt: skip
        meeting = [item for item in inputs if _meets(item[1], start + low, start + high)]
    for other_name, other in meeting:
        if _share(x, other):
            raise ValueError(
                f"{name} shares memory with {other_name}, which is read while {name} is written: "
                "they must not overlap"
            )


@lru_cache(maxsize=4096)
def _reach(shape, strides, itemsize: int) -> tuple[int, int, bool]:
    """The first byte of an array and one past its last, from where it begins, and whether every
    element has bytes of its own.

    That is so when, sorted by stride, each axis steps over all that the smaller ones span: only
    as_strided can build a separate layout that does not, and it counts as shared.
    """
    axes = [(stride, size) for stride, size in zip(strides, shape) if size > 1]
    separate, span = True, itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in axes):
        separate &= stride >= span
        span += stride * (size - 1)
    low = sum(stride * (size - 1) for stride, size in axes if stride < 0)
    return low, low + span, separate


def _meets(y, low: int, high: int) -> bool:
    """Whether a CuPy array's range of addresses meets another one."""
    start = y.data.ptr
    first, end, _ = _reach(y.shape, y.strides, y.itemsize)
    return low < start + end and start + first < high


class _Addresses:
    """A CuPy array's addresses as a NumPy array: for calculations only, never dereferenced."""

    def __init__(self, x):
        self.__array_interface__ = {
            "version": 3,
            "data": (x.data.ptr, True),
            "shape": x.shape,
            "strides": x.strides,
            "typestr": f"|V{x.itemsize}",
        }


def _share(x, y) -> bool:
    """Whether two arrays really share a byte: interleaved parts of one buffer do not."""
    if not isinstance(x, np.ndarray):
        x, y = np.asarray(_Addresses(x)), np.asarray(_Addresses(y))
    try:
        # The exact answer can take exponential time; an unclear case counts as shared.
        return np.shares_memory(x, y, max_work=100_000)
    except np.exceptions.TooHardError:
        return True
