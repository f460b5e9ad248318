"""The corners of DLPack and of CuPy's homes: old producers, read-only memory, devices, lifetimes,
missing parts.

Small producers and a stand-in for CuPy take the place of real libraries, so all of it runs on every
machine.
"""

import gc
import sys
import types

import fake_cupy
import ml_dtypes
import numpy as np
import pytest
from interop import inputs

import cuflash
from cuflash import arrays, foreign

# A bare producer -------------------------------------------------------------------------------


class Producer:
    """An array library of one class: DLPack and nothing else."""

    def __init__(self, array, device=(1, 0), old=False, failure=None):
        self.array, self.device, self.old, self.failure = array, device, old, failure
        self.streams = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.failure is not None:
            raise self.failure
        if self.old and set(options) - {"stream"}:  # a producer from before DLPack 1.0
            raise TypeError("__dlpack__() got an unexpected keyword argument")
        self.streams.append(options.pop("stream", None))
        return self.array.__dlpack__(**options)

    def import_as_device_memory(self, stream):
        """What the stand-in for CuPy calls: its memory is the host's."""
        if self.failure is not None:
            raise self.failure
        self.streams.append(stream)
        return self.array


class NamedProducer(Producer):
    """One that also names its namespace, so that results can go back."""

    @staticmethod
    def from_dlpack(x):
        return NamedProducer(
            x.base if hasattr(x, "base") and not isinstance(x, np.ndarray) else np.from_dlpack(x)
        )

    def __array_namespace__(self):
        return types.SimpleNamespace(from_dlpack=self.from_dlpack)


@pytest.mark.parametrize("old", [False, True])
def test_producers_are_read(old):
    q, k, v = inputs()
    expected = cuflash.attention(q, k, v, causal=True)
    out = cuflash.attention(*(Producer(x, old=old) for x in (q, k, v)), causal=True)
    assert type(out) is np.ndarray
    np.testing.assert_array_equal(out, expected)


def test_results_go_back_through_the_namespace():
    producers = [NamedProducer(x) for x in inputs()]
    (out, lse), pullback = cuflash.attention_vjp(*producers, return_lse=True)
    assert type(out) is type(lse) is NamedProducer
    grads = pullback(out)
    (plain_out, plain_lse), plain = cuflash.attention_vjp(*inputs(), return_lse=True)
    np.testing.assert_array_equal(lse.array, plain_lse)
    for grad, want in zip(grads, plain(plain_out), strict=True):
        assert type(grad) is NamedProducer
        np.testing.assert_array_equal(grad.array, want)
    merged, _ = cuflash.merge([out, out], [lse, lse])
    assert type(merged) is NamedProducer


def test_strides_survive_the_protocol():
    q, k, v = inputs()
    wide = np.zeros((2, 4, 5, 16), np.float32)
    wide[..., ::2] = q
    for view in (wide[..., ::2], q[:, :, ::-1][:, :, ::-1], np.broadcast_to(q[:1], q.shape)):
        out = cuflash.attention(*(Producer(x) for x in (view, k, v)))
        np.testing.assert_array_equal(out, cuflash.attention(view.copy(), k, v))


def read_only(shape):
    array = np.zeros(shape, np.float32)
    array.flags.writeable = False
    return array


def test_a_writable_producer_as_out():
    out = Producer(np.zeros((2, 4, 5, 16), np.float32))
    assert cuflash.attention(*(Producer(x) for x in inputs()), out=out) is out
    np.testing.assert_array_equal(out.array, cuflash.attention(*inputs()))


@pytest.mark.parametrize(
    "out, parts",
    [
        (Producer(read_only((2, 4, 5, 16))), ["out", "read-only"]),
        (Producer(np.zeros((2, 4, 5, 16), np.float32), old=True), ["out", "older than DLPack 1.0"]),
    ],
    ids=["flagged", "no flags"],
)
def test_a_producer_that_may_not_be_written(out, parts):
    with pytest.raises(BufferError) as caught:
        cuflash.attention(*(Producer(x) for x in inputs()), out=out)
    for part in parts:
        assert part in str(caught.value)


