"""Attention over packed sequences: (T, H, D) arrays in which sequences lie one behind the other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import edge
from .arrays import dtype_name, home_of
from .checks import check_flag, check_need, check_operand, is_int, show
from .options import arrays_of

# Arrays that are given for each pair, row or key: where the sequences lie already says the lengths.
_PER_ROW = ("bias", "mask", "q_lens", "kv_lens", "q_segment_ids", "kv_segment_ids", "block_map")


class _Packed(NamedTuple):
    """A call's sequences."""

    home: object
    arrays: tuple  # q, k, v as NumPy arrays
    spans: list  # (slice of queries, slice of keys) of each sequence
    shaping: tuple
    scores: dict


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k=None, /, *, out=None, return_lse=False, **options
):
    """:func:`attention` of each of several sequences that lie packed in q, k and v.

    Parameters
    ----------
    q : array (Tq, Hq, D)
        The queries of all sequences. As in `attention`, but on the CPU only.
    k, v : array (Tk, Hkv, D), (Tk, Hkv, Dv)
    cu_seqlens_q : array or sequence of N + 1 int
        Sequence n has the queries from cu_seqlens_q[n] to below cu_seqlens_q[n + 1]; begins with 0
        and never falls. Lengths of 0 are allowed. What lies beyond the last is in no sequence.
    cu_seqlens_k : array or sequence of N + 1 int, optional
        The same of the keys; None means cu_seqlens_q.
    out : array (Tq, Hq, Dv), optional
        Where to put the result.
    return_lse : bool
        Whether to return lse, too.
    **options
        The keywords of `attention`, but layout; score_mod, mask_mod and dropout see the sequence's
        number as b, and i and j inside the sequence.

    Returns
    -------
    out : array (Tq, Hq, Dv)
        0 beyond the last sequence.
    lse : array (Tq, Hq)
        Only with return_lse=True; -inf beyond the last sequence.

    Raises
    ------
    TypeError, ValueError, BufferError
        As `attention`, and for offsets that do not begin with 0, fall or exceed the arrays.
    NotImplementedError
        GPU arrays, and options given for each row or key: bias, mask, lengths, segment ids, block
        maps.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.ones((6, 2, 8))
    >>> cuflash.attention_varlen(x, x, x, [0, 4, 6], causal=True).shape
    (6, 2, 8)
    """
    packed = _pack("attention_varlen", q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    return_lse = check_flag("return_lse", return_lse)
    result, lse = _forward(packed, out)
    return (result, lse) if return_lse else result


def attention_varlen_vjp(q, k, v, cu_seqlens_q, cu_seqlens_k=None, /, **options):
    """:func:`attention_varlen` together with the function that gives its gradients.

    Parameters
    ----------
    q, k, v, cu_seqlens_q, cu_seqlens_k, **options
        As in `attention_varlen`.

    Returns
    -------
    out : array, or tuple (out, lse) with return_lse=True
    pullback : callable
        As of :func:`attention_vjp`; gradients beyond the last sequence are 0.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, BufferError
        As `attention_varlen`.
    """
    return_lse = check_flag("return_lse", options.pop("return_lse", False))
    given = options.pop("out", None)
    packed = _pack("attention_varlen_vjp", q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    out, lse = _forward(packed, given)

    def pullback(dout, dlse=None, *, deterministic=True, need=edge.GRADIENTS):
        check_flag("deterministic", deterministic)
        return _backward(packed, out, lse, dout, dlse, check_need(need, edge.ALL_GRADIENTS))

    return ((out, lse) if return_lse else out), pullback


def _pack(function, q, k, v, cu_q, cu_k, options) -> _Packed:
    if "layout" in options:
        raise TypeError(f"{function}() has no layout: q, k and v are (T, H, D)")
    shaping, scores = edge.split_options(function, {**options, "layout": "bshd"})
    for name in _PER_ROW:
        if name in scores:
            raise NotImplementedError(f"{name} with {function}: packed sequences cannot have it")
    items = [("q", q), ("k", k), ("v", v)]
    home = home_of(items + arrays_of(scores))
    if home.xp is not np:
        raise NotImplementedError(f"{function}: GPU arrays cannot have packed sequences yet")
    arrays = tuple(home.adopt(name, x) for name, x in items)
    for (name, _), x in zip(items, arrays):
        if x.ndim != 3:
            raise ValueError(f"{name}: its shape is {x.shape}, but it must be (T, H, D)")
    edge.resolve(*arrays, shaping)  # every complaint about q, k and v, even with no sequence
    rows = _spans("cu_seqlens_q", cu_q, len(arrays[0]))
    name = "cu_seqlens_q" if cu_k is None else "cu_seqlens_k"
    keys = _spans(name, cu_q if cu_k is None else cu_k, len(arrays[1]))
    if len(rows) != len(keys):
        raise ValueError(
            f"cu_seqlens_k has {len(keys) + 1} offsets, but it must have cu_seqlens_q's, "
            f"{len(rows) + 1}"
        )
    return _Packed(home, arrays, list(zip(rows, keys)), shaping, scores)


def _spans(name, offsets, total):
    """The slices between offsets."""
    rule = "it must be whole numbers, one more than there are sequences"
    if isinstance(offsets, (list, tuple)):
        if not all(map(is_int, offsets)):
            raise TypeError(f"{name}={show(offsets)}: {rule}")
        offsets = np.array(offsets, np.int64)
    if not isinstance(offsets, np.ndarray) or offsets.dtype.kind not in "iu":
        raise TypeError(f"{name}={show(offsets)}: {rule}")
    if offsets.ndim != 1 or not len(offsets):
        raise ValueError(f"{name}: its shape is {offsets.shape}; {rule}")
    offsets = [int(n) for n in offsets]
    if offsets[0] != 0 or sorted(offsets) != offsets or offsets[-1] > total:
        raise ValueError(
            f"{name}={show(offsets)}: offsets must begin with 0, never fall, and end at or before "
            f"{total}, the array's length"
        )
    return [slice(*pair) for pair in zip(offsets, offsets[1:])]


def _room(packed, out):
    q, _, v = packed.arrays
    shape = (*q.shape[:2], v.shape[2])
    lse = np.full(shape[:2], -np.inf, "float64" if q.dtype == np.float64 else "float32")
    if out is None:
        return np.zeros(shape, q.dtype), lse
    out = packed.home.adopt("out", out, writable=True)
    check_operand("out", out.shape, dtype_name(out.dtype), shape, dtype_name(q.dtype), "the result")
    edge.check_output("out", out, list(zip("qkv", packed.arrays)))
    out[...] = 0
    return out, lse


def _forward(packed, given):
    target, lse = _room(packed, given)
    q, k, v = packed.arrays
    for n, (rows, keys) in enumerate(packed.spans):
        parts = q[rows], k[keys], v[keys], target[rows]
        _, lse[rows] = edge.forward(
            packed.home, *parts, True, packed.shaping, packed.scores, first_batch=n
        )
    return (packed.home.finish(target) if given is None else given), lse


def _backward(packed, out, lse, dout, dlse, wanted):
    home = packed.home
    operands = {"dout": (dout, out), "lse": (lse, lse)}
    if dlse is not None:
        operands["dlse"] = (dlse, lse)
    whole = {"out": home.adopt("out", out)}
    for name, (x, like) in operands.items():
        x, like = home.adopt(name, x), home.adopt(name, like)
        check_operand(name, x.shape, dtype_name(x.dtype), like.shape, dtype_name(like.dtype), "it")
        whole[name] = x
    main = [np.zeros_like(x) if want else None for x, want in zip(packed.arrays, wanted)]
    sums = _Sums()
    nothing = slice(0, 0)
    for n, (rows, keys) in enumerate(packed.spans or [(nothing, nothing)]):
        parts = {name: x[rows] for name, x in whole.items()}
        parts |= {name: x[at] for name, x, at in zip("qkv", packed.arrays, (rows, keys, keys))}
        order = ("dout", "q", "k", "v", "out", "lse", "dlse")
        parts = {name: parts[name] for name in order if name in parts}
        grads = edge.backward(home, parts, wanted, True, packed.shaping, packed.scores, n)
        for total, grad, at in zip(main, grads, (rows, keys, keys)):
            if total is not None:
                total[at] = grad
        sums.add(grads)
    return edge.AttentionGrads(*main, **sums.found)


class _Sums:
    """Gradients of what all sequences share."""

    def __init__(self):
        self.found = {}

    def add(self, grads):
        for name in ("dalibi_slopes", "dsinks", "dscore_args"):
            grad = getattr(grads, name)
            if grad is not None:
                self.found[name] = _plus(self.found.get(name), grad)


def _plus(total, grad):
    if isinstance(grad, tuple):
        total = total or (None,) * len(grad)
        return tuple(None if g is None else _plus(t, g) for t, g in zip(total, grad))
    return grad if total is None else total + grad
