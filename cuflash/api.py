"""Attention and its gradients.

Letters in shapes: B leading batch axes (any number, also written ``...``), L queries, S keys, Hq
query heads, Hkv key/value heads, D head dim of q and k, Dv head dim of v and out. The indices b, h,
i, j count batch, query head, query and key.
"""

from __future__ import annotations

from .arrays import home_of
from .checks import check_flag
from .edge import GRADIENTS, AttentionGrads, backward, check_wanted, forward, split_options
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
    block_map=None,
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

    With ``offset = S - L`` (`causal_offset` when given), for each batch b and query head h::

        s   = scale * q @ k.T
        s   = softcap * tanh(s / softcap)                          where given, as all that follows
        s  += bias[..., i, j]
        s  += -alibi_slopes[h] * abs(i + offset - j)
        s   = score_mod(s, b, h, i, j, *score_args)
        s   = -inf  where not visible
        lse = log(sum_j exp(s) [+ exp(sinks[h])])                  natural logarithm
        out = dropout(exp(s - lse)) @ v

        causal:    j <= i + offset                                 visible keys j of query i:
        window:    i + offset - left <= j <= i + offset + right    what all of these let through
        mask:      mask[..., i, j]
        lengths:   i < q_lens and j < kv_lens
        segments:  q_segment_ids[i] == kv_segment_ids[j]
        block_map: the pair's block is not empty
        mask_mod:  mask_mod(b, h, i, j, *score_args)

    A query that sees no key gives out 0 and lse -inf (the sink when there is one). A key that a
    query does not see has no influence on it, whatever it holds, NaN and inf included.

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
    softcap : float, optional
        Positive: scores stay within -softcap and softcap.
    bias : array, optional
        Any float dtype; broadcasts to (..., Hq, L, S) in either layout.
    alibi_slopes : array (Hq,) or (..., Hq), optional
        Any float dtype.
    mask : array of bool, optional
        True keeps; broadcasts to (..., Hq, L, S) in either layout.
    q_lens, kv_lens : array of int, optional
        Lengths inside L and S, broadcasting to the leading axes.
    q_segment_ids, kv_segment_ids : array (..., L), (..., S) of int, optional
        Equal ids see each other. With L = S one may stand for both.
    block_map : BlockMap, optional
        Which blocks of pairs are empty and skipped, and which are full, so that mask, mask_mod,
        lengths and segment ids, which hide nothing there, need not be looked at; see
        :func:`block_map`. Where a full block's promise is not kept, it is not defined which of the
        hidden pairs count.
    sinks : array (Hq,) or (..., Hq), optional
        Any float dtype: the score of one more key, without a value.
    score_mod, mask_mod : callable, optional
        NumPy functions of the score s and the indices b (counted over all leading axes), h, i and
        j; a mask_mod returns booleans. The CPU calls them on tiles, with a column of i and a row
        of j. Gradients and the GPU need them traced: no branch on a value but by np.where.
    score_args : tuple of arrays and numbers
        What both functions take after the indices. Arrays must be indexed, as in ``slopes[h]``.
    dropout_p : float
        Probability to drop a weight, 0 <= dropout_p < 1; 1 - dropout_p is rounded to 1/256. Kept
        weights are divided by it, see :func:`dropout_mask`.
    seed : int, optional
        From 0 to 2**64 - 1; required for dropout.
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
        An option that the GPU lacks yet, an operation in score_mod or mask_mod that cannot be
        traced, a head dim above 256, or L + S of 2**31 or more.
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
        or block_map is not None
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

    With dropout, p in dv and dp carry what it keeps. `softcap` and `score_mod` multiply ds by their
    derivative for dq and dk; dbias is the sum of ds over what bias is broadcast along, and so for
    the other arrays; dsinks = -exp(sinks - lse) * delta.

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
        Which gradients to compute, out of "q", "k" and "v", and those of given options: "bias",
        "alibi_slopes", "sinks" and "score_args".
    **options
        The keywords that were passed to :func:`attention`, except `out` and `return_lse`.

    Returns
    -------
    AttentionGrads
        dq, dk and dv, and dbias, dalibi_slopes, dsinks and dscore_args, each in its input's shape
        and dtype, summed over the axes along which that input was broadcast and, for k and v, over
        the query heads that share a head. None for those that `need` leaves out. The gradients of
        a query that sees no key are zero, and a hidden key takes part in none.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, BufferError, ImportError, RuntimeError
        As :func:`attention`.
    """
    shaping, scores = split_options("attention_backward", options)
    deterministic = check_flag("deterministic", deterministic)
    wanted = check_wanted(need, scores)
    operands = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if dlse is not None:
        operands["dlse"] = dlse
    items = list(operands.items())
    home = home_of(items + arrays_of(scores) if scores else items)
    if home.inline:
        return backward(home, operands, wanted, deterministic, shaping, scores)
    with home.scope():
        return backward(home, operands, wanted, deterministic, shaping, scores)
