"""Printable cases (shapes, dtypes, strides, options of one call) and strategies that draw them."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import dataclass, fields

import numpy as np
from conftest import CUPY, UINT, np_dtype
from hypothesis import strategies as st

DTYPES = ("float32", "float64", "float16", "bfloat16")
# On a GPU every structure is a kernel to compile, so each dtype has few head dims here, of which
# the first also
# serves the unusual scales; SWEPT_DIMS are the rest, for which test_contract.py varies little else.
DIMS = {
    "float32": ((7, 12), (64, 64), (8, 8), (1, 3)),
    "float64": ((8, 8), (1, 3), (40, 72)),
    "float16": ((8, 8), (64, 64), (40, 72), (7, 12)),
    "bfloat16": ((1, 3), (128, 128), (64, 64), (8, 8)),
}
SWEPT_DIMS = (
    (2, 3),
    (5, 256),
    (16, 8),
    (46, 46),
    (64, 32),
    (72, 40),
    (80, 80),
    (96, 96),
    (120, 7),
    (160, 160),
    (192, 128),
    (224, 224),
    (256, 256),
    (255, 1),
)
LENGTHS = (1, 2, 3, 5, 9, 16, 63, 64, 65, 127, 128, 129, 238, 257, 600)
GUARD = 32  # elements of NaN on both sides of a packed array; a multiple of 16 bytes in every dtype


@dataclass(frozen=True, repr=False)
class Case:
    """One call. Its repr is valid Python and shows what differs from the defaults: paste it into an
    @example.
    """

    seqlen_q: int = 4
    seqlen_k: int = 4
    head_dim: int = 8
    head_dim_v: int = 8
    num_heads: int = 1
    num_kv_heads: int = 1
    batch_q: tuple = ()
    batch_k: tuple = ()
    batch_v: tuple = ()
    dtype: str = "float32"
    layout: str = "bhsd"
    causal: bool | str = False
    causal_offset: int | None = None
    window: tuple | None = None
    scale: float | None = None
    values: str = "normal"  # or peaked, equal, near -120, integers
    strides: tuple = ("packed",) * 5  # of q, k, v, dout, out: keys of STRIDES
    seed: int = 0
    tile: tuple | None = None  # queries, keys, stages of a Hopper tile in place of the table's
    scores: tuple = ()  # names of options on scores, see score_cases.py

    def __repr__(self):
        shown = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"Case({', '.join(shown)})"

    @property
    def options(self):
        """The keywords of the call, without those at their defaults."""
        named = dict(
            scale=self.scale,
            causal=self.causal,
            causal_offset=self.causal_offset,
            window=self.window,
            layout=self.layout,
        )
        defaults = dict(scale=None, causal=False, causal_offset=None, window=None, layout="bhsd")
        return {name: value for name, value in named.items() if value != defaults[name]}

    @property
    def batch(self):
        return np.broadcast_shapes(self.batch_q, self.batch_k, self.batch_v)

    @property
    def group(self):
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1

    @property
    def scale_value(self):
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def shape(self, name):
        """Shape of q, k, v, out, dout or lse in the call's layout."""
        batch, heads, length, dim = {
            "q": (self.batch_q, self.num_heads, self.seqlen_q, self.head_dim),
            "k": (self.batch_k, self.num_kv_heads, self.seqlen_k, self.head_dim),
            "v": (self.batch_v, self.num_kv_heads, self.seqlen_k, self.head_dim_v),
            "out": (self.batch, self.num_heads, self.seqlen_q, self.head_dim_v),
        }["out" if name in ("dout", "lse") else name]
        inner = (heads, length, dim) if self.layout == "bhsd" else (length, heads, dim)
        return (*batch, *inner[:2]) if name == "lse" else (*batch, *inner)

    def arrays(self):
        """{name: C-contiguous NumPy array} for q, k, v, dout (the call's dtype) and dlse."""
        rng = np.random.default_rng(self.seed)
        drawn = {
            name: rng.standard_normal(self.shape(name)) for name in ("q", "k", "v", "dout", "lse")
        }
        if self.values == "peaked":
            drawn["q"], drawn["k"] = 8 * drawn["q"], 8 * drawn["k"]
        elif self.values == "equal":
            drawn = {name: np.full(a.shape, 0.5) for name, a in drawn.items()}
        elif self.values == "near -120":
            drawn["q"] = np.ones(self.shape("q"))
            drawn["k"] = (drawn["k"] - 120) / (self.head_dim * (self.scale_value or 1.0))
        elif self.values == "integers":
            drawn["v"], drawn["dout"] = np.round(2 * drawn["v"]), np.round(2 * drawn["dout"])
        dtype = np_dtype(self.dtype)
        dlse = drawn.pop("lse").astype("float64" if self.dtype == "float64" else "float32")
        return {**{name: a.astype(dtype) for name, a in drawn.items()}, "dlse": dlse}


