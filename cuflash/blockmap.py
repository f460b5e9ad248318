"""Block maps: which blocks of pairs a call visits at all, and in which it looks at masks."""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import numpy as np

from .arrays import CPU, dtype_name, home_of
from .checks import is_int, show
from .mask_bits import own_axes
from .score import constant

EMPTY, PARTIAL, FULL = 0, 1, 2
_SIGNS = ".+#"
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_WIDTH = 64  # characters of a picture


class MapView(NamedTuple):
    """A map as one call sees it."""

    kinds: Any  # (*batch, Hq, query blocks, key blocks), by strides
    owner: BlockMap
    index: tuple = ()  # of further axes in front, in a launch for some of a batch

    @property
    def block(self):
        return self.owner.block

    def at(self, index) -> MapView:
        return self._replace(kinds=self.kinds[index], index=(*self.index, *index))


class BlockMap:
    """Which blocks of (query, key) pairs are empty, partly visible or full.

    For `block_map` of :func:`cuflash.attention`: an empty block hides its pairs and is skipped; in
    a full one mask, mask_mod, lengths and segment ids hide nothing, which the map promises, so that
    they need not be looked at; in a partial one they decide, pair by pair. Causal and window hold
    everywhere.

    Parameters
    ----------
    kinds : array (..., query blocks, key blocks) of int
        0 for an empty, 1 for a partial, 2 for a full block, of any library; copied. Its leading
        axes broadcast to (..., Hq). Other values raise ValueError in host memory; on a GPU, where
        looking would mean waiting, they count as the nearest of the three.
    block : tuple (int, int)
        Queries and keys of a block. The last blocks may reach beyond the ends of the sequences. On
        the GPU multiples of 128 cost least: a block that is cut otherwise is looked at pair by pair
        where it meets an empty one.

    Attributes
    ----------
    kinds : array of uint8
        As given, a NumPy or CuPy array. It must not be changed.
    block : tuple (int, int)

    Raises
    ------
    TypeError, ValueError, BufferError
        For what is no array of whole numbers, or has fewer than two axes, and for other blocks.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> kinds = np.tri(4, dtype=int) + np.tri(4, k=-1, dtype=int)
    >>> print(cuflash.BlockMap(kinds))
    BlockMap of 4 x 4 blocks of 128 x 128, density 62.5 % (. empty, + partial, # full)
    +...
    #+..
    ##+.
    ###+
    """

    def __init__(self, kinds, block=(128, 128)):
        self.block = _block_sizes(block)
        home = home_of([("kinds", kinds)])
        self.device = home.device
        with home.scope():
            array = home.adopt("kinds", kinds)
            if dtype_name(array.dtype) not in _INTEGERS:
                raise TypeError(f"kinds: its dtype is {array.dtype}, but it must be whole numbers")
            if array.ndim < 2:
                raise ValueError(
                    f"kinds: its shape is {array.shape}, but it must be (..., query blocks, key "
                    "blocks)"
                )
            if home.xp is np and array.size and (array.min() < EMPTY or array.max() > FULL):
                raise ValueError("kinds: it must hold 0 (empty), 1 (partial) and 2 (full) only")
            self.kinds = home.xp.clip(array, EMPTY, FULL).astype(np.uint8)
        self._made: dict = {}  # what launches derive from it, by what it depends on

    @classmethod
    def _of(cls, kinds, block, device) -> BlockMap:
        made = cls.__new__(cls)
        made.kinds, made.block, made.device, made._made = kinds, block, device, {}
        return made

    def _host(self):
        return self.kinds if isinstance(self.kinds, np.ndarray) else self.kinds.get()

    @property
    def density(self) -> float:
        """The share of blocks that are not empty. On a GPU this waits for the map."""
        return np.count_nonzero(self._host()) / max(1, self.kinds.size)

    @property
    def pairs(self) -> int:
        """How many pairs the blocks that are not empty have, each counted whole, over the map's own
        leading axes. On a GPU this waits for the map.
        """
        return int(np.count_nonzero(self._host())) * math.prod(self.block)

    @property
    def transposed(self) -> BlockMap:
        """The map with queries and keys exchanged."""
        return self._of(self.kinds.swapaxes(-1, -2), self.block[::-1], self.device)

    def fit(self, home, heads, seqlens) -> MapView:
        """The map as a call sees it, over (*batch, Hq)."""
        if self.device != home.device:
            own, other = ("the CPU" if d == CPU else f"device {d}" for d in
                          (self.device, home.device))  # fmt: skip
            raise ValueError(f"block_map: it is on {own}, but the arrays are on {other}")
        blocks = tuple(-(-n // size) for n, size in zip(seqlens, self.block))
        given = self.kinds.shape
        if given[-2:] != blocks:
            raise ValueError(
                f"block_map: it has {given[-2]} x {given[-1]} blocks of {self.block}, but "
                f"{seqlens[0]} queries and {seqlens[1]} keys make {blocks[0]} x {blocks[1]}"
            )
        own = (1,) * (len(heads) - len(given) + 2) + given[:-2]
        if len(own) > len(heads) or any(n not in (1, full) for n, full in zip(own, heads)):
            raise ValueError(
                f"block_map: its leading axes are {given[:-2]}, but they must broadcast to "
                f"(..., Hq) = {heads}"
            )
        kinds = self.kinds.reshape(own + blocks)
        return MapView(home.xp.broadcast_to(kinds, (*heads, *blocks)), self)

    def picture(self, index=None, width=_WIDTH) -> str:
        """The map as text, a character a block.

        Parameters
        ----------
        index : tuple of int, optional
            Which of the leading axes; None is the first entry of each.
        width : int
            At most so many characters a line and so many lines. Where there are more blocks, a
            character stands for several: "+" unless all are empty or all full.

        Returns
        -------
        str
        """
        kinds = self._entry(index)
        step = max(1, -(-max(kinds.shape) // width))
        rows = (kinds[m : m + step] for m in range(0, kinds.shape[0], step))
        columns = range(0, kinds.shape[1], step)
        return "\n".join("".join(_sign(row[:, n : n + step]) for n in columns) for row in rows)

    def _entry(self, index):
        axes = self.kinds.ndim - 2
        return self._host()[(0,) * axes if index is None else tuple(index)]

    def __str__(self) -> str:
        *leading, rows, columns = self.kinds.shape
        what = f"{rows} x {columns} blocks of {self.block[0]} x {self.block[1]}"
        heads = f", for leading axes {tuple(leading)}" if math.prod(leading) > 1 else ""
        head = f"BlockMap of {what}{heads}, density {100 * self.density:.1f} %"
        picture = self.picture() if self.kinds.size else ""
        return f"{head} (. empty, + partial, # full)\n{picture}"

    def __repr__(self) -> str:
        return f"<BlockMap {self.kinds.shape} of {self.block[0]} x {self.block[1]}>"

    def save(self, path, index=None) -> None:
        """Draw the map into a file, such as "map.png".

        Parameters
        ----------
        path : str or path
            Its ending says which format.
        index : tuple of int, optional
            As in `picture`.

        Raises
        ------
        ImportError
            Matplotlib is not installed.
        """
        try:
            from matplotlib.colors import ListedColormap
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                f"drawing needs matplotlib, which cannot be imported ({error}): "
                "pip install 'cuflash[bench]'"
            ) from error
        kinds = self._entry(index)
        figure = Figure(figsize=(6, 6), layout="constrained")
        axes = figure.add_subplot()
        colors = ListedColormap(["white", "#9ec5e8", "#1f4e79"])
        extent = (0, kinds.shape[1] * self.block[1], kinds.shape[0] * self.block[0], 0)
        axes.imshow(kinds, cmap=colors, vmin=EMPTY, vmax=FULL, interpolation="nearest",
                    extent=extent)  # fmt: skip
        axes.set(xlabel="key", ylabel="query")
        axes.set_title(f"blocks of {self.block[0]} x {self.block[1]}, "
                       f"density {100 * self.density:.1f} %")  # fmt: skip
        figure.savefig(os.fspath(path), dpi=150)


def block_map(
    q,
    k,
    /,
    *,
    block=(128, 128),
    causal=False,
    causal_offset=None,
    window=None,
    mask=None,
    q_lens=None,
    kv_lens=None,
    q_segment_ids=None,
    kv_segment_ids=None,
    mask_mod=None,
    score_args=(),
    layout="bhsd",
):
    """The :class:`BlockMap` of a call: what its masks let through, block by block.

    Every pair is looked at once, on the arrays' home, so this pays where the map is used often: in
    each layer, in backward, for calls with the same masks. The call itself takes the masks, too;
    they decide in partial blocks.

    Parameters
    ----------
    q, k : array
        As in :func:`cuflash.attention`; only their shapes matter.
    block : tuple (int, int)
        Queries and keys of a block; see :class:`BlockMap`.
    causal, causal_offset, window, mask, q_lens, kv_lens, q_segment_ids, kv_segment_ids, mask_mod, \
score_args, layout
        As in :func:`cuflash.attention`. What differs neither along the batch nor between heads
        makes a map that they share.

    Returns
    -------
    BlockMap

    Raises
    ------
    TypeError, ValueError, NotImplementedError, BufferError, ImportError, RuntimeError
        As :func:`cuflash.attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q = np.zeros((1, 2, 512, 8), np.float32)
    >>> window = lambda b, h, i, j: abs(i - j) < 100
    >>> found = cuflash.block_map(q, q, mask_mod=window)
    >>> print(found.picture())
    ++..
    +++.
    .+++
    ..++
    >>> cuflash.attention(q, q, q, block_map=found, mask_mod=window).shape
    (1, 2, 512, 8)
    """
    from . import edge
    from .options import arrays_of, used

    given = locals()
    names = ("mask", "q_lens", "kv_lens", "q_segment_ids", "kv_segment_ids", "mask_mod",
             "score_args")  # fmt: skip
    scores = used({name: given[name] for name in names})
    sizes = _block_sizes(block)
    home = home_of([("q", q), ("k", k), *arrays_of(scores)])
    with home.scope():
        q, k = home.adopt("q", q), home.adopt("k", k)
        shaping = (layout, None, causal, causal_offset, window, None)
        call = edge.resolve(q, k, k, shaping)
        options = edge.scored(home, call, shaping, scores)
        problem = options.problem
        own = _varying(options)
        blocks = tuple(-(-n // x) for n, x in zip((problem.seqlen_q, problem.seqlen_k), sizes))
        kinds = home.xp.zeros((*own, *blocks), np.uint8)
        if kinds.size:
            home.backend.block_kinds(problem, options.extras, sizes, kinds)
    return BlockMap._of(kinds, sizes, home.device)


def _varying(options) -> tuple[int, ...]:
    """(*batch, Hq), with 1 where all masks are the same."""
    full = (*options.batch, options.heads)
    program = options.problem.program
    given = program is not None and "mask_mod" in options.options
    if given and options.traced_mask is constant(True):
        return full  # a function that cannot be looked into
    if program is None or program.visible is None:
        return (1,) * len(full)
    return own_axes(options.problem, options.operands)


def _block_sizes(block) -> tuple[int, int]:
    rule = "it must be a pair of whole numbers of at least 1, of queries and of keys"
    if not isinstance(block, (tuple, list)) or not all(map(is_int, block)):
        raise TypeError(f"block={show(block)}: {rule}")
    if len(block) != 2 or min(block) < 1:
        raise ValueError(f"block={show(block)}: {rule}")
    return tuple(map(int, block))


def _sign(kinds) -> str:
    return _SIGNS[kinds.flat[0] if (kinds == kinds.flat[0]).all() else PARTIAL]