def test_read_only_producers_can_be_read():
    q, k, v = inputs()
    for x in (q, k, v):
        x.flags.writeable = False
    np.testing.assert_array_equal(
        cuflash.attention(*(Producer(x) for x in (q, k, v))), cuflash.attention(q, k, v)
    )


BAD_PRODUCERS = [
    (
        Producer(np.zeros((2, 4, 5, 8), np.float32), device=(8, 0)),
        BufferError,
        ["k", "DLPack type 8"],
    ),
    (Producer(np.zeros(3), failure=ValueError("sparse")), BufferError, ["k", "sparse", "in place"]),
    (Producer(np.zeros((2, 2, 7, 8), ml_dtypes.bfloat16)), BufferError, ["k", "in place"]),
    (Producer(np.zeros((2, 2, 7, 8), np.int32)), TypeError, ["k", "int32", "bfloat16"]),
    (
        np.zeros((2, 2, 7, 8), np.float32),
        TypeError,
        ["k is a NumPy array", "one library", "silently"],
    ),
]


@pytest.mark.parametrize("k, kind, parts", BAD_PRODUCERS)
def test_producers_that_cannot_be_read(k, kind, parts):
    q, _, v = inputs()
    with pytest.raises(kind) as caught:
        cuflash.attention(Producer(q), k, Producer(v))
    for part in parts:
        assert part in str(caught.value)


def test_a_device_that_cannot_be_asked():
    class Broken(Producer):
        def __dlpack_device__(self):
            raise RuntimeError("nowhere")

    with pytest.raises(BufferError, match="q: .*nowhere"):
        cuflash.attention(*(Broken(x) for x in inputs()))


def test_device_arrays_without_dlpack_get_a_hint():
    other = type("DeviceArray", (), {"__cuda_array_interface__": {}})()
    with pytest.raises(TypeError, match="q is a .*DeviceArray.*cupy.asarray"):
        cuflash.attention(other, *inputs()[1:])


def test_the_read_only_flag_is_looked_up_in_the_capsule():
    array = np.zeros(3, np.float32)
    assert not foreign._is_read_only(Producer(array))
    assert not foreign._is_read_only(Producer(array, old=True))
    producer = Producer(read_only(3))
    assert foreign._is_read_only(producer)
    assert producer.streams == [-1]  # looking must not make any stream wait
    before = sys.getrefcount(array)
    for _ in range(100):
        foreign._is_read_only(Producer(array))
    gc.collect()
    assert sys.getrefcount(array) == before  # the capsules were released


# CuPy, by a stand-in ---------------------------------------------------------------------------


@pytest.fixture
def cupy(monkeypatch):
    with fake_cupy.installed(monkeypatch) as module:
        yield module


def on_device(cupy, device=0, **options):
    return [cupy.ndarray(None, base=x, device=device) for x in inputs(**options)]


def test_cupy_arrays_on_the_current_device(cupy):
    out, lse = cuflash.attention(*on_device(cupy), return_lse=True)
    assert type(out) is type(lse) is cupy.ndarray and out.data.device_id == 0
    assert cupy.log == [("forward", 0)]  # no device was entered for nothing
    np.testing.assert_array_equal(out.base, cuflash.attention(*inputs()))


def test_cupy_arrays_on_another_device(cupy):
    q, k, v = on_device(cupy, 1)
    (out, lse), pullback = cuflash.attention_vjp(q, k, v, return_lse=True)
    grads = pullback(out)
    assert cupy.log == [
        ("enter", 1),
        ("forward", 1),
        ("leave", 1),
        ("enter", 1),
        ("backward", 1),
        ("leave", 1),
    ]
    assert cupy.current == 0
    assert all(x.data.device_id == 1 for x in (out, lse, *grads))
    want = cuflash.attention_vjp(*inputs())
    for a, b in zip(grads, want[1](want[0]), strict=True):
        np.testing.assert_array_equal(a.base, b)
    with pytest.raises(ValueError, match="head_dim"):
        cuflash.attention(q, v, v)
    assert cupy.current == 0  # also after an error


