"""The portable family: mma.sync kernels for every GPU from compute capability 7.5 on, all dtypes,
all strides.
"""

from __future__ import annotations

from dataclasses import dataclass

from .. import block_lists, score_text
from ..plan import CPP_TYPES, ITEM_BYTES, Plan, round_up, tile_bytes
from ..score_text import ELEMENTS, LENGTHS, Options

NAME = "portable"
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Tile:
    """How one block cuts the problem: kBlockM queries, kBlockN keys, warps, ring stages, blocks
    wanted on an SM.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    blocks_per_sm: int = 1
    slices: int = 1  # blocks that share the rows and divide the columns of the results
    share: int = 1  # backward, 16-bit: warps that share their keys and divide queries and columns
    direct: bool = False  # inputs are read from global memory, not from tiles in shared memory


# Tiles by (item bytes, largest padded head dimension), best first; the first that fits the device's
# shared memory is taken. The first rows of 16-bit types at 64 and 128 were measured
# (bench/tune.py); the others are the largest, found by compiling alone, that keep everything in
# registers (tests/test_compile.py), and not timed yet. Those after the first serve smaller blocks:
# 163 KiB on sm_80, 99 on sm_86 and sm_89, 64 on sm_75. Where 16 queries and 16 keys at full width
# are too many bytes, a direct tile stands last.
FORWARD_TILES = {
    (2, 64): (Tile(128, 128, 4, 2, 2), Tile(128, 64, 4, 2, 2)),
    (2, 128): (Tile(128, 64, 4, 2, 2), Tile(64, 64, 4, 1)),
    (2, 256): (Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(64, 16, 4, 1)),
    (4, 64): (Tile(64, 32, 4, 2, 2),),
    (4, 128): (Tile(64, 16, 4, 2, 2), Tile(64, 16, 4, 1)),
    (4, 192): (Tile(64, 16, 4, 2), Tile(64, 16, 4, 1), Tile(32, 16, 2, 1)),
    (4, 256): (Tile(64, 16, 4, 2, 1, 2), Tile(64, 16, 4, 1, 1, 2), Tile(32, 16, 2, 1, 1, 2)),
    (8, 64): (Tile(64, 16, 4, 2, 2), Tile(64, 16, 4, 1)),
    (8, 96): (Tile(64, 16, 4, 2, 2), Tile(32, 16, 2, 1)),
    (8, 128): (Tile(64, 16, 4, 2, 1, 2), Tile(64, 16, 4, 1, 1, 2), Tile(32, 16, 2, 1, 1, 2)),
    (8, 192): (Tile(64, 16, 4, 2, 1, 2), Tile(32, 16, 2, 1, 1, 4), Tile(16, 16, 1, 1, 1, 4)),
    (8, 256): (
        Tile(64, 16, 4, 1, 1, 4),
        Tile(32, 16, 2, 1, 1, 4),
        Tile(16, 16, 1, 1, 1, 4),
        Tile(64, 16, 4, 1, 1, 4, direct=True),
    ),
}

# In place of those rows where more addresses or another assembler's order exceed the registers: two
# of a band, reads by element and a block map; from sm_100 on one of them.
LEAN_FORWARD_TILES = {
    (2, 64): (Tile(128, 64, 4, 2, 2),),
    (2, 128): (Tile(64, 64, 4, 2, 2), Tile(64, 64, 4, 1)),
}
# The same, from sm_100 on with any mask and access.
RECENT_FORWARD_TILES = {(4, 128): (Tile(64, 16, 4, 2, 1, 2), Tile(64, 16, 4, 1, 1, 2))}

BACKWARD_TILES = {
    (2, 64): (Tile(32, 128, 4, 2, 2), Tile(32, 64, 4, 1, 2)),
    (2, 128): (
        Tile(64, 128, 8, 2, 1, 1, 2),
        Tile(32, 64, 8, 2, 1, 1, 2),
        Tile(32, 64, 8, 1, 1, 1, 2),
    ),
    (2, 192): (
        Tile(64, 64, 8, 2, 1, 1, 2),
        Tile(32, 64, 8, 2, 1, 1, 2),
        Tile(32, 32, 4, 1, 1, 1, 2),
    ),
    (2, 256): (Tile(32, 64, 8, 2, 1, 1, 2), Tile(32, 32, 4, 1, 1, 2, 2), Tile(16, 32, 2, 1, 1, 2)),
    (4, 64): (Tile(16, 64, 4, 2, 2), Tile(16, 64, 4, 1)),
    (4, 128): (Tile(16, 64, 4, 2, 1, 2), Tile(16, 64, 4, 1, 1, 2), Tile(16, 32, 2, 1, 1, 2)),
    (4, 256): (
        Tile(16, 64, 4, 1, 1, 4),
        Tile(16, 32, 2, 1, 1, 4),
        Tile(16, 16, 1, 1, 1, 4),
        Tile(16, 64, 4, 1, 1, 4, direct=True),
    ),
    (8, 64): (Tile(16, 64, 4, 2, 2, 2), Tile(16, 64, 4, 1, 1, 2), Tile(16, 32, 2, 1, 1, 2)),
    (8, 96): (Tile(16, 64, 4, 1, 1, 3), Tile(16, 32, 2, 1, 1, 3), Tile(16, 16, 1, 1, 1, 3)),
    (8, 128): (
        Tile(16, 64, 4, 1, 1, 4),
        Tile(16, 32, 2, 1, 1, 4),
        Tile(16, 16, 1, 1, 1, 4),
        Tile(16, 64, 4, 1, 1, 4, direct=True),
    ),
    (8, 192): (
        Tile(16, 32, 2, 1, 1, 8),
        Tile(16, 16, 1, 1, 1, 6),
        Tile(16, 64, 4, 1, 1, 6, direct=True),
    ),
    (8, 256): (
        Tile(16, 32, 2, 1, 1, 8),
        Tile(16, 16, 1, 1, 1, 8),
        Tile(16, 64, 4, 1, 1, 8, direct=True),
    ),
}

# With scores of the caller's (score_text.py), which need registers of their own: half the rows for
# 16-bit types. Not timed yet.
SCORE_FORWARD_TILES = {
    (2, 64): (Tile(64, 64, 4, 2, 2),),
    (2, 128): (Tile(64, 32, 4, 2, 2), Tile(64, 32, 4, 1)),
    (2, 256): (Tile(64, 32, 4, 2, 1, 2), Tile(64, 16, 4, 1, 1, 2)),
}
SCORE_BACKWARD_TILES = {
    (2, 64): (Tile(32, 64, 4, 2, 2), Tile(32, 64, 4, 1, 2)),
    (2, 128): (Tile(32, 64, 8, 2, 1, 1, 2), Tile(32, 64, 8, 1, 1, 1, 2)),
    (2, 192): (Tile(32, 64, 8, 2, 1, 1, 2), Tile(32, 32, 4, 1, 1, 1, 2)),
}
# The same below sm_80, whose products take more registers.
OLD_SCORE_BACKWARD_TILES = {
    (2, 64): (Tile(32, 64, 8, 2, 1, 1, 2), Tile(32, 64, 8, 1, 1, 1, 2)),
    (2, 256): (Tile(16, 32, 2, 1, 1, 4),),
}


def reject(problem, device, access) -> str | None:
    """Why this family cannot run the problem, or None."""
    if device.capability < 75:
        return f"it needs compute capability 7.5, the device has {device.capability / 10}"
    return None


def _padded(head_dim: int) -> int:
    return round_up(head_dim, 16)


def _sliced(head_dim: int, tile: Tile) -> int:
    """Columns of one slice: whole fragments for each of the warps that share its keys."""
    return round_up(-(-head_dim // tile.slices), 16 * tile.share)


def _forward_tiles(problem, device, access, options):
    """The table that holds for a call."""
    conditions = (problem.bounded, access.load_bytes == 0, problem.block_map is not None)
    recent = device.capability >= 100
    lean = sum(conditions) > 1 or (recent and any(conditions))
    return {
        **FORWARD_TILES,
        **(LEAN_FORWARD_TILES if lean else {}),
        **(RECENT_FORWARD_TILES if recent else {}),
        **(SCORE_FORWARD_TILES if options else {}),
    }


def _backward_tiles(problem, device, options):
    # Products of bfloat16 are calls there, which leave intervals no registers.
    calls = problem.packed and problem.dtype == "bfloat16"
    old = device.capability < 80 and (options or calls)
    return {
        **BACKWARD_TILES,
        **(SCORE_BACKWARD_TILES if options else {}),
        **(OLD_SCORE_BACKWARD_TILES if old else {}),
    }


def _rows(table, problem):
    widest = max(_padded(problem.head_dim), _padded(problem.head_dim_v))
    item = ITEM_BYTES[problem.dtype]
    return table[item, min(dim for size, dim in table if size == item and widest <= dim)]


def _tile_of(direction, table, problem, device, tile, smem) -> tuple[Tile, int]:
    """The tile and its bytes of shared memory: ``tile`` itself, or the first row that fits."""
    if tile is not None:
        return tile, smem(tile)
    tiles = _rows(table, problem)
    for candidate in tiles:
        if smem(candidate) <= device.smem_per_block:
            return candidate, smem(candidate)
    raise NotImplementedError(
        f"{direction} in {problem.dtype} with head_dim {problem.head_dim} and head_dim_v "
        f"{problem.head_dim_v} needs {smem(tiles[-1])} bytes of shared memory a block, the device "
        f"has {device.smem_per_block}"
    )


def forward_smem(problem, tile: Tile, stats: bool) -> int:
    """Bytes of shared memory of fwd_portable.cu: the ring, or the staged output in its place, and
    four values of a block.
    """
    item = ITEM_BYTES[problem.dtype]
    head_dim, head_dim_v = _padded(problem.head_dim), _sliced(problem.head_dim_v, tile)
    stage = tile_bytes(tile.block_n, head_dim, item)
    stage += 0 if stats else tile_bytes(tile.block_n, head_dim_v, item)
    inputs = 0 if tile.direct else tile_bytes(tile.block_m, head_dim, item) + tile.stages * stage
    outputs = 0 if stats else tile_bytes(tile.block_m, head_dim_v, item)
    return max(inputs, outputs) + _value_bytes(problem)


def _value_bytes(problem) -> int:
    """Of a block's values, 16 each."""
    return 64 if problem.block_map is None else 80


