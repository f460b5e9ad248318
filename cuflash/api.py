"""The public functions: attention, its gradients, merging of partial results, and tools.

Letters in shapes: B leading batch axes (any number, also written ``...``), L queries, S keys, Hq
query heads, Hkv key/value heads, D head dim of q and k, Dv head dim of v and out. The indices b, h,
i, j count batch, query head, query and key.
"""

from __future__ import annotations

import numpy as np

from .arrays import dtype_name, home_of
from .checks import check_flag, check_need, check_partials
from .edge import (
    ALL_GRADIENTS,
    GRADIENTS,
    AttentionGrads,
    backward,
    forward,
    inner_view,
    resolve,
    scored,
    split_options,
)
from .options import DEFAULTS, arrays_of, used


def attention(
    q,
    k,
    v,
    /,
    *,
    scale=None,
    causal=False,
    causal_offset=None,
    window=None,
    softcap=None,
    bias=None,
    alibi_slopes=None,
    mask=None,
    q_lens=None,
    kv_lens=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    sinks=None,
    score_mod=None,
    mask_mod=None,
    score_args=(),
    dropout_p=0.0,
    seed=None,
    layout="bhsd",
    precision=None,
    out=None,
    return_lse=False,
):
    """Exact attention, ``softmax(scale * q @ k.T) @ v``, without ever storing the L x S matrix.

    With ``offset = S - L`` (`causal_offset` when given), for each batch and query head::

        s   = scale * q @ k.T
        s   = -inf  where not visible
        lse = log(sum_j exp(s))                                    natural logarithm
        out = exp(s - lse) @ v

        causal:  j <= i + offset                                   visible keys j of query i
        window:  i + offset - left <= j <= i + offset + right

    A query that sees no key gives out 0 and lse -inf. A key that a query does not see has no
    influence on it, whatever it holds, NaN and inf included.

    Parameters
    ----------
    q : array (..., Hq, L, D)
        float16, bfloat16, float32 or float64, with any strides, on the CPU or a CUDA device: a
        NumPy, CuPy, PyTorch or JAX array, or another that has ``__dlpack__``. D is from 1 to 256.
        2-D, (L, D), means one head.
    k : array (..., Hkv, S, D)
        Of q's library, device and dtype. Hq must be a multiple of Hkv: query head h uses key/value
        head h // (Hq // Hkv). Leading axes of q, k and v broadcast as in NumPy.
    v : array (..., Hkv, S, Dv)
        Dv is from 1 to 256.
    scale : float, optional
        Factor of the scores; None means 1/sqrt(D), 0.0 means zero.
    causal : bool or {"bottom_right", "top_left"}
        True and "bottom_right": the last query sees the last key (offset S - L). "top_left": the
        first query sees the first key only (offset 0).
    causal_offset : int, optional
        Another offset, for causal=True or for `window`.
    window : tuple (left, right), optional
        Keys from i + offset - left to i + offset + right are visible, both included; None or -1 is
        no bound. It intersects with `causal`.
    layout : {"bhsd", "bshd"}
        "bshd" means arrays of shape (..., L, H, D); it costs no copy.
    precision : {None, "tf32"}
        "tf32" allows float32 products to be computed with TF32's 10 mantissa bits; None means
        float32 accuracy.
    out : array, optional
        Where to put the result: out's shape and q's dtype, any strides, writable, not overlapping
        an input. Returned as it is.
    return_lse : bool
        Whether to return lse, too.
    softcap, bias, alibi_slopes, mask, q_lens, kv_lens, q_segment_ids, kv_segment_ids : None
        Reserved.
    sinks, score_mod, mask_mod, score_args, dropout_p, seed : None, () or 0.0
        Reserved: anything but the default raises NotImplementedError.

    Returns
    -------
    out : array (..., Hq, L, Dv)
        Of q's library, device and dtype; (..., L, Hq, Dv) with layout="bshd"; (L, Dv) when q, k and
        v were all 2-D.
    lse : array (..., Hq, L)
        Only with return_lse=True: float32, or float64 for float64 inputs; out's shape without its
        last axis.

    Raises
    ------
    TypeError
        No array, arrays of several libraries, a dtype that is not supported or not shared, an
        option of a wrong kind.
    ValueError
        Shapes that do not fit, options out of range or in conflict, arrays on several devices, an
        `out` that is read-only or overlaps.
    NotImplementedError
        A reserved option, a head dim above 256, or L + S of 2**31 or more.
    BufferError
        An array that its library cannot share: a PyTorch tensor that requires grad, a JAX array as
        `out`.
    ImportError, RuntimeError
        A GPU array without CuPy, NVRTC or a driver, or on a GPU older than compute capability 7.5.

    See Also
    --------
    attention_vjp : the same with a function for the gradients.
    merge : combine results over parts of the keys.

    Notes
    -----
    The tiling with a running softmax is that of Milakov and Gimelshein, "Online normalizer
    calculation for softmax" (2018), and Dao et al., "FlashAttention" (2022). Work on the GPU goes
    to the current stream (CuPy's, for PyTorch tensors PyTorch's) of the arrays' device and is not
    waited for. The result is bitwise repeatable.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.zeros((2, 4, 3, 8), np.float32)
    >>> cuflash.attention(q, q, q, causal=True).shape
    (2, 4, 3, 8)
    """
    scores = None
    if (
        softcap is not None
        or bias is not None
        or alibi_slopes is not None
        or mask is not None
        or q_lens is not None
        or kv_lens is not None
        or q_segment_ids is not None
        or kv_segment_ids is not None
        or sinks is not None
        or score_mod is not None
        or mask_mod is not None
        or seed is not None
        or type(score_args) is not tuple  # an array must not be compared: that would read the GPU
        or score_args
        or type(dropout_p) is not float
        or dropout_p
    ):
        given = locals()
        scores = used({name: given[name] for name in DEFAULTS})
    items = [("q", q), ("k", k), ("v", v)]
    if scores:
        items += arrays_of(scores)
    if out is not None:
        items.append(("out", out))
    home = home_of(items)
    options = (layout, scale, causal, causal_offset, window, precision)
    if home.inline:
        return forward(home, q, k, v, out, return_lse, options, scores)
    with home.scope():
        return forward(home, q, k, v, out, return_lse, options, scores)


