"""What is passed to a kernel: one struct a kernel, defined once here for Python and for C++.

A table row is (name, kind). The C++ text and the packer come from the same rows, in the same order,
with C's alignment, so they cannot drift apart.
"""

from __future__ import annotations

import ctypes
import struct
from functools import lru_cache

from .plan import round_up

BATCH_DIMS = 3  # kBatchDims in kernels_cu/types.cuh
STRIDES = BATCH_DIMS + 3
MAP_BYTES = 128
SPARE_ROWS = 256  # kSpareRows in kernels_cu/attn/interval.cuh

# kind -> (C++ declaration, struct code, how many values)
KINDS = {
    "in": ("const void* {}", "P", 1),
    "out": ("void* {}", "P", 1),
    "word": ("u64 {}", "P", 1),  # any 64 bits that change from launch to launch
    "i32": ("i32 {}", "i", 1),
    "u32": ("u32 {}", "I", 1),
    "i64": ("i64 {}", "q", 1),
    "f32": ("float {}", "f", 1),
    "f64": ("double {}", "d", 1),
    "strides": ("Strides {}", f"{STRIDES}q", STRIDES),
    "sizes": (f"i32 {{}}[{BATCH_DIMS}]", f"{BATCH_DIMS}i", BATCH_DIMS),
    "map": ("TensorMap {}", "128s", 1),
}

WORDS = ("in", "out", "word")  # what each launch writes

_SHAPE = [
    ("batch_sizes", "sizes"),
    ("num_heads", "u32"),
    ("group", "u32"),
    ("seqlen_q", "i32"),
    ("seqlen_k", "i32"),
    ("head_dim", "i32"),
    ("head_dim_v", "i32"),
    ("num_blocks", "u32"),
]
_SECTION = [("section", "u32"), ("num_sectioned", "u32")]
_BAND = [("band_lo", "i32"), ("band_hi", "i32")]
# Statistics of each row of queries, (batch * head, 3, row) with stats_pitch rows: row_max, row_sum
# (attn/stats.cuh), delta.
_STATS = ("stats", "out")

# Tensor maps come first, then pointers: a launch that differs from an earlier one in its arrays
# only packs these anew.
TABLES = {
    "forward": [
        ("q", "in"),
        ("k", "in"),
        ("v", "in"),
        ("out", "out"),
        ("lse", "out"),
        _STATS,
        ("q_strides", "strides"),
        ("k_strides", "strides"),
        ("v_strides", "strides"),
        ("out_strides", "strides"),
        ("lse_strides", "strides"),
        *_SHAPE,
        *_SECTION,
        *_BAND,
        ("scale_log2", "f64"),
        ("stats_pitch", "i64"),
        ("lse_threshold", "f64"),
    ],
    "forward_sm90": [
        ("q_map", "map"),
        ("k_map", "map"),
        ("v_map", "map"),
        ("out_map", "map"),
        ("v", "in"),
        ("out", "out"),
        ("lse", "out"),
        ("ticket", "out"),
        ("v_strides", "strides"),
        ("out_strides", "strides"),
        ("lse_strides", "strides"),
        *_SHAPE,
        *_SECTION,
        ("num_work", "u32"),
        *_BAND,
        ("scale_log2", "f32"),
    ],
    "backward": [
        ("q", "in"),
        ("k", "in"),
        ("v", "in"),
        ("dout", "in"),
        ("dk", "out"),
        ("dv", "out"),
        ("dq_accum", "out"),
        ("flags", "out"),
        ("ticket", "out"),
        _STATS,
        ("q_strides", "strides"),
        ("k_strides", "strides"),
        ("v_strides", "strides"),
        ("dout_strides", "strides"),
        ("dk_strides", "strides"),
        ("dv_strides", "strides"),
        *_SHAPE,
        *_SECTION,
        *_BAND,
        ("scale_log2", "f64"),
        ("scale", "f64"),
        ("stats_pitch", "i64"),
        ("accum_pitch", "i64"),
        ("num_m_blocks", "u32"),
    ],
    "backward_sm90": [
        ("q_map", "map"),
        ("k_map", "map"),
        ("v_map", "map"),
        ("dout_map", "map"),
        ("q", "in"),
        ("k", "in"),
        ("dout", "in"),
        ("dk", "out"),
        ("dv", "out"),
        ("dq_accum", "out"),
        ("flags", "out"),
        ("ticket", "out"),
        _STATS,
        ("q_strides", "strides"),
        ("k_strides", "strides"),
        ("dout_strides", "strides"),
        ("dk_strides", "strides"),
        ("dv_strides", "strides"),
        *_SHAPE,
        *_SECTION,
        *_BAND,
        ("scale_log2", "f64"),
        ("scale", "f64"),
        ("stats_pitch", "i64"),
        ("accum_pitch", "i64"),
        ("num_m_blocks", "u32"),
        ("turn_group", "u32"),
        ("last_turn_group", "u32"),
    ],
    "delta": [
        ("out", "in"),
        ("dout", "in"),
        ("lse", "in"),
        ("dlse", "in"),
        _STATS,
        ("flags", "out"),
        ("out_strides", "strides"),
        ("dout_strides", "strides"),
        ("lse_strides", "strides"),
        ("dlse_strides", "strides"),
        *_SHAPE,
        ("stats_pitch", "i64"),
        ("num_flags", "i64"),
    ],
    "cast": [
        ("accum", "in"),
        ("dq", "out"),
        ("dq_strides", "strides"),
        *_SHAPE,
        *_BAND,
        ("scale", "f64"),
        ("accum_pitch", "i64"),
    ],
    "pair_gradient": [
        ("squares", "in"),
        ("gradient", "out"),
        ("gradient_strides", "strides"),
        *_SHAPE,
        *_BAND,
        ("num_key_blocks", "u32"),
    ],
    "row_norm": [
        ("x", "in"),
        ("most", "out"),
        ("x_strides", "strides"),
        *_SHAPE,
    ],
    "offsets": [
        ("q_given", "in"),
        ("k_given", "in"),
        ("q_offsets", "out"),
        ("k_offsets", "out"),
        ("shifts", "out"),
        ("sequences", "i32"),
        ("seqlen_q", "i32"),
        ("seqlen_k", "i32"),
    ],
    "intervals": [
        ("q_offsets", "in"),
        ("k_offsets", "in"),
        ("q_intervals", "out"),
        ("k_intervals", "out"),
        ("q_places", "out"),
        ("k_places", "out"),
        ("sequences", "i32"),
        ("seqlen_q", "i32"),
        ("seqlen_k", "i32"),
        ("left", "i64"),
        ("right", "i64"),
        ("shift", "i64"),
        ("bottom_right", "i32"),
    ],
    "span_lists": [
        ("q_ids", "in"),
        ("k_ids", "in"),
        ("lists", "out"),
        ("seqlen_q", "i32"),
        ("seqlen_k", "i32"),
        *_BAND,
        ("num_rows", "u32"),
        ("row_length", "i32"),
    ],
    "block_map": [
        ("kinds", "out"),
        *_SHAPE,
        *_BAND,
        ("map_block_q", "i32"),
        ("map_block_k", "i32"),
        ("num_key_blocks", "u32"),
    ],
    "mask_bits": [
        ("bits", "out"),
        *_SHAPE,
        *_BAND,
        ("num_key_blocks", "u32"),
        ("row_words", "i32"),
    ],
    "combine": [
        ("outs", "in"),
        ("lses", "in"),
        ("out", "out"),
        ("lse", "out"),
        ("rows", "i64"),
        ("count", "i32"),
        ("head_dim_v", "i32"),
    ],
}


