"""Arrays of PyTorch, JAX and whatever else has ``__dlpack__``, read and written in place as CuPy or
NumPy arrays.

- PyTorch: the work is put on PyTorch's current stream of the arrays' device and takes all its
  memory from PyTorch's allocator, so it can be captured in a `torch.cuda.graph`.
- JAX and others have no stream to join. Their memory is waited for as DLPack prescribes, the work
  runs on CuPy's current stream, and their arrays stay alive until that stream has passed it,
  because they may reuse memory the moment it is freed.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from . import arrays
from .checks import DTYPES

# DLPack's device codes (dlpack.h, DLDeviceType).
_HOST_CODES = (1, 3)  # kDLCPU, kDLCUDAHost
_CUDA_CODES = (2, 13)  # kDLCUDA, kDLCUDAManaged
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY


def kind_and_device(name: str, x) -> tuple[str, int]:
    """The library's name and the device number of an array that has ``__dlpack__``."""
    kind = _kind(name, x)
    try:
        code, device = x.__dlpack_device__()
    except Exception as error:
        raise BufferError(
            f"{name}: the {kind} array cannot be read through DLPack: {error}"
        ) from error
    if int(code) in _HOST_CODES:
        return kind, arrays.CPU
    if int(code) in _CUDA_CODES:
        return kind, int(device)
    raise BufferError(
        f"{name}: the {kind} array is on a device of DLPack type {int(code)}, but it must be on "
        "the CPU (1) or a CUDA device (2)"
    )


def home(kind: str, device: int, name: str, first) -> arrays.Home:
    """The home of arrays for which kind_and_device gave this kind and device."""
    cupy = None
    if device != arrays.CPU:
        try:
            cupy = arrays.cupy_home(device).xp
        except (ImportError, RuntimeError) as error:
            text = f"{name} is a {kind} array on CUDA device {device}: {error}"
            raise (ImportError if isinstance(error, ImportError) else RuntimeError)(text) from error
    if kind == "PyTorch":
        return _TorchHome(sys.modules["torch"], cupy, device)
    if kind == "JAX":
        return _JaxHome(sys.modules["jax"], cupy, device, first)
    return _DlpackHome(kind, cupy, device, first)


def _kind(name: str, x) -> str:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, getattr(torch, "Tensor", ())):
        return "PyTorch"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, getattr(jax, "Array", ())):
        if isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"{name} is a value that JAX is tracing (jit, grad or vmap), but attention needs "
                "concrete arrays: call it outside, or through jax.pure_callback"
            )
        if x.is_deleted():
            raise BufferError(
                f"{name} is a JAX array that was deleted or donated: it has no memory"
            )
        return "JAX"
    return type(x).__module__.partition(".")[0]


class _Foreign(arrays.Home):
    foreign = True

    def __init__(self, kind: str, cupy, device: int):
        self.kind = kind
        self.device = device
        self.xp = np if cupy is None else cupy

    @property
    def on_gpu(self) -> bool:
        return self.device != arrays.CPU

    @property
    def inline(self) -> bool:
        return not self.on_gpu

    @property
    def backend(self):
        return (arrays.cupy_home(self.device) if self.on_gpu else arrays.NUMPY).backend

    def _guarded(self, name: str, x, read):
        """read(x); whatever the other library raises becomes a BufferError with the name."""
        dtype = str(getattr(x, "dtype", "unknown")).rpartition(".")[2]
        if dtype.startswith(("int", "uint", "bool", "complex", "float8", "float4")):
            raise TypeError(
                f"{name}: its dtype is {dtype}, but it must be one of {', '.join(DTYPES)}"
            )
        try:
            return read(x)
        except (ImportError, MemoryError):
            raise
        except Exception as error:
            raise BufferError(
                f"{name}: the {self.kind} array cannot be read in place: {error}"
            ) from error


