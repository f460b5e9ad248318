"""The facts of one attention call, validated without seeing an array."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real

from .checks import DTYPES, check_head_dim, is_bool, is_int, show
from .score import Program

LAYOUTS = ("bhsd", "bshd")
_FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class Band:
    """Key j is visible to query i when ``i + lo <= j <= i + hi``.

    lo lies in [-L, S] and hi in [-L - 1, S], so sums stay small.
    """

    lo: int
    hi: int


@dataclass(frozen=True)
class Problem:
    """One call's structure, in the layout (*batch, H, L, D), independent of any library."""

    dtype: str  # "float16", "bfloat16", "float32" or "float64"
    batch: tuple[int, ...]  # broadcast leading axes of q, k and v
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    scale: float  # the resolved value: 1/sqrt(head_dim) when the caller gave None
    band: Band | None = None  # None: every key is visible
    # Packed: each query has an interval of keys in place of the band, lengths count all rows.
    sequences: int | None = None
    precision: str | None = None  # None or "tf32" (float32 only)
    program: Program | None = None  # what options make of the scores; numbers and arrays are apart
    sinks: bool = False
    dropout: bool = False
    lengths: bool = False  # whether batch entries have lengths of their own, in place of masks
    block_map: tuple[int, int] | None = None  # queries and keys of a block of the call's map

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1

    @property
    def packed(self) -> bool:
        return self.sequences is not None

    @property
    def bounded(self) -> bool:
        """Whether queries see a range of the keys only: a band, or their own sequence."""
        return self.band is not None or self.packed

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"


@dataclass(frozen=True)
class Call:
    """A problem and what the caller sees of it: the layout and the shapes of the results."""

    problem: Problem
    layout: str  # "bhsd" or "bshd"
    out_shape: tuple[int, ...]  # in the caller's layout; q, k and v all 2-D: without a head axis
    lse_shape: tuple[int, ...]
    direct: bool  # q, k and v already are (*batch, H, L, D): no view is needed
    trivial: bool  # no query row or no key: the results are constants, no backend is called


def call_of(
    dtypes, q_shape, k_shape, v_shape, layout, scale, causal, causal_offset, window, precision
) -> Call:
    """Validate the facts of a call; the answer is cached by their values.

    Shapes are in the caller's layout; errors name the argument, its value and the rule.
    """
    has_window = window is not None
    left, right = _window_pair(window) if has_window else (None, None)
    facts = (dtypes, q_shape, k_shape, v_shape, layout, scale, causal, causal_offset, has_window)
    facts += (left, right, precision)
    try:
        return _cached_call(*facts)
    except TypeError:  # a bad kind, or one that cannot be hashed: built again it says which
        pass
    return _build_call(*facts)


def _build_call(
    dtypes, q_shape, k_shape, v_shape, layout, scale, causal, causal_offset, has_window, left,
    right, precision,
) -> Call:  # fmt: skip
    dtype = _check_dtypes(dtypes)
    _check_choice("layout", layout, LAYOUTS)
    _check_precision(precision, dtype)
    q, k, v = (
        _internal_shape(name, shape, layout)
        for name, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape))
    )
    num_heads, seqlen_q, head_dim = q[-3:]
    num_kv_heads, seqlen_k, _ = k[-3:]
    head_dim_v = v[-1]
    _check_sizes(q, k, v, q_shape, k_shape, v_shape)
    batch = _broadcast(q_shape, k_shape, v_shape, q[:-3], k[:-3], v[:-3])
    band = _band(seqlen_q, seqlen_k, causal, causal_offset, has_window, left, right)
    problem = Problem(
        dtype=dtype,
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=_resolve_scale(scale, head_dim, dtype),
        band=band,
        precision=precision,
    )
    if len(q_shape) == len(k_shape) == len(v_shape) == 2:
        lse_shape = (seqlen_q,)
    elif layout == "bshd":
        lse_shape = (*batch, seqlen_q, num_heads)
    else:
        lse_shape = (*batch, num_heads, seqlen_q)
    direct = layout == "bhsd" and all(
        len(shape) > 2 and shape[:-3] == batch for shape in (q_shape, k_shape, v_shape)
    )
    trivial = math.prod(lse_shape) == 0 or seqlen_k == 0
    return Call(problem, layout, (*lse_shape, head_dim_v), lse_shape, direct, trivial)


# typed=True: 1, 1.0 and True are equal as keys, but only some of them are valid for each option.
_cached_call = lru_cache(maxsize=4096, typed=True)(_build_call)


def _check_choice(name: str, value, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name}={show(value)}: it must be {' or '.join(map(repr, choices))}")


def _check_dtypes(dtypes: tuple[str, str, str]) -> str:
    for name, dtype in zip("qkv", dtypes):
        if dtype not in DTYPES:
            raise TypeError(
                f"{name}: its dtype is {dtype}, but it must be one of {', '.join(DTYPES)}, in "
                "native byte order"
            )
    if len(set(dtypes)) != 1:
        raise TypeError(
            f"the dtypes of q, k and v are {', '.join(dtypes)}: they must be equal (nothing is "
            "promoted silently)"
        )
    return dtypes[0]


def _check_precision(precision, dtype: str) -> None:
    if precision is None:
        return
    if not isinstance(precision, str) or precision != "tf32":
        kind = ValueError if isinstance(precision, str) else TypeError
        raise kind(f"precision={show(precision)}: it must be None or 'tf32'")
    if dtype != "float32":
        raise ValueError(f"precision='tf32' with dtype {dtype}: it needs float32 arrays")