def attention_vjp(q, k, v, /, **options):
    """Attention together with the function that gives its gradients.

    Parameters
    ----------
    q, k, v : array
        As in :func:`attention`.
    **options
        Every keyword of :func:`attention`. With `out`, leave that array unchanged until the
        gradients are taken: they are computed from it.

    Returns
    -------
    out : array, or tuple (out, lse) with return_lse=True
        As from :func:`attention`.
    pullback : callable
        ``pullback(dout, dlse=None, *, deterministic=True, need=("q", "k", "v"))`` gives the
        `AttentionGrads` of any function whose derivatives by out and lse are `dout` and `dlse`; see
        :func:`attention_backward`. It may be called repeatedly.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, BufferError, ImportError, RuntimeError
        As :func:`attention`.

    Notes
    -----
    Between the two calls only q, k, v, out and lse are held: memory O(L + S). The scores are
    computed again.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.ones((3, 8))
    >>> out, pullback = cuflash.attention_vjp(x, x, x, causal=True)
    >>> pullback(np.ones_like(out)).dv[:, 0].round(3).tolist()
    [1.833, 0.833, 0.333]
    """
    return_lse = check_flag("return_lse", options.pop("return_lse", False))
    given_out = options.pop("out", None)
    split_options("attention_vjp", options)
    out, lse = attention(q, k, v, out=given_out, return_lse=True, **options)

    def pullback(dout, dlse=None, *, deterministic=True, need=GRADIENTS):
        return attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, deterministic=deterministic, need=need, **options
        )

    return ((out, lse) if return_lse else out), pullback


def attention_backward(
    dout, q, k, v, out, lse, /, *, dlse=None, deterministic=True, need=GRADIENTS, **options
) -> AttentionGrads:
    """Gradients of :func:`attention` from its inputs and results.

    With ``p = exp(s - lse)``, ``dp = dout @ v.T`` and ``delta = sum(dout * out, axis=-1) - dlse``::

        dv = p.T @ dout
        ds = p * (dp - delta)
        dq = scale * ds @ k
        dk = scale * ds.T @ q

    (Dao et al., "FlashAttention", 2022, appendix B; the derivative of lse by s is p, hence dlse's
    place.)

    Parameters
    ----------
    dout : array
        Derivative by out: out's shape and dtype, any strides.
    q, k, v : array
        As they were passed to :func:`attention`.
    out, lse : array
        What it returned.
    dlse : array, optional
        Derivative by lse: lse's shape and dtype. None means zero.
    deterministic : bool
        True, the default, gives bitwise the same gradients every time; False allows a faster order
        of summation.
    need : tuple of str
        Which gradients to compute, out of "q", "k" and "v".
    **options
        The keywords that were passed to :func:`attention`, except `out` and `return_lse`.

    Returns
    -------
    AttentionGrads
        dq, dk and dv, each in its input's shape and dtype, summed over the axes along which that
        input was broadcast and, for k and v, over the query heads that share a head. None for those
        that `need` leaves out. The gradients of a query that sees no key are zero, and a hidden key
        takes part in none.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, BufferError, ImportError, RuntimeError
        As :func:`attention`.
    """
    shaping, scores = split_options("attention_backward", options)
    deterministic = check_flag("deterministic", deterministic)
    wanted = check_need(need, ALL_GRADIENTS)
    for name, want in zip(ALL_GRADIENTS, wanted):
        if want and name not in GRADIENTS and name not in scores:
            raise ValueError(f"need={need!r}: {name!r} is asked for, but {name} is not given")
    operands = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if dlse is not None:
        operands["dlse"] = dlse
    items = list(operands.items())
    home = home_of(items + arrays_of(scores) if scores else items)
    if home.inline:
        return backward(home, operands, wanted, deterministic, shaping, scores)
    with home.scope():
        return backward(home, operands, wanted, deterministic, shaping, scores)


