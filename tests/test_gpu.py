"""What only a GPU can show: memory, streams, graphs, threads, 64-bit sizes, foreign arrays."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest
import sanitize_cases
from conftest import CUPY, np_dtype
from dense import Oracle, check_backward, check_forward
from running import check, differentiate, same_bits, to_numpy
from strategies import DTYPES, Case

import cuflash

pytestmark = pytest.mark.skipif(CUPY is None, reason="needs a GPU")
GIB = 2**30

TYPICAL = tuple(
    Case(*lengths, 64, 64, 4, 2, (2,), (2,), (2,), dtype=dtype, causal=causal)
    for dtype in DTYPES
    for lengths, causal in (((65, 130), True), ((200, 70), False))
)


def on_device(gpu, case):
    return {name: gpu.to_home(a) for name, a in case.arrays().items()}


def run(case, arrays, out=None, deterministic=True):
    """Forward and backward on device arrays, without synchronising."""
    qkv = [arrays[n] for n in "qkv"]
    out, lse = cuflash.attention(*qkv, out=out, return_lse=True, **case.options)
    grads = cuflash.attention_backward(
        arrays["dout"],
        *qkv,
        out,
        lse,
        dlse=arrays["dlse"],
        deterministic=deterministic,
        **case.options,
    )
    return (out, lse, *grads[:3])


def need_memory(gpu, size):
    gpu.xp.get_default_memory_pool().free_all_blocks()
    free = gpu.xp.cuda.runtime.memGetInfo()[0]
    if free < size:
        pytest.skip(f"needs {size / GIB:.0f} GiB of free GPU memory, {free / GIB:.0f} GiB are free")


@contextlib.contextmanager
def released(gpu):
    """Give large blocks back at the end, so one test's memory is not the next one's."""
    try:
        yield
    finally:
        gpu.xp.get_default_memory_pool().free_all_blocks()


# Memory


def poison(gpu, case):
    """Leave NaN in every block the memory pool may hand out next: sizes of the results and
    workspaces, and below.
    """
    pool = gpu.xp.get_default_memory_pool()
    pool.free_all_blocks()
    blocks = [gpu.xp.full(2**n, 0xFF, dtype=np.uint8) for n in range(9, 25) for _ in range(8)]
    blocks += [
        gpu.xp.full(gpu.to_home(a).nbytes, 0xFF, dtype=np.uint8)
        for a in case.arrays().values()
        for _ in range(8)
    ]
    del blocks


@pytest.mark.parametrize("deterministic", (True, False))
@pytest.mark.parametrize("case", TYPICAL, ids=repr)
def test_poisoned_memory(gpu, case, deterministic):
    """Outputs and workspaces made of NaN-filled memory: nothing unwritten is returned or summed
    (bug 25, 91, 95).
    """
    arrays = on_device(gpu, case)
    oracle = Oracle(case, *(case.arrays()[n] for n in ("q", "k", "v", "dout", "dlse")))
    for _ in range(2):
        poison(gpu, case)
        results = to_numpy(gpu, run(case, arrays, deterministic=deterministic))
        check_forward(oracle, *results[:2])
        check_backward(oracle, results[2:])


def test_memory_without_a_pool(gpu):
    """With plain cudaMalloc and cudaFree no workspace is used after it is freed (bug 197)."""
    case = TYPICAL[0]
    want = differentiate(gpu, case, case.arrays())
    xp = gpu.xp
    xp.cuda.set_allocator(None)
    try:
        for _ in range(3):
            same_bits(*zip(differentiate(gpu, case, case.arrays()), want))
    finally:
        xp.cuda.set_allocator(xp.get_default_memory_pool().malloc)


def test_out_of_memory_is_an_error_and_leaves_the_library_usable(gpu):
    xp, case = gpu.xp, TYPICAL[0]
    arrays = on_device(gpu, case)
    want = to_numpy(gpu, run(case, arrays))
    limited = xp.cuda.MemoryPool()
    limited.set_limit(size=1024)
    with xp.cuda.using_allocator(limited.malloc), pytest.raises(MemoryError):
        run(case, arrays)
    same_bits(*zip(to_numpy(gpu, run(case, arrays)), want))


# Streams, devices, threads, graphs (C12)


def slow_copy(gpu, target, source, work):
    """On the current stream: something long, then the copy. Whoever does not wait reads what was
    there before.
    """
    for _ in range(20):
        work @ work
    target[...] = source


def test_work_follows_the_current_stream(gpu):
    """Inputs written late on a non-blocking stream are read after that; the result is ready on it
    (bug 207, 209).
    """
    xp, case = gpu.xp, TYPICAL[0]
    ready = on_device(gpu, case)
    want = to_numpy(gpu, run(case, ready))
    late = {name: xp.full_like(a, np.nan) for name, a in ready.items()}
    work = xp.ones((4096, 4096), np.float32)
    stream = xp.cuda.Stream(non_blocking=True)
    with (
        stream
    ):  # once before, so that the stream has its memory and nothing is loaded while it is watched
        slow_copy(gpu, late["q"], late["q"], work)
        run(case, ready)
    xp.cuda.Device().synchronize()
    with stream:
        for name in late:
            slow_copy(gpu, late[name], ready[name], work)
        results = run(case, late)
        assert not stream.done, "attention waited for the stream"
        results = to_numpy(gpu, results)
    same_bits(*zip(results, want))


def test_other_current_device(gpu):
    """Work runs where the arrays are, and the current device is as before (bug 203)."""
    xp, case = gpu.xp, TYPICAL[0]
    if xp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    want = differentiate(gpu, case, case.arrays())
    with xp.cuda.Device(1):
        arrays = on_device(gpu, case)
    with xp.cuda.Device(0):
        results = run(case, arrays)
        assert xp.cuda.Device().id == 0
        assert all(a.device.id == 1 for a in results)
        mixed = [on_device(gpu, case)["q"], arrays["k"], arrays["v"]]
        with pytest.raises(ValueError, match="device"):
            cuflash.attention(*mixed)
    with xp.cuda.Device(1):
        same_bits(*zip(to_numpy(gpu, results), want))


def test_current_device_and_stream_are_restored(gpu):
    xp, case = gpu.xp, TYPICAL[0]
    with xp.cuda.Stream(non_blocking=True) as stream:
        run(case, on_device(gpu, case))
        assert xp.cuda.get_current_stream() == stream
        stream.synchronize()
    assert xp.cuda.get_current_stream() == xp.cuda.Stream.null


@pytest.mark.parametrize("fresh", (False, True), ids=("warm", "other facts each"))
def test_threads(gpu, fresh):
    """Four threads with streams of their own, many calls each, on known and on new shapes (bug
    205).
    """
    xp, repeats = gpu.xp, 100
    cases = [
        Case(33 + 7 * n, 65 + n, 32 + 8 * n if fresh else 64, 64, 2, 1, dtype="float16", seed=n)
        for n in range(4)
    ]
    oracles = [Oracle(c, *(c.arrays()[n] for n in ("q", "k", "v", "dout", "dlse"))) for c in cases]
    errors, gate = [], threading.Barrier(4)

    def worker(case, oracle):
        try:
            with xp.cuda.Stream(non_blocking=True):
                arrays = on_device(gpu, case)
                gate.wait()
                first = to_numpy(gpu, run(case, arrays))
                check_forward(oracle, *first[:2])
                check_backward(oracle, first[2:])
                for _ in range(repeats):
                    last = run(case, arrays)
                same_bits(*zip(to_numpy(gpu, last), first))
        except BaseException as error:
            errors.append(error)
            gate.abort()

    threads = [threading.Thread(target=worker, args=pair) for pair in zip(cases, oracles)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    "case",
    (
        TYPICAL[0],
        Case(1, 1025, 64, 64, dtype="float16"),
        Case(130, 1025, 64, 64, 8, 1, dtype="bfloat16", window=(128, 0)),
    ),
    ids=repr,
)
@pytest.mark.parametrize("deterministic", (True, False))
def test_cuda_graph(gpu, case, deterministic):
    """Captured once, replayed on new data: a warm call neither synchronises nor compiles (bug 213,
    215).
    """
    xp = gpu.xp
    second = {n: gpu.to_home(a) for n, a in replace(case, seed=7).arrays().items()}
    want = to_numpy(gpu, run(case, second))
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        arrays = on_device(gpu, case)
        out = xp.empty_like(arrays["dout"])
        run(case, arrays, out, deterministic)
        stream.synchronize()
        stream.begin_capture()
        results = run(case, arrays, out, deterministic)
        graph = stream.end_capture()
        for name, array in arrays.items():
            array[...] = second[name]
        for result in results:
            result.view(f"u{result.itemsize}").fill(0)
        graph.launch(stream)
        got = to_numpy(gpu, results)
    if deterministic:
        same_bits(*zip(got, want))
    else:
        oracle = Oracle(case, *(gpu.asnumpy(second[n]) for n in ("q", "k", "v", "dout", "dlse")))
        check_forward(oracle, *got[:2])
        check_backward(oracle, got[2:])


def test_races_do_not_show_in_repeats(gpu):
    """Fifty repeats of a long backward give the same bits (bug 189)."""
    case = Case(2048, 128, 128, 128, batch_q=(30,), batch_k=(30,), batch_v=(30,), dtype="float16")
    arrays = on_device(gpu, case)
    first = run(case, arrays)
    for _ in range(50):
        for got, want in zip(run(case, arrays), first):
            bits = f"u{want.itemsize}"
            assert bool((got.view(bits) == want.view(bits)).all())


# Sizes and strides beyond 32 bits (C9)


def spread(gpu, arrays, name, axis_stride, axis):
    """An array whose axis has a huge stride, as a view of one large buffer; only the rows it names
    are touched.
    """
    xp, values = gpu.xp, arrays[name]
    span = (values.shape[axis] - 1) * axis_stride + values.nbytes // values.itemsize + 64
    buffer = xp.empty(span, f"u{values.itemsize}")
    strides = list(values.strides)
    strides[axis] = axis_stride * values.itemsize
    view = xp.lib.stride_tricks.as_strided(buffer, values.shape, strides)
    view[...] = gpu.to_home(values).view(buffer.dtype)
    return view.view(values.dtype)


@pytest.mark.parametrize("axis", (-2, -3, -4), ids=("row", "head", "batch"))
@pytest.mark.parametrize("name", ("q", "k", "v", "dout", "out"))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_strides_beyond_32_bits(gpu, name, axis, dtype):
    """Entries that lie more than 2**31 elements apart (bug 153, 161)."""
    case = Case(2, 2, 64, 64, 2, 2, (2,), (2,), (2,), dtype=dtype)
    stride = 2**31 + 8
    need_memory(gpu, (stride + GIB // 4) * np_dtype(dtype).itemsize)
    with released(gpu):
        values = case.arrays()
        arrays = {n: gpu.to_home(a) for n, a in values.items()}
        out = None
        if name == "out":
            out = spread(gpu, {"out": values["dout"]}, "out", stride, axis)
        else:
            arrays[name] = spread(gpu, values, name, stride, axis)
        results = to_numpy(gpu, run(case, arrays, out))
        del arrays, out
    oracle = Oracle(case, *(values[n] for n in ("q", "k", "v", "dout", "dlse")))
    check_forward(oracle, *results[:2])
    check_backward(oracle, results[2:])


def check_last_heads(gpu, shape, heads, **options):
    """A problem of many elements: its last heads against the same heads on their own."""
    xp = gpu.xp
    rng = xp.random.default_rng(0)
    q, k, v, dout = (xp.empty(shape, np.float16) for _ in range(4))
    for array in (q, k, v, dout):
        flat = array.reshape(-1)
        for first in range(0, flat.size, 2**27):
            part = flat[first : first + 2**27]
            part[...] = rng.standard_normal(part.size, dtype=np.float32).astype(np.float16)
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    grads = cuflash.attention_backward(dout, q, k, v, out, lse, **options)
    for at in heads:
        inputs = [a[at][None] for a in (q, k, v, dout)]
        case = Case(shape[-2], shape[-2], shape[-1], shape[-1], dtype="float16", **options)
        want = differentiate(
            gpu, case, dict(zip(("q", "k", "v", "dout"), map(gpu.asnumpy, inputs))), dlse=False
        )
        same_bits(
            *((gpu.asnumpy(got[at]), alone[0]) for got, alone in zip((out, lse, *grads[:3]), want))
        )


@pytest.mark.parametrize(
    "shape, options",
    (
        ((1600, 16, 729, 72), {}),  # below 2**31 elements until the length is rounded up (bug 151)
        ((65536, 8, 64, 64), {}),  # beyond 65535 batches and 2**31 elements (bug 157, 161, 163)
        ((1, 48, 262144, 128), dict(causal=True, window=(64, 0))),  # long and wide (bug 155)
    ),
    ids=str,
)
def test_arrays_beyond_32_bits(gpu, shape, options):
    need_memory(gpu, 12 * 2 * int(np.prod(shape, dtype=np.int64)) + 4 * GIB)
    with released(gpu):
        check_last_heads(gpu, shape, ((0, 0), (shape[0] // 2, 1), (-1, -1)), **options)


def test_one_row_of_many_batches(gpu):
    """65536 and more batches of one row: every output is written (bug 165)."""
    case = Case(1, 3, 8, 8, batch_q=(70000,), batch_k=(70000,), batch_v=(70000,), dtype="float16")
    poison(gpu, case)
    check(gpu, case)


# Other libraries' arrays on the GPU, zero-copy


def torch_cuda():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    return torch.from_dlpack, lambda a: CUPY.xp.from_dlpack(a), torch.Tensor


def jax_cuda():
    jax = pytest.importorskip("jax")
    pytest.importorskip("jax.dlpack")
    try:
        jax.devices("cuda")
    except RuntimeError:
        pytest.skip("this JAX has no CUDA")
    return jax.dlpack.from_dlpack, lambda a: CUPY.xp.from_dlpack(a), jax.Array


@pytest.mark.parametrize("library", (torch_cuda, jax_cuda), ids=("torch", "jax"))
@pytest.mark.parametrize(
    "case",
    (
        Case(65, 130, 64, 64, 4, 2, (2,), (2,), (2,), causal=True),
        Case(33, 70, 40, 24, 2, 1, dtype="float16", window=(9, 3)),
        Case(17, 33, 64, 64, dtype="bfloat16"),
    ),
    ids=repr,
)
def test_other_libraries(gpu, library, case):
    """The same bits as with CuPy arrays, in the caller's own kind of array (bug 211)."""
    take, give, kind = library()
    arrays = on_device(gpu, case)
    want = to_numpy(gpu, run(case, arrays))
    foreign = {name: take(a) for name, a in arrays.items()}
    results = run(case, foreign)
    assert all(isinstance(a, kind) for a in results)
    same_bits(*zip(to_numpy(gpu, [give(a) for a in results]), want))


# The cases of tests/sanitize_cases.py, which compute-sanitizer runs


@pytest.mark.parametrize("case", sanitize_cases.CASES, ids=repr)
def test_sanitizer_cases(gpu, case):
    sanitize_cases.sanitize(gpu, case)