def backward_smem(problem, tile: Tile, need_dq: bool) -> int:
    """Bytes of shared memory of bwd_portable.cu: k and v, or the staged dk and dv in their place,
    the ring of q, dout and row statistics, dS^T, four values of a block and a turn for each warp.
    """
    item = ITEM_BYTES[problem.dtype]
    slices = [_sliced(dim, tile) for dim in (problem.head_dim, problem.head_dim_v)]
    widths = slices if tile.direct else [tile.slices * dim for dim in slices]
    keys, queries = (
        sum(tile_bytes(rows, dim, item) for dim in widths)
        for rows in (tile.block_n, tile.block_m)
    )
    stage = 0 if tile.direct else queries
    stage += round_up(tile_bytes(3, tile.block_m, max(item, 4)), 128)
    scores = 2 if tile.share > 1 else int(need_dq)  # tiles of dS^T and P^T
    scores *= tile_bytes(tile.block_n, tile.block_m, item)
    return keys + tile.stages * stage + scores + _value_bytes(problem) + 16 * tile.warps


def _dq_warps(tile: Tile, slice_dim: int) -> tuple[int, int]:
    """How the warps divide dQ, (along queries, along the head dimension): as many as fit, then the
    fewest bytes read.
    """
    options = [
        (-m * d, d * tile.block_m + m * slice_dim, m, d)
        for m in range(1, tile.warps + 1) for d in range(1, tile.warps // m + 1)
        if tile.block_m % (16 * m) == 0 and slice_dim % (16 * d) == 0
    ]
    return min(options)[2:]


def _blocks_per_sm(tile: Tile, smem: int, device) -> int:
    return max(1, min(tile.blocks_per_sm, device.smem_per_sm // (smem + 1024)))


def _common(problem, tile, tail=False):
    tail |= problem.seqlen_q % tile.block_m != 0 or problem.seqlen_k % tile.block_n != 0
    sign = (problem.scale > 0) - (problem.scale < 0)
    return [
        ("Element", CPP_TYPES[problem.dtype]),
        ("kTf32", problem.precision == "tf32"),
        ("kScaleSign", sign),
        ("kBand", problem.bounded),
        ("kIntervals", problem.packed),
        ("kLengths", problem.lengths),
        # Whether a sequence ends inside a block; with a band the masked bodies see to that.
        ("kTail", not problem.bounded and (tail or problem.lengths)),
        ("kBlockMap", problem.block_map is not None),
    ]


def _tile_constants(tile: Tile, smem: int, device):
    return [
        ("kSlices", tile.slices),
        ("kBlockM", tile.block_m),
        ("kBlockN", tile.block_n),
        ("kWarps", tile.warps),
        ("kStages", tile.stages),
        ("kDirect", tile.direct),
        ("kBlocksPerSm", _blocks_per_sm(tile, smem, device)),
        ("kSmemBytes", smem),
    ]


def forward_plan(
    problem, device, access, *, stats: bool = False, tile: Tile | None = None
) -> Plan:
    """The plan of fwd_portable.cu. With ``stats`` the pass that refines row statistics for
    backward.
    """
    options = Options.of(problem, stats=stats)
    tile, smem = _tile_of(
        "forward",
        _forward_tiles(problem, device, access, options),
        problem,
        device,
        tile,
        lambda t: forward_smem(problem, t, stats),
    )
    constants = _common(problem, tile) + [
        ("kHeadDim", _padded(problem.head_dim)),
        ("kHeadDimV", _sliced(problem.head_dim_v, tile)),
        *_tile_constants(tile, smem, device),
        ("kCopyBytes", access.load_bytes),
        ("kStoreBytes", 0 if stats else access.store_bytes),
        ("kStats", stats),
    ]
    return Plan(
        "fwd_portable",
        "forward",
        32 * tile.warps,
        smem,
        tuple(constants),
        score=score_text.text(options),
        operands=score_text.rows(options, forward=True) + block_lists.rows(problem),
    )


def backward_plan(
    problem,
    device,
    access,
    *,
    need_dq: bool,
    need_dkv: bool,
    deterministic: bool,
    gradients: tuple = (),
    tile: Tile | None = None,
) -> Plan:
    """The plan of bwd_portable.cu. ``gradients``: as in score_text.Options."""
    def smem_of(tile):
        return backward_smem(problem, tile, need_dq)

    options = Options.of(problem, gradients=gradients)
    table = _backward_tiles(problem, device, options)
    tile, smem = _tile_of("backward", table, problem, device, tile, smem_of)
    slice_dim = _sliced(problem.head_dim, tile)
    slice_dim_v = _sliced(problem.head_dim_v, tile)
    along_m, along_d = _dq_warps(tile, slice_dim)
    # From sm_100 on the compiler orders a body without masks so that registers spill.
    constants = _common(problem, tile, tail=device.capability >= 100) + [
        ("kHeadDim", tile.slices * slice_dim),
        ("kHeadDimV", tile.slices * slice_dim_v),
        ("kSliceDim", slice_dim),
        ("kSliceDimV", slice_dim_v),
        *_tile_constants(tile, smem, device),
        ("kShare", tile.share),
        ("kDqWarpsM", along_m),
        ("kDqWarpsD", along_d),
        ("kAccumTiles", tile.slices * slice_dim // 8),
        ("kAccumVector", _accum_vector(problem, device)),
        ("kCopyBytes", access.load_bytes),
        ("kStoreBytes", access.store_bytes),
        ("kNeedDq", need_dq),
        ("kNeedDkv", need_dkv),
        ("kDeterministic", deterministic),
    ]
    return Plan(
        "bwd_portable",
        "backward",
        32 * tile.warps,
        smem,
        tuple(constants),
        score=score_text.text(options),
        operands=score_text.rows(options, forward=False) + block_lists.rows(problem),
    )


def _accum_vector(problem, device) -> bool:
    """Whether four neighbours are added by one instruction: sm_90's red.v4.f32."""
    return device.capability >= 90 and problem.dtype != "float64"


def delta_plan(problem, *, vector: bool, dlse: bool) -> Plan:
    """The plan of delta.cu."""
    pieces = -(-problem.head_dim_v * ITEM_BYTES[problem.dtype] // 16)
    lanes = min(32, 1 << (pieces - 1).bit_length()) if vector else 32
    constants = (
        ("Element", CPP_TYPES[problem.dtype]),
        ("kWarps", 4),
        ("kRowLanes", lanes),
        ("kBlockRows", 4 * 128 // lanes),  # four a group of lanes
        ("kVector", vector),
        ("kDlse", dlse),
    )
    return Plan("delta", "delta", 128, 0, constants)


def cast_plan(problem, backward: Plan, *, whole: bool) -> Plan:
    """The plan of cast.cu, which reads what ``backward`` accumulated; ``whole``: rows of dq start
    and end on 16 bytes. Blocks of queries that see no key may have nothing there.
    """
    first = dict(backward.constants).get("kStoreFirst", False)
    lengths = first and problem.lengths
    empty = lengths or (first and problem.band is not None)
    constants = (
        ("Element", CPP_TYPES[problem.dtype]),
        ("kThreads", 256),
        ("kBlockRows", 64),
        ("kEmptyRows", backward["kBlockM"] if empty else 0),
        ("kBand", problem.band is not None),
        ("kIntervals", False),
        ("kLengths", lengths),
        ("kAccumTiles", backward["kAccumTiles"]), ("kAccumVector", backward["kAccumVector"]),
        ("kStoreBytes", 16 if whole and ITEM_BYTES[problem.dtype] == 2 else 0),
    )
    return Plan("cast", "cast", 256, 0, constants, operands=LENGTHS if lengths else ())


def pair_gradient_plan(dtype: str, band: bool) -> Plan:
    """The plan of pair_gradient.cu."""
    constants = ("Element", CPP_TYPES[dtype]), ("kBand", band), ("kIntervals", False)
    return Plan("pair_gradient", "pair_gradient", 256, 0, constants)


def row_norm_plan(dtype: str) -> Plan:
    """The plan of row_norm.cu."""
    constants = (("Element", CPP_TYPES[dtype]), ("kWarps", 4), ("kBlockRows", 64))
    return Plan("row_norm", "row_norm", 128, 0, constants)


def offsets_plan(dtype: str) -> Plan:
    """The plan of offsets.cu."""
    return Plan("offsets", "offsets", 1024, 0, (("Offset", ELEMENTS[dtype]), ("kThreads", 1024)))


def intervals_plan() -> Plan:
    """The plan of intervals.cu."""
    constants = (("kThreads", 256),)
    return Plan("intervals", "intervals", 256, 0, constants)


def span_lists_plan(cut, backward: bool) -> Plan:
    """The plan of span_lists.cu for a block_lists.Cut."""
    constants = [("kThreads", 256), ("kBackward", backward)]
    constants += [("kBlockM", cut.block_m), ("kBlockN", cut.block_n)]
    return Plan("span_lists", "span_lists", 256, 0, tuple(constants))


def block_map_plan(problem) -> Plan:
    """The plan of block_map.cu, for a problem without sinks and dropout."""
    return _looking_plan("block_map", problem, 128, ("kThreads", 128))


def mask_bits_plan(problem, by_key: bool) -> Plan:
    """The plan of mask_bits.cu, for a problem without sinks, dropout and block map. ``by_key``:
    words hold the queries of a key.
    """
    return _looking_plan("mask_bits", problem, 256, ("kByKey", by_key))


def _looking_plan(name: str, problem, threads: int, constant: tuple) -> Plan:
    """Of a kernel that looks at what is visible, and at nothing else."""
    options = Options.of(problem)
    constants = (
        ("Element", CPP_TYPES[problem.dtype]),
        ("kBand", problem.band is not None),
        ("kIntervals", False),
        ("kLengths", False),
        constant,
    )
    return Plan(
        name,
        name,
        threads,
        0,
        constants,
        score=score_text.text(options),
        operands=score_text.rows(options, forward=True),
    )


def combine_plan(dtype: str) -> Plan:
    """The plan of combine.cu."""
    return Plan("combine", "combine", 128, 0, (("Element", CPP_TYPES[dtype]), ("kWarps", 4)))