def merge(outs, lses):
    """Attention over the union of several sets of keys, from the results over each.

    ``lse = log(sum_n exp(lse_n))`` and ``out = sum_n exp(lse_n - lse) * out_n``; a part in which a
    query saw no key (lse -inf) does not count.

    Parameters
    ----------
    outs : sequence of arrays (..., Dv)
        Results for the same queries; equal shapes and dtypes, Dv from 1 to 256.
    lses : sequence of arrays (...)
        Their lse: float32, or float64 for float64 outs.

    Returns
    -------
    out : array (..., Dv)
        Of the dtype of outs.
    lse : array (...)
        Of the dtype of lses.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, BufferError, ImportError, RuntimeError
        As :func:`attention`.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (list, tuple)):
            raise TypeError(
                f"{name} is a {type(parts).__qualname__}, but it must be a list or tuple of arrays"
            )
    items = [(f"outs[{n}]", x) for n, x in enumerate(outs)] + [
        (f"lses[{n}]", x) for n, x in enumerate(lses)
    ]
    if not items:
        check_partials([], [], [], [])
    home = home_of(items)
    with home.scope():
        adopted = [home.adopt(name, x) for name, x in items]
        outs, lses = adopted[: len(outs)], adopted[len(outs) :]
        check_partials(
            [x.shape for x in outs],
            [dtype_name(x.dtype) for x in outs],
            [x.shape for x in lses],
            [dtype_name(x.dtype) for x in lses],
        )
        out, out_handle = home.new(outs[0].shape, outs[0].dtype)
        lse, lse_handle = home.new(lses[0].shape, lses[0].dtype)
        if out.size:
            home.backend.merge(outs, lses, out, lse)
        return home.finish(out_handle), home.finish(lse_handle)


def explain(q, k, v, /, **options):
    """Which code :func:`attention` would run for these arrays, and why.

    Parameters
    ----------
    q, k, v : array
        As in :func:`attention`; their contents do not matter.
    **options
        The keywords of :func:`attention`, except `out` and `return_lse`.

    Returns
    -------
    object
        Print it, or take its ``str``. On the GPU: the kernel, its tile, registers and workspace,
        and why other kernels were rejected. On the CPU: the facts of the call.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, BufferError, ImportError, RuntimeError
        As :func:`attention`.
    """
    shaping, scores = split_options("explain", options)
    items = [("q", q), ("k", k), ("v", v)]
    home = home_of(items + arrays_of(scores) if scores else items)
    with home.scope():
        q, k, v = (home.adopt(name, x) for name, x in items)
        call = resolve(q, k, v, shaping)
        problem = scored(home, call, shaping, scores).problem if scores else call.problem
        if home.xp is np:
            return f"{home.kind} arrays on the CPU: the blockwise NumPy path\n{problem}"
        return home.backend.explain(problem, *(inner_view(home, call, x) for x in (q, k, v)))


def compile(
    arch=None,
    *,
    dtypes=("float16", "bfloat16"),
    head_dims=(64, 128),
    head_dims_v=None,
    causal=(False, True),
    backward=True,
    progress=None,
):
    """Compile kernels ahead of time into the cache, so that first calls start at once. No GPU is
    needed when `arch` is named.

    Parameters
    ----------
    arch : str, optional
        Architecture such as "sm_80" or "sm_90a"; None means that of the current device.
    dtypes : sequence of str
        Out of "float16", "bfloat16", "float32" and "float64".
    head_dims : sequence of int
        Head dims D.
    head_dims_v : sequence of int, optional
        Value head dims, one for each of `head_dims`; None means the same.
    causal : sequence of bool
        False for kernels that see every key, True for those with a causal mask or a window.
    backward : bool
        Whether to compile the gradients' kernels, too.
    progress : callable, optional
        Called after each kernel with its record.

    Returns
    -------
    list
        One record for each kernel.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        An argument that names no kernel.
    ImportError, RuntimeError
        CuPy or NVRTC is missing, a kernel does not compile, or there is no device and `arch` is
        None.
    """
    from .ahead import compile_ahead

    return compile_ahead(
        arch=arch,
        dtypes=dtypes,
        head_dims=head_dims,
        head_dims_v=head_dims_v,
        causal=causal,
        backward=backward,
        progress=progress,
    )
