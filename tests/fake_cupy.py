"""A stand-in for CuPy on machines without a GPU: host arrays that claim to be on a device.

It has just what `cuflash.arrays`, `cuflash.foreign` and `cuflash.edge` use, and records what they
ask of it, so that devices, contexts, events and errors can be tested anywhere. The kernels' place
is taken by the NumPy path.
"""

import contextlib
import types

import numpy as np

from cuflash import cpu


def build(devices=2, capability="90"):
    """The module; its `log` has what happened, in order, and `current` the current device."""
    cupy = types.ModuleType("cupy")
    cupy.current, cupy.log, cupy.capturing = 0, [], False

    class ndarray:
        def __init__(self, shape, dtype=float, base=None, device=None):
            self.base = np.full(shape, np.nan, dtype) if base is None else base
            pointer = self.base.__array_interface__["data"][0]
            device = cupy.current if device is None else device
            self.data = types.SimpleNamespace(device_id=device, ptr=pointer, mem=None)

        def view_of(self, base):
            return ndarray(None, base=base, device=self.data.device_id)

        def __getattr__(self, name):
            if name not in (
                "shape",
                "dtype",
                "ndim",
                "size",
                "strides",
                "itemsize",
                "nbytes",
                "flags",
                "fill",
            ):
                raise AttributeError(name)
            return getattr(self.base, name)

        def reshape(self, shape):
            return self.view_of(self.base.reshape(shape))

        def swapaxes(self, a, b):
            return self.view_of(self.base.swapaxes(a, b))

        def sum(self, **options):
            return self.view_of(self.base.sum(**options))

        def __getitem__(self, key):
            return self.view_of(self.base[key])

        def __setitem__(self, key, value):
            self.base[key] = value.base

    class Device:
        def __init__(self, number):
            self.number, self.compute_capability = number, capability

        def __enter__(self):
            self.previous, cupy.current = cupy.current, self.number
            cupy.log.append(("enter", self.number))

        def __exit__(self, *_):
            cupy.current = self.previous
            cupy.log.append(("leave", self.number))

    class Event:
        def __init__(self, disable_timing):
            self.done = False
            cupy.events.append(self)

        def record(self, stream):
            cupy.log.append(("record", stream.name))

    cupy.events = []
    stream = types.SimpleNamespace(name="current stream", is_capturing=lambda: cupy.capturing)
    cupy.ndarray = ndarray
    cupy.empty = ndarray
    cupy.broadcast_to = lambda x, shape: x.view_of(np.broadcast_to(x.base, shape))
    # A capsule of host memory: the fake cannot check the stream, so the producers of the tests do.
    cupy.from_dlpack = lambda x: ndarray(None, base=x.import_as_device_memory(stream=1))
    cupy.cuda = types.ModuleType("cupy.cuda")
    cupy.cuda.Device, cupy.cuda.Event = Device, Event
    cupy.cuda.memory = types.SimpleNamespace(PooledMemory=type("PooledMemory", (), {}))
    cupy.cuda.get_current_stream = lambda: stream
    cupy.cuda.nvrtc = types.ModuleType("cupy.cuda.nvrtc")
    cupy.cuda.nvrtc.getVersion = lambda: (13, 0)
    cupy.cuda.runtime = types.SimpleNamespace(
        getDevice=lambda: cupy.current, getDeviceCount=lambda: devices
    )
    return cupy


def build_launch(cupy):
    """A stand-in for cuflash.launch that computes with the NumPy path."""
    launch = types.ModuleType("cuflash.launch")

    def plain(x):
        return x.base if isinstance(x, cupy.ndarray) else x

    def forward(problem, *arrays):
        cupy.log.append(("forward", cupy.current))
        cpu.forward(problem, *map(plain, arrays))

    def backward(problem, *arguments):
        cupy.log.append(("backward", cupy.current))
        cpu.backward(problem, *map(plain, arguments))

    def merge(outs, lses, out, lse):
        cpu.merge(list(map(plain, outs)), list(map(plain, lses)), out.base, lse.base)

    launch.forward, launch.backward, launch.merge = forward, backward, merge
    launch.explain = lambda problem, q, k, v: f"kernel for {problem.dtype}"
    return launch


@contextlib.contextmanager
def installed(monkeypatch, **options):
    """Put both in place of the real modules."""
    import sys

    import cuflash
    from cuflash import arrays, foreign

    cupy = build(**options)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.setitem(sys.modules, "cupy.cuda.nvrtc", cupy.cuda.nvrtc)
    launch = build_launch(cupy)
    monkeypatch.setitem(sys.modules, "cuflash.launch", launch)
    monkeypatch.setattr(cuflash, "launch", launch, raising=False)
    arrays.cupy_home.cache_clear()
    foreign._pending.clear()
    try:
        yield cupy
    finally:
        arrays.cupy_home.cache_clear()
        foreign._pending.clear()