def test_cupy_views_layout_and_broadcasting(cupy):
    q, k, v = on_device(cupy, layout="bshd")
    out, pullback = cuflash.attention_vjp(q, k, v, layout="bshd")
    want, want_pullback = cuflash.attention_vjp(*inputs(layout="bshd"), layout="bshd")
    np.testing.assert_array_equal(out.base, want)
    for a, b in zip(pullback(out), want_pullback(want), strict=True):
        np.testing.assert_array_equal(a.base, b)


def test_explain_and_merge_on_cupy(cupy):
    q, k, v = on_device(cupy)
    assert cuflash.explain(q, k, v) == "kernel for float32"
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    merged, _ = cuflash.merge([out], [lse])
    np.testing.assert_allclose(merged.base, out.base, rtol=1e-6)


def test_out_on_cupy(cupy):
    q, k, v = on_device(cupy)
    out = cupy.ndarray((2, 4, 5, 16), np.float32)
    assert cuflash.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out.base, cuflash.attention(*inputs()))
    with pytest.raises(ValueError, match="out shares memory with q"):
        cuflash.attention(q, q, q, out=q)
    with pytest.raises(ValueError, match="out: elements share memory"):
        cuflash.attention(q, q, q, out=cupy.broadcast_to(out[:1, :, :, :8], (2, 4, 5, 8)))
    pool = cupy.cuda.memory.PooledMemory
    out.data.mem, q.data.mem = pool(), pool()  # two pieces of the pool, others' memory beside them
    assert cuflash.attention(q, k, v, out=out) is out
    out.data.mem = q.data.mem
    assert cuflash.attention(q, k, v, out=out) is out
    with pytest.raises(ValueError, match="out shares memory with q"):
        cuflash.attention(q, q, q, out=q)
    packed = cupy.ndarray(None, base=np.zeros((5, 4, 4), np.float32))
    result = packed[:, 3]
    assert cuflash.attention(packed[:, 0], packed[:, 1], packed[:, 2], out=result) is result


def test_cupy_errors_of_home_and_device(cupy):
    q, k, v = on_device(cupy)
    with pytest.raises(ValueError, match="v is on CUDA device 1, but q is on CUDA device 0"):
        cuflash.attention(q, k, on_device(cupy, 1)[2])
    with pytest.raises(TypeError, match="k is a NumPy array, but q is a CuPy array"):
        cuflash.attention(q, inputs()[1], v)
    with pytest.raises(TypeError, match="k is a CuPy array, but q is a NumPy array"):
        cuflash.attention(inputs()[0], k, v)
    with pytest.raises(TypeError, match="out is a NumPy array"):
        cuflash.attention(q, k, v, out=np.zeros((2, 4, 5, 16), np.float32))
    with pytest.raises(ValueError, match=r"lse is on CUDA device 1, but dout is on CUDA device 0"):
        out = cuflash.attention(q, k, v)
        cuflash.attention_backward(out, q, k, v, out, cupy.ndarray((2, 4, 5), np.float32, device=1))
    assert cupy.log.count(("forward", 0)) == 1


def test_trivial_results_need_no_kernel(cupy):
    q, k, v = on_device(cupy)
    out, lse = cuflash.attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert (out.base == 0).all() and (lse.base == -np.inf).all()
    grads = cuflash.attention_backward(out, q, k[:, :, :0], v[:, :, :0], out, lse)
    assert (grads.dq.base == 0).all() and grads.dk.size == 0
    assert cupy.log == []


def test_no_memory(cupy, monkeypatch):
    arguments = on_device(cupy)

    def fail(shape, dtype):
        raise MemoryError("out of memory allocating 1,000 bytes")

    home = arrays.cupy_home(0)
    monkeypatch.setattr(home, "xp", types.SimpleNamespace(ndarray=fail))
    with pytest.raises(MemoryError, match=r"device 0 .*\(2, 4, 5, 16\).*float32.*1,000 bytes"):
        cuflash.attention(*arguments)
    assert cupy.log == []