class _SameStream:
    """A tensor for a consumer on the tensor's own stream: PyTorch then records no event."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **options):
        return self._tensor.__dlpack__(stream=-1, **options)


class _TorchHome(_Foreign):
    def __init__(self, torch, cupy, device):
        super().__init__("PyTorch", cupy, device)
        self._torch = torch
        self._device = torch.device("cpu") if cupy is None else torch.device("cuda", device)

    @contextmanager
    def scope(self):
        if not self.on_gpu:
            yield
            return
        cuda = self.xp.cuda
        with cuda.Device(self.device):
            pointer = self._torch.cuda.current_stream(self.device).cuda_stream
            with _stream(cuda, pointer, self.device), cuda.using_allocator(self._allocate):
                yield

    def adopt(self, name, x, writable=False):
        if x.requires_grad:
            raise BufferError(
                f"{name} requires grad, but attention does not record operations for autograd: "
                f"pass {name}.detach(), and take gradients from attention_vjp"
            )
        if x.is_neg():
            raise BufferError(f"{name} is a lazily negated view: pass {name}.resolve_neg()")
        return self._guarded(name, x, self._read)

    def _read(self, x):
        if self.on_gpu:
            return self.xp.from_dlpack(_SameStream(x))
        if x.dtype == self._torch.bfloat16:
            # NumPy's DLPack and buffer protocols have no bfloat16.
            return x.view(self._torch.int16).numpy().view(_bfloat16())
        return x.numpy()

    def new(self, shape, dtype):
        # For PyTorch's streams, graphs and allocator a tensor like any other.
        tensor = self._torch.empty(
            shape, dtype=getattr(self._torch, arrays.dtype_name(dtype)), device=self._device
        )
        return self._read(tensor), tensor

    def _allocate(self, size: int):
        block = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
        memory = self.xp.cuda.UnownedMemory(block.data_ptr(), size, block, self.device)
        return self.xp.cuda.MemoryPointer(memory, 0)


class _DlpackHome(_Foreign):
    """Any library: results go back through the from_dlpack of its namespace, if it has one."""

    def __init__(self, kind, cupy, device, first):
        super().__init__(kind, cupy, device)
        namespace = getattr(first, "__array_namespace__", None)
        self._from_dlpack = namespace and getattr(namespace(), "from_dlpack", None)
        self._read_arrays = []

    @contextmanager
    def scope(self):
        if not self.on_gpu:
            yield
            return
        with self.xp.cuda.Device(self.device):
            _release_passed()
            try:
                yield
            finally:
                _keep_until_passed(self.xp, self._read_arrays)

    def adopt(self, name, x, writable=False):
        if writable:
            return self._adopt_output(name, x)
        array = self._guarded(name, x, self._read)
        self._read_arrays.append(array)
        return array

    def _read(self, x):
        return self.xp.from_dlpack(x)

    def _adopt_output(self, name, x):
        rule = "results are written into it"
        if self.on_gpu:
            # CuPy ignores the flag, so it is looked up first.
            if self._guarded(name, x, _is_read_only):
                raise BufferError(
                    f"{name}: the {self.kind} array is exported as read-only, but {rule}"
                )
            return self.adopt(name, x)
        array = self._guarded(name, x, _from_dlpack_without_copy)
        if not array.flags.writeable:
            raise BufferError(
                f"{name}: the {self.kind} array is exported as read-only, or by a protocol older "
                f"than DLPack 1.0 that cannot say, but {rule}"
            )
        return array

    def new(self, shape, dtype):
        array = self.xp.empty(shape, dtype)
        return array, array

    def finish(self, handle):
        if self._from_dlpack is None:
            return handle
        return self._from_dlpack(handle)


class _JaxHome(_DlpackHome):
    def __init__(self, jax, cupy, device, first):
        super().__init__("JAX", cupy, device, first)
        self._jax = jax
        self._devices = first.devices()

    def _read(self, x):
        # The array interface shares the memory as DLPack would, and knows bfloat16.
        return self.xp.from_dlpack(x) if self.on_gpu else np.asarray(x)

    def _adopt_output(self, name, x):
        raise BufferError(
            f"{name} is a JAX array, which is immutable, but results are written into it: call "
            f"without {name}="
        )

    def finish(self, handle):
        if not self.on_gpu and arrays.dtype_name(handle.dtype) == "bfloat16":
            result = handle  # NumPy cannot export bfloat16
        else:
            result = self._jax.dlpack.from_dlpack(handle)
            if result.devices() == self._devices:
                return result
        # Or one of several host devices: DLPack knows only "the CPU".
        return self._jax.device_put(result, next(iter(self._devices)))


def _bfloat16():
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(
            "bfloat16 arrays on the CPU need the package ml_dtypes: pip install ml_dtypes"
        ) from error
    return np.dtype(ml_dtypes.bfloat16)


class _StreamPointer:
    """A stream in the form that CuPy's Stream.from_external takes."""

    def __init__(self, pointer: int):
        self._pointer = pointer

    def __cuda_stream__(self):
        return 0, self._pointer  # version of the protocol, address


@lru_cache(maxsize=256)
def _stream(cuda, pointer: int, device: int):
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_StreamPointer(pointer))
    return cuda.ExternalStream(pointer, device)  # CuPy 13


_pending: deque = deque()  # (event, arrays that must live until it has passed)
_pending_lock = threading.Lock()


def _keep_until_passed(cupy, read_arrays) -> None:
    """Keep arrays until the current stream has passed this point; nothing waits here."""
    stream = cupy.cuda.get_current_stream()
    if not read_arrays or stream.is_capturing():  # the owner of a graph keeps what the graph reads
        return
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    with _pending_lock:
        _pending.append((event, read_arrays))


def _release_passed() -> None:
    passed = []
    with _pending_lock:
        while _pending and _pending[0][0].done:
            passed.append(_pending.popleft())
    del passed  # outside the lock: freeing runs the other library's code


def _from_dlpack_without_copy(x):
    try:
        return np.from_dlpack(x, copy=False)
    except TypeError:  # the producer is older than these keywords, and copies nothing on its own
        return np.from_dlpack(x)


class _Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class _ManagedTensorHead(ctypes.Structure):
    """The start of dlpack.h's DLManagedTensorVersioned, up to the flags."""

    _fields_ = [
        ("version", _Version),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    ]


def _is_read_only(x) -> bool:
    """The read-only flag of an array's DLPack capsule; False before version 1.0, which has none.

    The capsule is dropped, which releases it by its own destructor.
    """
    try:
        capsule = x.__dlpack__(stream=-1, max_version=(1, 0))  # -1: nothing is waited for
    except TypeError:  # the producer is older than this keyword, and so are its capsules
        return False
    valid = ctypes.pythonapi.PyCapsule_IsValid
    valid.restype, valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
    if not valid(capsule, b"dltensor_versioned"):
        return False
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    head = _ManagedTensorHead.from_address(pointer(capsule, b"dltensor_versioned"))
    return bool(head.flags & _READ_ONLY)
