"""Attention over packed sequences: (T, H, D) arrays in which sequences lie one behind the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import edge
from .arrays import dtype_name, home_of
from .checks import check_flag, check_operand, is_int, show
from .options import arrays_of

# Arrays that are given for each pair, row or key: where the sequences lie already says the lengths.
_PER_ROW = ("bias", "mask", "q_lens", "kv_lens", "q_segment_ids", "kv_segment_ids", "block_map")


class _Packed(NamedTuple):
    """A call's sequences."""

    home: Any
    arrays: tuple  # q, k, v: NumPy's, or on a GPU the caller's
    spans: list | None  # (slice of queries, slice of keys) of each sequence; None on a GPU
    packing: Any  # launch_packed.Packing on a GPU, where offsets are never read by the host
    shaping: tuple
    scores: dict


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k=None, /, *, out=None, return_lse=False, **options
):
    """:func:`attention` of each of several sequences that lie packed in q, k and v.

    Parameters
    ----------
    q : array (Tq, Hq, D)
        The queries of all sequences.
    k, v : array (Tk, Hkv, D), (Tk, Hkv, Dv)
    cu_seqlens_q : array or sequence of N + 1 int
        Sequence n has the queries from cu_seqlens_q[n] to below cu_seqlens_q[n + 1]; begins with 0
        and never falls. Lengths of 0 are allowed. What lies beyond the last is in no sequence.
        Offsets on a GPU, of q's library, are not read by the host, and only they can be captured in
        a CUDA graph: each counts as the largest up to it, and at most as Tq.
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
        As `attention`, and for offsets on the host that do not begin with 0, fall or exceed the
        arrays.
    NotImplementedError
        Options given for each row or key: bias, mask, lengths, segment ids, block maps.
    ImportError, RuntimeError
        As `attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.ones((6, 2, 8))
    >>> cuflash.attention_varlen(x, x, x, [0, 4, 6], causal=True).shape
    (6, 2, 8)
    """
    return_lse = check_flag("return_lse", return_lse)
    given = ("attention_varlen", q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    _, result, lse = _attend(*given, out, return_lse)
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
    call = ("attention_varlen_vjp", q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    packed, out, lse = _attend(*call, given, True)

    def pullback(dout, dlse=None, *, deterministic=True, need=edge.GRADIENTS):
        deterministic = check_flag("deterministic", deterministic)
        wanted = edge.check_wanted(need, packed.scores)
        if packed.spans is None:
            return _device_backward(packed, out, lse, dout, dlse, wanted, deterministic)
        return _backward(packed, out, lse, dout, dlse, wanted)

    return ((out, lse) if return_lse else out), pullback


def _attend(function, q, k, v, cu_q, cu_k, options, given, return_lse):
    """The call's sequences, out and lse."""
    if "layout" in options:
        raise TypeError(f"{function}() has no layout: q, k and v are (T, H, D)")
    shaping, scores = edge.split_options(function, {**options, "layout": "bshd"})
    for name in _PER_ROW:
        if name in scores:
            raise NotImplementedError(f"{name} with {function}: packed sequences cannot have it")
    items = [("q", q), ("k", k), ("v", v)]
    name_k = "cu_seqlens_q" if cu_k is None else "cu_seqlens_k"
    offsets = [("cu_seqlens_q", cu_q), (name_k, cu_q if cu_k is None else cu_k)]
    arrays = [(name, x) for name, x in offsets if _is_foreign(x)]
    arrays += [] if given is None else [("out", given)]
    home = home_of(items + arrays + arrays_of(scores))
    with home.scope():
        operands = tuple(home.adopt(name, x) for name, x in items)
        _check_shapes(operands, shaping)
        offsets = [(name, home.adopt(name, x) if _is_foreign(x) else x) for name, x in offsets]
        found = [_offsets(*pair, len(x)) for pair, x in zip(offsets, operands)]
        if len(found[0]) != len(found[1]):
            raise ValueError(
                f"cu_seqlens_k has {len(found[1])} offsets, but it must have cu_seqlens_q's, "
                f"{len(found[0])}"
            )
        if home.xp is np:
            spans = [[slice(*pair) for pair in zip(x[:-1], x[1:])] for x in found]
            packed = _Packed(home, operands, list(zip(*spans)), None, shaping, scores)
            return packed, *_forward(packed, given)
        packing = _packing(home, operands, found, shaping, scores)
        packed = _Packed(home, (q, k, v), None, packing, shaping, scores)
        result = edge.forward(home, q, k, v, given, return_lse, shaping, scores, 0, packing)
        return packed, *(result if return_lse else (result, None))


def _is_foreign(x) -> bool:
    """Whether offsets are an array that a home adopts."""
    return hasattr(x, "__dlpack__") and not isinstance(x, (np.ndarray, np.generic))


def _check_shapes(operands, shaping):
    for name, x in zip("qkv", operands):
        if x.ndim != 3:
            raise ValueError(f"{name}: its shape is {x.shape}, but it must be (T, H, D)")
    edge.resolve(*operands, shaping)  # every complaint about q, k and v, even with no sequence


def _offsets(name, offsets, total):
    """Checked: a NumPy array, or as it is where only the device knows what it holds."""
    rule = "it must be whole numbers, one more than there are sequences"
    if isinstance(offsets, (list, tuple)):
        if not all(map(is_int, offsets)):
            raise TypeError(f"{name}={show(offsets)}: {rule}")
        offsets = np.array(offsets, np.int64)
    on_device = not isinstance(offsets, np.ndarray) and hasattr(offsets, "__dlpack__")
    if not (on_device or isinstance(offsets, np.ndarray)) or offsets.dtype.kind not in "iu":
        shown = f" is {offsets.dtype}" if on_device else f"={show(offsets)}"
        raise TypeError(f"{name}{shown}: {rule}")
    if offsets.ndim != 1 or not len(offsets):
        raise ValueError(f"{name}: its shape is {offsets.shape}; {rule}")
    if on_device:
        return offsets
    numbers = [int(n) for n in offsets]
    if numbers[0] != 0 or sorted(numbers) != numbers or numbers[-1] > total:
        raise ValueError(
            f"{name}={show(numbers)}: offsets must begin with 0, never fall, and end at or before "
            f"{total}, the array's length"
        )
    return offsets


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
    shared, nothing = {}, slice(0, 0)
    for n, (rows, keys) in enumerate(packed.spans or [(nothing, nothing)]):
        parts = {name: x[rows] for name, x in whole.items()}
        parts |= {name: x[at] for name, x, at in zip("qkv", packed.arrays, (rows, keys, keys))}
        order = ("dout", "q", "k", "v", "out", "lse", "dlse")
        parts = {name: parts[name] for name in order if name in parts}
        grads = edge.backward(home, parts, wanted, True, packed.shaping, packed.scores, n)
        for total, grad, at in zip(main, grads, (rows, keys, keys)):
            if total is not None:
                total[at] = grad
        for name in ("dalibi_slopes", "dsinks", "dscore_args"):  # which all sequences share
            grad = getattr(grads, name)
            if grad is not None:
                shared[name] = _plus(shared.get(name), grad)
    return edge.AttentionGrads(*main, **shared)


def _plus(total, grad):
    if isinstance(grad, tuple):
        total = total or (None,) * len(grad)
        return tuple(None if g is None else _plus(t, g) for t, g in zip(total, grad))
    return grad if total is None else total + grad


def _packing(home, arrays, offsets, shaping, scores):
    """How sequences on a GPU share one launch of all rows; arrays are CuPy's."""
    from . import launch_packed

    names = dict(zip(edge.SHAPING, shaping))
    left, right = (None if x == -1 else x for x in names["window"] or (None, None))
    if names["causal"]:
        right = 0 if right is None else min(right, 0)
    shift = names["causal_offset"]
    if names["causal"] == "top_left":
        shift = 0
    rows = len(arrays[0]), len(arrays[1])
    return launch_packed.pack(home.device, *offsets, rows, (left, right), shift, bool(scores))


def _device_backward(packed, out, lse, dout, dlse, wanted, deterministic):
    operands = {"dout": dout, **dict(zip("qkv", packed.arrays)), "out": out, "lse": lse}
    if dlse is not None:
        operands["dlse"] = dlse
    home = home_of(list(operands.items()) + arrays_of(packed.scores))
    with home.scope():
        return edge.backward(
            home, operands, wanted, deterministic, packed.shaping, packed.scores, 0, packed.packing
        )