@pytest.mark.parametrize(
    "prepare, kind, parts",
    [
        (dict(capability="70"), RuntimeError, ["device 0", "capability 7.0", "at least 7.5"]),
        (dict(devices=0), RuntimeError, ["no CUDA device"]),
    ],
)
def test_gpus_that_cannot_be_used(monkeypatch, prepare, kind, parts):
    with fake_cupy.installed(monkeypatch, **prepare) as cupy:
        for call in (
            lambda: cuflash.attention(*on_device(cupy)),
            lambda: cuflash.merge([on_device(cupy)[0]], []),
        ):
            with pytest.raises(kind) as caught:
                call()
            for part in parts:
                assert part in str(caught.value)


def test_sm_75_is_enough(monkeypatch):
    with fake_cupy.installed(monkeypatch, capability="75") as cupy:
        cuflash.attention(*on_device(cupy))


def test_no_driver(cupy, monkeypatch):
    def fail():
        raise RuntimeError("cudaErrorNoDevice")

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", fail)
    with pytest.raises(RuntimeError, match="no usable CUDA driver.*cudaErrorNoDevice"):
        cuflash.attention(*on_device(cupy))


def test_no_nvrtc(cupy, monkeypatch):
    def fail():
        raise RuntimeError("libnvrtc.so.13 not found")

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", fail)
    with pytest.raises(
        RuntimeError, match=r"NVRTC.*libnvrtc.so.13 not found.*cuflash\[cuda13\].*cuda12"
    ):
        cuflash.attention(*on_device(cupy))


# Producers on the GPU, by the same stand-in ----------------------------------------------------


def device_producers(kind=NamedProducer, device=(2, 1)):
    return [kind(x, device=device) for x in inputs()]


def test_device_producers_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    arrays.cupy_home.cache_clear()
    with pytest.raises(ImportError) as caught:
        cuflash.attention(*device_producers())
    for part in ("q is a ", "CUDA device 1", "CuPy", "cuflash[cuda13]", "cuflash[cuda12]"):
        assert part in str(caught.value)


def test_device_producers_are_waited_for_and_kept_alive(cupy):
    producers = device_producers()
    out = cuflash.attention(*producers)
    assert type(out) is NamedProducer
    np.testing.assert_array_equal(out.array, cuflash.attention(*inputs()))
    assert all(p.streams == [1] for p in producers)  # read once, for the stream that the work is on
    assert cupy.log == [("enter", 1), ("forward", 1), ("record", "current stream"), ("leave", 1)]
    (event,) = cupy.events
    assert len(foreign._pending) == 1
    cuflash.attention(*device_producers())
    assert len(foreign._pending) == 2  # the first call's work has not passed yet
    event.done = cupy.events[1].done = True
    cuflash.attention(*device_producers())
    assert len(foreign._pending) == 1 and foreign._pending[0][0] is cupy.events[2]


def test_nothing_is_recorded_while_a_graph_is_captured(cupy):
    cupy.capturing = True
    cuflash.attention(*device_producers())
    assert cupy.events == [] and len(foreign._pending) == 0


@pytest.mark.parametrize("memory", [2, 13])  # device memory and managed memory
def test_out_of_a_device_producer(cupy, memory):
    q, k, v = device_producers(device=(memory, 0))
    out = NamedProducer(np.zeros((2, 4, 5, 16), np.float32), device=(memory, 0))
    assert cuflash.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out.array, cuflash.attention(*inputs()))
    frozen = NamedProducer(read_only((2, 4, 5, 16)), device=(memory, 0))
    with pytest.raises(BufferError, match="out: .*read-only"):
        cuflash.attention(q, k, v, out=frozen)
    assert (frozen.array == 0).all()


def test_device_producers_on_several_devices(cupy):
    q, k, _ = device_producers()
    with pytest.raises(ValueError, match="v is on the CPU, but q is on CUDA device 1"):
        cuflash.attention(q, k, NamedProducer(inputs()[2]))
