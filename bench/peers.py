"""The contenders: each takes a case and its arrays and returns a function of no arguments that
makes one call.

A contender that cannot run a case raises Skip with the reason; a missing library is a reason like
any other. GPU arrays are CuPy's, and the PyTorch peers read the same memory through DLPack. To add
a peer: one function, one row of PEERS.
"""

from __future__ import annotations

import contextlib
import importlib

import numpy as np

import cuflash
from cuflash import prebuild

from . import scores

_EAGER_LIMIT = 1 << 34  # bytes of scores: beyond that eager attention is a test of the allocator


class Skip(Exception):
    """This contender does not run this case; the text says why."""


def arrays(case, cupy, seed=0):
    """q, k, v and dout of a case, normal random numbers, on the case's home."""
    if case.home == "cpu":
        rng = np.random.default_rng(seed)
        return [rng.standard_normal(shape).astype(case.dtype) for shape in case.shapes]
    rng = cupy.random.default_rng(seed)
    dtype = scores.dtype_of(case.dtype)
    return [rng.standard_normal(x, dtype=np.float32).astype(dtype) for x in case.shapes]


def _cuflash(deterministic, plain=False):
    """``plain``: the same call without its option on scores or its window."""

    def prepare(case, q, k, v, dout):
        if plain and not case.option and case.left is None:
            raise Skip("the call has no option to leave out")
        if case.way == "fwd" and not deterministic:
            raise Skip("the forward pass is always deterministic")
        options, need = _keywords(case, plain)
        if case.option == "packed" and not plain:
            return _packed(case, (q, k, v, dout), options, deterministic)
        if case.way == "fwd":
            out = dout.copy()
            return lambda: cuflash.attention(q, k, v, out=out, **options)
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        return lambda: cuflash.attention_backward(
            dout, q, k, v, out, lse, deterministic=deterministic, need=need, **options
        )

    return prepare


def _packed(case, given, options, deterministic):
    """The batch's sequences packed one behind the other, offsets on the host."""
    q, k, v, dout = (x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in given)
    offsets = [np.arange(case.batch + 1) * rows for rows in case.lengths]
    if case.way == "fwd":
        out = dout.copy()
        return lambda: cuflash.attention_varlen(q, k, v, *offsets, out=out, **options)
    _, pullback = cuflash.attention_varlen_vjp(q, k, v, *offsets, **options)
    return lambda: pullback(dout, deterministic=deterministic)


def _keywords(case, plain):
    """(options, need) of cuflash's call."""
    options = {"causal": case.causal}
    if plain:
        return options, ("q", "k", "v")
    options |= scores.options(case, _library(case))
    if case.left is not None:
        options["window"] = (case.left, None)
    return options, scores.need(case)


def kernels(case, q, k, v, dout):
    """The plans of all kernels that cuflash's contenders launch on a GPU."""
    found = []
    for plain in (True,) if case.option == "packed" else (False, True):  # that builds its own
        options, need = _keywords(case, plain)
        for deterministic in (True, False) if case.way == "bwd" else (True,):
            plans = prebuild.plans_of_call(dout, q, k, v, options, need, deterministic)
            # A forward pass alone launches one kernel, and of a call's plans that one comes first.
            found += plans if case.way == "bwd" else plans[:1]
    return found


def _library(case):
    if case.home == "cpu":
        return np
    import cupy

    return cupy


def _eager(case, q, k, v, dout):
    """What a CuPy user writes today: the score matrix, softmax, product."""
    if case.way != "fwd":
        raise Skip("eager CuPy is timed forward only")
    if case.batch * case.heads * case.seqlen**2 * 4 > _EAGER_LIMIT:
        raise Skip(f"the score matrix would take more than {_EAGER_LIMIT >> 30} GiB")
    if case.dtype == "bfloat16":
        raise Skip("eager CuPy is timed in float16, float32 and float64")
    import cupy

    _square(case)
    hidden = ~cupy.tri(case.seqlen, dtype=bool) if case.causal else None
    scale = q.dtype.type(case.head_dim**-0.5)

    def call():
        s = cupy.matmul(q, k.swapaxes(-2, -1)) * scale
        if hidden is not None:
            s = cupy.where(hidden, s.dtype.type(-np.inf), s)
        p = cupy.exp(s - s.max(axis=-1, keepdims=True))
        return cupy.matmul(p / p.sum(axis=-1, keepdims=True), v)

    return call


def _torch(case, *xs):
    """(torch, tensors over the arrays' own memory)."""
    torch = _need("torch")
    if case.home == "gpu" and not torch.cuda.is_available():
        raise Skip("this PyTorch has no CUDA")
    return torch, [torch.from_dlpack(x) for x in xs]


def _need(module):
    try:
        return importlib.import_module(module)
    except Exception as error:  # a wheel built for another CUDA or PyTorch fails in its own way
        raise Skip(f"{module} does not import: {type(error).__name__}") from None