# Each recipe: (xp, shape, dtype, fill) -> memory full of `fill`, and a view of that shape in it.


def _packed(xp, shape, dtype, fill, start=GUARD):
    size = math.prod(shape)
    memory = xp.full(size + 2 * GUARD, fill, dtype=dtype)
    return memory, memory[start : start + size].reshape(shape)


def _offset1(xp, shape, dtype, fill):
    return _packed(xp, shape, dtype, fill, start=1)


def _sliced(index, widen):
    """Memory of shape widen(shape), viewed through index."""

    def recipe(xp, shape, dtype, fill):
        memory = xp.full(widen(shape), fill, dtype=dtype)
        return memory, memory[index]

    return recipe


def _permuted(move):
    """Memory whose axes lie in another order; move is its own inverse."""

    def recipe(xp, shape, dtype, fill):
        memory = move(xp.full(move(np.empty(shape, np.uint8)).shape, fill, dtype=dtype))
        return memory, memory

    return recipe


def _odd1(xp, shape, dtype, fill):
    """Packed, but axes of size 1 have odd strides, one beyond 32 bits: they mean nothing."""
    memory, view = _packed(xp, shape, dtype, fill)
    odd = itertools.cycle((7, 2**33 + 1, 0))
    strides = tuple(next(odd) * view.itemsize if n == 1 else s for n, s in zip(shape, view.strides))
    return memory, xp.lib.stride_tricks.as_strided(view, shape, strides)


STRIDES = {
    "packed": _packed,
    "offset1": _offset1,
    "pitch+3": _sliced((..., slice(3, None)), lambda s: (*s[:-1], s[-1] + 3)),
    "pitch+16": _sliced((..., slice(0, -16)), lambda s: (*s[:-1], s[-1] + 16)),
    "rows+2": _sliced((..., slice(1, -1), slice(None)), lambda s: (*s[:-2], s[-2] + 2, s[-1])),
    "step2": _sliced((..., slice(None, None, 2)), lambda s: (*s[:-1], 2 * s[-1])),
    "step2 rows": _sliced(
        (..., slice(1, None, 2), slice(None)), lambda s: (*s[:-2], 2 * s[-2], s[-1])
    ),
    "reversed": _sliced((..., slice(None, None, -1)), lambda s: s),
    "reversed rows": _sliced((..., slice(None, None, -1), slice(None)), lambda s: s),
    "fortran": _permuted(lambda a: a.transpose()),
    "swap -1 -2": _permuted(lambda a: a.swapaxes(-1, -2)),
    "swap -2 -3": _permuted(lambda a: a.swapaxes(-2, -3) if a.ndim > 2 else a),
    "swap 0 -2": _permuted(lambda a: a.swapaxes(0, -2)),
    "size-1 odd": _odd1,
    **{f"stride 0 at {axis}": axis for axis in (-1, -2, -3, -4)},
}
WRITABLE = tuple(name for name, recipe in STRIDES.items() if callable(recipe))


class Placed:
    """An array of a home laid out by a recipe, in memory that is NaN wherever the array is not."""

    def __init__(self, home, values, recipe="packed"):
        self.home, self.dtype = home, values.dtype
        bits = np.ascontiguousarray(values).view(UINT[values.dtype.itemsize])
        fill = int(np.array(np.nan).astype(values.dtype).view(bits.dtype))
        shape, make = bits.shape, STRIDES[recipe]
        if not callable(make):  # stride 0: keep the first entry of that axis, then repeat it
            if len(shape) >= -make and shape[make] > 0:
                bits = bits.take([0], axis=make)
            make = _packed
        self.memory, view = make(home.xp, bits.shape, bits.dtype, fill)
        view[...] = home.xp.asarray(bits)
        self.before = home.asnumpy(self.memory)
        view = home.xp.broadcast_to(view, shape) if view.shape != shape else view
        self.array = view.view(values.dtype)

    @property
    def values(self):
        return self.home.asnumpy(self.array)

    def unchanged(self):
        """Not one bit of the memory, inside or around the array, has changed."""
        return np.array_equal(self.before, self.home.asnumpy(self.memory))

    def guard_unchanged(self):
        """Nothing around the array has changed: with the array's own bits put back, all is as
        before.
        """
        after = self.home.asnumpy(self.memory)
        inside = self.array.view(UINT[self.dtype.itemsize])
        kept = inside.copy()
        inside[...] = 1
        where = self.home.asnumpy(self.memory)
        inside[...] = 2
        where = where != self.home.asnumpy(self.memory)
        inside[...] = kept
        return np.array_equal(self.before[~where], after[~where])


def place(home, case, arrays=None):
    """{name: Placed} for q, k, v, dout of a case, and for out, which holds NaN."""
    arrays = case.arrays() if arrays is None else arrays
    out = np.full(case.shape("out"), np.nan).astype(np_dtype(case.dtype))
    named = {**{name: arrays[name] for name in ("q", "k", "v", "dout")}, "out": out}
    return {
        name: Placed(home, array, recipe)
        for (name, array), recipe in zip(named.items(), case.strides)
    }


