"""PyTorch, JAX and CuPy arrays, on the CPU and, where there is one, on the GPU."""

import numpy as np
import pytest
from interop import DEVICES, DTYPES, close, inputs, needs_gpu, needs_two

import cuflash
from cuflash import arrays, reference

# PyTorch ---------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def to_torch(torch, array, device="cpu"):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(array.copy()).to(device)


def from_torch(tensor):
    return tensor.cpu().double().numpy()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_torch(torch, device, dtype, layout):
    plain = inputs(dtype, layout)
    tensors = [to_torch(torch, x, device) for x in plain]
    options = dict(causal=True, layout=layout)
    (out, lse), pullback = cuflash.attention_vjp(*tensors, return_lse=True, **options)
    grads = pullback(out)
    for x in (out, lse, *grads):
        assert isinstance(x, torch.Tensor) and x.device == tensors[0].device and x.is_contiguous()
    assert out.dtype == tensors[0].dtype and lse.dtype in (torch.float32, torch.float64)
    expected, expected_lse = reference.attention(*plain, **options)
    close(from_torch(out), expected, dtype)
    close(from_torch(lse), expected_lse, dtype)
    dout = np.asarray(from_torch(out))
    for grad, x, want in zip(
        grads, tensors, reference.attention_backward(dout, *plain, **options), strict=True
    ):
        assert grad.dtype == x.dtype and grad.shape == x.shape
        close(from_torch(grad), want, dtype, factor=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("device", DEVICES)
def test_torch_views_are_read_and_written_in_place(torch, device, dtype):
    plain = inputs(dtype)
    q, k, v = (to_torch(torch, x, device) for x in plain)
    wide = torch.zeros(2, 5, 4, 16, dtype=q.dtype, device=device)
    q_view = wide.transpose(1, 2)[..., ::2]
    q_view.copy_(q)
    buffer = torch.full((2, 4, 5, 40), 3.0, dtype=q.dtype, device=device)
    out = buffer[..., 2:34:2]
    assert cuflash.attention(q_view, k, v.expand(2, 2, 7, 16), out=out) is out
    close(from_torch(out), reference.attention(*plain)[0], dtype)
    out.fill_(3.0)
    assert bool((buffer == 3).all())


@pytest.mark.parametrize("device", DEVICES)
def test_torch_errors(torch, device):
    q, k, v = (to_torch(torch, x, device) for x in inputs())
    with pytest.raises(BufferError, match=r"k requires grad.*k\.detach\(\).*attention_vjp"):
        cuflash.attention(q, torch.nn.Parameter(k), v)
    with pytest.raises(TypeError, match="q: its dtype is int64"):
        cuflash.attention(q.long(), k, v)
    with pytest.raises(TypeError, match="q: its dtype is float8_e4m3fn"):
        cuflash.attention(q.to(torch.float8_e4m3fn), k, v)
    with pytest.raises(BufferError, match="q: the PyTorch array cannot be read"):
        cuflash.attention(q.to_sparse(), k, v)
    with pytest.raises(BufferError, match="resolve_neg"):
        cuflash.attention(torch.complex(q, q).conj().imag, k, v)
    with pytest.raises(TypeError, match="k is a NumPy array, but q is a PyTorch array"):
        cuflash.attention(q, inputs()[1], v)
    with pytest.raises(ValueError, match="out shares memory with q"):
        cuflash.attention(q, q, q, out=q)
    with pytest.raises(TypeError, match="out: its dtype is float16"):
        cuflash.attention(q, k, v, out=torch.zeros(2, 4, 5, 16, device=device, dtype=torch.float16))
    with pytest.raises(BufferError, match="meta"):
        cuflash.attention(*(x.to("meta") for x in (q, k, v)))


def test_torch_merge_and_empty(torch):
    q, k, v = (to_torch(torch, x) for x in inputs())
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    merged, merged_lse = cuflash.merge([out, out], [lse, lse])
    close(merged, from_torch(out))
    close(merged_lse, from_torch(lse) + np.log(2))
    assert cuflash.attention(q[:0], k[:0], v).shape == (0, 4, 5, 16)


@needs_gpu
class TestTorchOnTheGpu:
    def tensors(self, torch, device="cuda", length=64):
        generator = torch.Generator(device).manual_seed(0)
        shape = (1, 2, length, 32)
        return [
            torch.randn(shape, generator=generator, device=device, dtype=torch.float16)
            for _ in "qkv"
        ]

    def test_one_device_only(self, torch):
        q, k, v = self.tensors(torch)
        with pytest.raises(ValueError, match="k is on the CPU, but q is on CUDA device 0"):
            cuflash.attention(q, k.cpu(), v)

    def test_work_joins_the_current_stream(self, torch):
        q, k, v = self.tensors(torch, length=256)
        want = cuflash.attention(q, k, v)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        late = torch.empty_like(q)
        with torch.cuda.stream(side):
            torch.cuda._sleep(
                200_000_000
            )  # attention must come after the copy that waits behind this
            late.copy_(q)
            out = cuflash.attention(late, k, v)
            assert not side.query()  # and must not have waited for it on the host
            copy = out.clone()
        side.synchronize()
        assert torch.equal(copy, want)

    def test_can_be_captured(self, torch):
        q, k, v = self.tensors(torch)
        dout = torch.ones_like(q)

        def step():
            out, pullback = cuflash.attention_vjp(q, k, v, causal=True)
            return out, pullback(dout)

        step()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, grads = step()
        for x in (q, k, v):
            x.mul_(0.5)
        graph.replay()
        want, want_grads = step()
        assert torch.equal(out, want)
        for a, b in zip(grads, want_grads, strict=True):
            assert torch.equal(a, b)

    def test_memory_comes_from_pytorch(self, torch):
        import cupy

        q, k, v = self.tensors(torch)
        cuflash.attention_vjp(q, k, v)[1](q)
        pool = cupy.get_default_memory_pool()
        before = pool.total_bytes()
        out, pullback = cuflash.attention_vjp(*self.tensors(torch, length=1024))
        pullback(out)
        assert pool.total_bytes() == before

    @needs_two
    def test_the_current_device_stays(self, torch):
        q, k, v = self.tensors(torch, "cuda:1")
        with torch.cuda.device(0):
            out = cuflash.attention(q, k, v)
            assert torch.cuda.current_device() == 0
        assert out.device.index == 1
        assert torch.equal(out.cpu(), cuflash.attention(*(x.to("cuda:0") for x in (q, k, v))).cpu())


# JAX -------------------------------------------------------------------------------------------


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


def jax_device(jax, kind):
    try:
        return jax.devices(kind)[0]
    except RuntimeError:
        pytest.skip(f"JAX has no {kind} device")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_jax(jax, device, dtype):
    target = jax_device(jax, device)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        plain = inputs(dtype)
        values = [jax.device_put(x, target) for x in plain]
        (out, lse), pullback = cuflash.attention_vjp(*values, causal=True, return_lse=True)
        grads = pullback(out)
        for x in (out, lse, *grads):
            assert isinstance(x, jax.Array) and x.devices() == {target}
        assert out.dtype == values[0].dtype and lse.dtype == (
            dtype if dtype == "float64" else "float32"
        )
        expected, expected_lse = reference.attention(*plain, causal=True)
        close(np.asarray(out, np.float64), expected, dtype)
        close(np.asarray(lse, np.float64), expected_lse, dtype)
        wanted = reference.attention_backward(np.asarray(out, np.float64), *plain, causal=True)
        for grad, x, want in zip(grads, values, wanted, strict=True):
            assert grad.dtype == x.dtype
            close(np.asarray(grad, np.float64), want, dtype, factor=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_jax_is_read_in_place_on_the_cpu(jax, dtype):
    x = jax.device_put(inputs(dtype)[0], jax_device(jax, "cpu"))
    home = arrays.home_of([("q", x)])
    assert home.adopt("q", x).ctypes.data == x.unsafe_buffer_pointer()


@pytest.mark.parametrize("device", DEVICES)
def test_jax_errors(jax, device):
    target = jax_device(jax, device)
    q, k, v = (jax.device_put(x, target) for x in inputs())
    with pytest.raises(BufferError, match="out is a JAX array, which is immutable"):
        cuflash.attention(q, k, v, out=jax.device_put(np.zeros((2, 4, 5, 16), np.float32), target))
    with pytest.raises(TypeError, match="q is a value that JAX is tracing.*pure_callback"):
        jax.jit(cuflash.attention)(q, k, v)
    with pytest.raises(TypeError, match="k is a NumPy array, but q is a JAX array"):
        cuflash.attention(q, inputs()[1], v)
    with pytest.raises(TypeError, match="q: its dtype is int32"):
        cuflash.attention(q.astype("int32"), k, v)
    gone = q + 1
    gone.delete()
    with pytest.raises(BufferError, match="q is a JAX array that was deleted"):
        cuflash.attention(gone, k, v)


def test_jax_inside_a_pure_callback(jax):
    with jax.default_device(jax_device(jax, "cpu")):
        q, k, v = map(jax.numpy.asarray, inputs())
        shape = jax.ShapeDtypeStruct((2, 4, 5, 16), q.dtype)

        def attend(*operands):
            return cuflash.attention(*map(np.asarray, operands), causal=True)

        out = jax.jit(lambda *x: jax.pure_callback(attend, shape, *x))(q, k, v)
        close(np.asarray(out), reference.attention(*inputs(), causal=True)[0])


# CuPy ------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy_and_its_neighbours_agree_bitwise(dtype):
    import cupy

    torch = pytest.importorskip("torch")
    tensors = [to_torch(torch, x, "cuda") for x in inputs(dtype)]
    mine = [cupy.from_dlpack(x) for x in tensors]
    out, pullback = cuflash.attention_vjp(*mine, causal=True)
    assert type(out) is cupy.ndarray
    other, other_pullback = cuflash.attention_vjp(*tensors, causal=True)
    for a, b in zip((out, *pullback(out)), (other, *other_pullback(other)), strict=True):
        assert torch.equal(torch.from_dlpack(a), b)


@needs_two
def test_cupy_on_the_second_device():
    import cupy

    with cupy.cuda.Device(1):
        q = cupy.ones((3, 5, 16), cupy.float32)
    with cupy.cuda.Device(0):
        out, pullback = cuflash.attention_vjp(q, q, q)
        assert out.device.id == pullback(out).dq.device.id == 1
        assert cupy.cuda.runtime.getDevice() == 0
        with pytest.raises(ValueError, match="k is on CUDA device 0"):
            cuflash.attention(q, cupy.ones((3, 5, 16), cupy.float32), q)