def _sdpa(backend):
    """scaled_dot_product_attention with one named backend; None: the CPU's, on two threads."""

    def prepare(case, q, k, v, dout):
        if backend == "MATH" and case.dtype != "float64":
            raise Skip("the unfused path is timed where no fused one exists, in float64")
        _maskable(case)
        torch, (q, k, v, dout) = _torch(case, q, k, v, dout)
        from torch.nn import attention, functional

        if backend is None:
            torch.set_num_threads(2)

        def forward():
            with attention.sdpa_kernel(kind) if kind is not None else contextlib.nullcontext():
                return functional.scaled_dot_product_attention(
                    q, k, v, is_causal=case.causal, enable_gqa=case.kv_heads > 0
                )

        kind = getattr(attention.SDPBackend, backend) if backend else None
        return _with_autograd(torch, case, forward, (q, k, v), dout)

    return prepare


def _flex(case, q, k, v, dout):
    _sixteen_bit(case)
    if case.causal and case.left is None or case.kv_heads or case.seqlen_k:
        raise Skip("it is timed for options on scores")
    torch, (q, k, v, dout) = _torch(case, q, k, v, dout)
    flex = _need("torch.nn.attention.flex_attention")
    if case.left is not None:
        left = case.left
        mods = None, (lambda b, h, i, j: (j <= i) & (i - j <= left)), ()
    else:
        try:
            mods = scores.flex(case, torch)
        except KeyError:
            raise Skip("it is not timed for this option") from None
    score_mod, mask_mod, wanted = mods
    blocks = None
    if mask_mod is not None:
        blocks = flex.create_block_mask(mask_mod, None, None, q.shape[2], k.shape[2])
    compiled = torch.compile(flex.flex_attention, dynamic=False)

    def forward():
        return compiled(q, k, v, score_mod=score_mod, block_mask=blocks)

    return _with_autograd(torch, case, forward, (q, k, v, *wanted), dout)


def _maskable(case):
    if case.option:
        raise Skip("it has no options on scores here")
    if case.left is not None or (case.causal and case.seqlen_k not in (0, case.seqlen)):
        raise Skip("it has no window, and its causal mask is the top left one")


def _square(case):
    if case.kv_heads or case.seqlen_k or case.left is not None or case.option:
        raise Skip("it is timed for as many keys as queries, of as many heads")


def _flash3(case, q, k, v, dout):
    _square(case)
    if case.way != "fwd":
        raise Skip("fa3-fwd has the forward pass only")
    _sixteen_bit(case)
    module = _need("fa3_fwd_interface")
    torch, tensors = _torch(case, q, k, v)
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors)
    return _with_autograd(
        torch, case, lambda: module.flash_attn_func(q, k, v, causal=case.causal), (), None
    )


def _flash4(case, q, k, v, dout):
    _square(case)
    _sixteen_bit(case)
    module = _need("flash_attn.cute")
    torch, tensors = _torch(case, q, k, v, dout)
    q, k, v, dout = (x.transpose(1, 2).contiguous() for x in tensors)

    def forward():
        out = module.flash_attn_func(q, k, v, causal=case.causal)
        return out[0] if isinstance(out, tuple) else out

    return _with_autograd(torch, case, forward, (q, k, v), dout)


def _sixteen_bit(case):
    if case.dtype not in ("float16", "bfloat16"):
        raise Skip(f"it has no {case.dtype}")


def _with_autograd(torch, case, forward, inputs, dout):
    """Forward without a tape, or the gradient of one recorded forward pass. One call is tried, so
    that what a peer does not support shows as a Skip here and not in the middle of a timing.
    """

    def without_tape():
        with torch.no_grad():
            return forward()

    try:
        if case.way == "fwd":
            without_tape()
            return without_tape
        for x in inputs:
            x.requires_grad_()
        out = forward()
        torch.autograd.grad(out, inputs, dout, retain_graph=True)
        return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise Skip((str(error).splitlines() or [type(error).__name__])[0][:100]) from None


_OURS = {"cuflash": _cuflash(True), "cuflash non-det": _cuflash(False)}
PEERS = {
    "gpu": {
        **_OURS,
        "plain": _cuflash(True, plain=True),
        "plain non-det": _cuflash(False, plain=True),
        "Flex": _flex,
        "cuDNN": _sdpa("CUDNN_ATTENTION"),
        "FA2": _sdpa("FLASH_ATTENTION"),
        "efficient": _sdpa("EFFICIENT_ATTENTION"),
        "unfused": _sdpa("MATH"),
        "FA3": _flash3,
        "FA4": _flash4,
        "eager CuPy": _eager,
    },
    "cpu": {**_OURS, "torch CPU": _sdpa(None)},
}
OURS = tuple(_OURS)