# Tiles of the Hopper family that fit its shared memory at every head dimension, with one, two and
# three warpgroups of consumers; the last one's registers hold values of up to 128 dimensions.


def thinned(step, *axes):
    """Every `step`-th of all combinations: on a GPU each builds kernels of its own."""
    return list(itertools.product(*axes))[::step]


HOPPER_TILES = (
    (64, 64, 2),
    (128, 64, 2),
    (192, 48, 2),
    # late, in turns, one place for queries, lazy; then not fused, late, every block for everybody
    (192, 48, 3, True, True, True, 1, True),
    (128, 48, 2, False, True, False, 2, False, False),
)


@contextlib.contextmanager
def forced_tile(case, home):
    """Forward runs with the case's tile where that family can run it."""
    if case.tile is None or not home.is_gpu:
        yield
        return
    from cuflash import launch
    from cuflash.families import sm90

    real = launch.forward

    def forward(*arguments, **keywords):
        try:
            real(*arguments, **keywords, tile=sm90.Tile(*case.tile))
        except NotImplementedError:
            real(*arguments, **keywords)

    launch.forward = forward
    try:
        yield
    finally:
        launch.forward = real


@st.composite
def bands(draw, seqlen_q, seqlen_k):
    """causal, causal_offset and window, in every valid combination."""
    near = st.sampled_from((0, 1, 2, 5, 100)) | st.integers(0, seqlen_k + 1)
    side = st.sampled_from((None, -1)) | near
    window = draw(st.none() | st.tuples(side, side) | st.just((max(seqlen_k - 1, 0), 0)))
    causal = draw(st.sampled_from((False, True, "bottom_right", "top_left")))
    offset = None
    if causal is True or (causal is False and window is not None):
        offset = draw(st.none() | st.integers(-seqlen_q - 1, seqlen_k + 1))
    return dict(causal=causal, causal_offset=offset, window=window)


@st.composite
def batches(draw):
    """Leading axes of q, k and v that broadcast together."""
    batch = draw(st.sampled_from(((), (), (1,), (2,), (3,), (2, 1), (2, 3))))

    def one():
        kept = tuple(n if draw(st.integers(0, 3)) else 1 for n in batch)
        return kept[draw(st.sampled_from((0, 0, 0, len(batch)))) :]

    return one(), one(), one()


@st.composite
def cases(
    draw,
    dtypes=DTYPES,
    lengths=LENGTHS,
    band=True,
    plain=False,
    scales=(None, None, None, 0.0, -0.5, 1e-3, 10),
    values=("normal", "normal", "peaked", "equal", "near -120"),
):
    """Cases of bounded work. plain: no broadcasting, packed arrays, one layout."""
    seqlen_q, seqlen_k = draw(st.sampled_from(lengths)), draw(st.sampled_from(lengths))
    dtype = draw(st.sampled_from(dtypes))
    scale = draw(st.sampled_from(scales))
    unusual = scale is not None and scale <= 0
    head_dim, head_dim_v = draw(st.sampled_from(DIMS[dtype][: 1 if unusual else None]))
    kv_heads, group = draw(
        st.sampled_from(((1, 1), (2, 1), (1, 2), (2, 3), (1, 5), (3, 2), (1, 12)))
    )
    batch = draw(batches())
    if plain:
        batch = (np.broadcast_shapes(*batch),) * 3
    while seqlen_q * seqlen_k * kv_heads * group * math.prod(np.broadcast_shapes(*batch)) > 2**18:
        if batch != ((), (), ()):
            batch = ((), (), ())
        elif kv_heads * group > 2:
            kv_heads, group = 1, 2
        else:
            break
    strides = ("packed",) * 5
    if not plain:
        readable = st.sampled_from(("packed", *STRIDES))
        strides = (*(draw(readable) for _ in range(4)), draw(st.sampled_from(WRITABLE)))
    return Case(
        seqlen_q,
        seqlen_k,
        head_dim,
        head_dim_v,
        kv_heads * group,
        kv_heads,
        *batch,
        dtype=dtype,
        layout="bhsd" if plain else draw(st.sampled_from(("bhsd", "bshd"))),
        **(draw(bands(seqlen_q, seqlen_k)) if band else {}),
        scale=scale,
        values="normal" if scale == 10 else draw(st.sampled_from(values)),
        strides=strides,
        seed=draw(st.integers(0, 2**16)),
        tile=draw(_tiles()),
    )


def _tiles():
    """None and, where they can run, the tiles of the Hopper family."""
    hopper = CUPY is not None and CUPY.xp.cuda.Device().compute_capability == "90"
    return st.sampled_from((None, None, *HOPPER_TILES)) if hopper else st.none()