def rows(table: str, operands: tuple = ()) -> list[tuple[str, str]]:
    """A table with the rows that a plan adds to it, what each launch writes in front."""
    both = [*TABLES[table], *operands]
    # The sort keeps the order inside each part.
    return sorted(both, key=lambda row: _place(row[1]))


def _place(kind: str) -> int:
    return 0 if kind == "map" else 1 if kind in WORDS else 2


def text(table: str, operands: tuple = ()) -> str:
    """The C++ definition of ``struct Params`` of a table."""
    lines = [f"    {KINDS[kind][0].format(name)};" for name, kind in rows(table, operands)]
    return "struct Params {\n" + "\n".join(lines) + "\n};\n"


class Layout:
    """The bytes of one table's struct: tensor maps in front, pointers, then everything else.

    Attributes
    ----------
    size : int
        sizeof(Params).
    num_maps : int
        How many tensor maps it begins with.
    num_pointers : int
        How many pointers, or other words of a launch, follow.
    """

    def __init__(self, table: str, operands: tuple = ()):
        kinds = [kind for _, kind in TABLES[table]]
        if kinds != sorted(kinds, key=_place):
            raise ValueError(f"table {table}: pointers must come first, behind tensor maps")
        kinds = [kind for _, kind in rows(table, operands)]
        self.num_maps = kinds.count("map")
        kinds = kinds[self.num_maps :]
        self.num_pointers = sum(kind in WORDS for kind in kinds)
        self._pointers = struct.Struct(f"@{self.num_pointers}P")
        # 0q: padded at the end to the struct's own alignment, as C does. Pointers keep 8-byte
        # alignment.
        rest = "".join(KINDS[kind][1] for kind in kinds[self.num_pointers :])
        self._rest = struct.Struct(f"@{rest}0q")
        # A tensor map lies on a multiple of 64 bytes, and so does the struct's end.
        size = MAP_BYTES * self.num_maps + self._pointers.size + self._rest.size
        self.size = round_up(size, 64) if self.num_maps else size

    def rest(self, *values) -> bytes:
        """All values after the pointers, flat and in the table's order."""
        return self._rest.pack(*values)

    def room(self, rest: bytes) -> Room:
        """A struct with everything after its pointers."""
        return Room(self, rest)


class Room:
    """One struct at a fixed address, for one launch at a time: the driver copies it when it
    launches.

    Attributes
    ----------
    struct : ctypes array of char
    address : int
        Of the list of the kernel's arguments, which has this struct alone.
    mapped : list of int
        Where the arrays begin whose tensor maps are in the struct.
    """

    def __init__(self, layout: Layout, rest: bytes):
        self.struct = ctypes.create_string_buffer(layout.size)
        self._offset = MAP_BYTES * layout.num_maps
        self._pack = layout._pointers.pack_into
        after = self._offset + layout._pointers.size
        self.struct[after : after + len(rest)] = rest
        self._argument = ctypes.c_void_p(ctypes.addressof(self.struct))
        self.address = ctypes.addressof(self._argument)
        self.mapped = [0] * layout.num_maps

    def point(self, *pointers: int) -> None:
        """Write the pointers."""
        self._pack(self.struct, self._offset, *pointers)

    def write_map(self, number: int, pointer: int, tensor_map: bytes) -> None:
        """Write the map of the array that begins at ``pointer``."""
        self.struct[MAP_BYTES * number : MAP_BYTES * (number + 1)] = tensor_map
        self.mapped[number] = pointer


@lru_cache(maxsize=None)
def layout(table: str, operands: tuple = ()) -> Layout:
    return Layout(table, operands)