def _internal_shape(name: str, shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """(*batch, H, L, D) from the caller's layout; a 2-D array is one head."""
    if len(shape) < 2:
        axes = "heads, length" if layout == "bhsd" else "length, heads"
        raise ValueError(
            f"{name}: its shape is {shape}, but it must be (..., {axes}, head_dim), or "
            "(length, head_dim) for one head"
        )
    if len(shape) == 2:
        return (1, *shape)
    if layout == "bshd":
        return (*shape[:-3], shape[-2], shape[-3], shape[-1])
    return tuple(shape)


def _check_sizes(q, k, v, q_shape, k_shape, v_shape) -> None:
    """q, k, v are internal shapes, the others the caller's."""
    if q[-1] != k[-1]:
        raise ValueError(
            f"k: its head_dim is {k[-1]} (shape {k_shape}), but it must be q's, {q[-1]} (shape "
            f"{q_shape})"
        )
    check_head_dim("q", "head_dim", q[-1], q_shape)
    check_head_dim("v", "head_dim_v", v[-1], v_shape)
    if k[-2] != v[-2]:
        raise ValueError(
            f"v: its length is {v[-2]} (shape {v_shape}), but it must be k's, {k[-2]} (shape "
            f"{k_shape})"
        )
    if k[-3] != v[-3]:
        raise ValueError(
            f"v: it has {v[-3]} heads (shape {v_shape}), but it must have k's, {k[-3]} (shape "
            f"{k_shape})"
        )
    num_heads, num_kv_heads = q[-3], k[-3]
    if (num_heads % num_kv_heads if num_kv_heads else num_heads) != 0:
        raise ValueError(
            f"q: it has {num_heads} heads (shape {q_shape}), but it must have a multiple of the "
            f"{num_kv_heads} heads of k and v (shape {k_shape})"
        )
    if q[-2] + k[-2] >= 2**31:
        raise NotImplementedError(
            f"q and k: their lengths are {q[-2]} and {k[-2]}, but the sum must be below 2**31"
        )


def _broadcast(q_shape, k_shape, v_shape, *batches) -> tuple[int, ...]:
    """NumPy's rule for the leading axes: aligned at the right, equal or 1."""
    rank = max(map(len, batches))
    result = []
    for axis in range(-rank, 0):
        sizes = {batch[axis] for batch in batches if len(batch) >= -axis} - {1}
        if len(sizes) > 1:
            raise ValueError(
                f"the leading axes of q {q_shape}, k {k_shape} and v {v_shape} do not broadcast: "
                f"along one of them the sizes are {sorted(sizes)}, but sizes must be equal or 1"
            )
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def _resolve_scale(scale, head_dim: int, dtype: str) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if is_bool(scale) or not isinstance(scale, Real):
        raise TypeError(f"scale={show(scale)}: it must be None (1/sqrt(head_dim)) or a real number")
    try:
        value = float(scale)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or (dtype != "float64" and abs(value) > _FLOAT32_MAX):
        computed = "float64" if dtype == "float64" else "float32"
        raise ValueError(
            f"scale={show(scale)}: it must be finite in {computed}, the dtype of the scores"
        )
    return value


def _window_pair(window):
    """Only the form is checked here: left and right are, behind the cache."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        kind = ValueError if isinstance(window, (tuple, list)) else TypeError
        raise kind(
            f"window={show(window)}: it must be None or a pair (left, right) of whole numbers or "
            "None"
        )
    return window


def _window_side(name: str, value) -> int | None:
    if value is None:
        return None
    if not is_int(value):
        raise TypeError(f"window: {name}={show(value)}: it must be a whole number or None")
    if value < -1:
        raise ValueError(
            f"window: {name}={value}: it must be at least 0, or -1 or None for no bound"
        )
    return None if value == -1 else int(value)


def _band(seqlen_q, seqlen_k, causal, causal_offset, has_window, left, right) -> Band | None:
    """None when it hides nothing for these lengths."""
    named = isinstance(causal, str)
    if causal not in ("bottom_right", "top_left") if named else not is_bool(causal):
        kind = ValueError if named else TypeError
        raise kind(f"causal={show(causal)}: it must be False, True, 'bottom_right' or 'top_left'")
    left, right = _window_side("left", left), _window_side("right", right)
    offset = 0 if named and causal == "top_left" else seqlen_k - seqlen_q
    if causal_offset is not None:
        if not is_int(causal_offset):
            raise TypeError(
                f"causal_offset={show(causal_offset)}: it must be a whole number or None"
            )
        if named:
            raise ValueError(
                f"causal_offset={causal_offset} with causal={causal!r}: the name already fixes "
                "the offset; use causal=True with an offset of your own"
            )
        if not causal and not has_window:
            raise ValueError(
                f"causal_offset={causal_offset} with neither causal=True nor window: it would have "
                "no effect"
            )
        offset = int(causal_offset)
    lo = -seqlen_q if left is None else offset - left
    hi = seqlen_k if right is None else offset + right
    if causal:
        hi = min(hi, offset)
    # When the last row sees key 0, and the first row the last key, every row sees every key.
    if seqlen_q == 0 or seqlen_k == 0 or (lo + seqlen_q - 1 <= 0 and hi >= seqlen_k - 1):
        return None
    return Band(lo=min(max(lo, -seqlen_q), seqlen_k), hi=min(max(hi, -seqlen_q - 1), seqlen_k))
