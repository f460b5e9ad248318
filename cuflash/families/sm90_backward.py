"""The Hopper family's backward kernels: their tiles, shared memory and plans."""

from __future__ import annotations

from dataclasses import dataclass

from .. import block_lists
from ..plan import CPP_TYPES, Plan, round_up
from .sm90 import NAME, reject

__all__ = ["DIRECTIONS", "NAME", "Tile", "backward_plan", "reject", "takes", "tile_of"]

DIRECTIONS = ("backward",)


@dataclass(frozen=True)
class Tile:
    """How one block cuts the problem: kBlockM queries, kBlockN keys, ring stages of q and of dout;
    ``wide``: the warpgroups divide the products, not the keys (bwd_sm90_wide.cu).
    """

    block_m: int
    block_n: int
    stages: int = 2
    stages_v: int = 2
    wide: bool = False


# By largest padded head dimension.
BACKWARD_TILES = {
    64: Tile(128, 128),
    128: Tile(64, 128),
    256: Tile(64, 64, 2, 1, wide=True),
}

# Registers a thread of the producer's warpgroup and of the two consumers: an SM's 65,536 divided.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
THREADS = 3 * 128


def tile_of(problem) -> Tile:
    """The table's tile for a problem."""
    widest = max(problem.head_dim, problem.head_dim_v)
    return BACKWARD_TILES[min(d for d in BACKWARD_TILES if d >= widest)]


def takes(problem, tile: Tile) -> bool:
    """Whether a kernel has that tile: what the kernels assert, and no more accumulators than there
    are registers.
    """
    widest = max(problem.head_dim, problem.head_dim_v)
    if tile.wide:
        return tile.block_m == tile.block_n == 64
    if tile.block_n != 128 or tile.stages != 2 or tile.stages_v != 2:
        return False
    return widest <= (64 if tile.block_m == 128 else 128)


def accum_columns(head_dim: int, tile: Tile) -> int:
    """Columns of dq as they are summed: whole parts (kDqCols in attn/backward_sm90.cuh)."""
    return head_dim if tile.block_m == 128 else round_up(head_dim, 64)


def backward_smem(head_dim: int, head_dim_v: int, tile: Tile, need_dq: bool) -> int:
    """Bytes of shared memory, the sum that attn/backward_sm90.cuh asserts."""
    row, row_v = (round_up(d, 64) * 2 for d in (head_dim, head_dim_v))
    keys = tile.block_n * (row + row_v)
    queries = tile.block_m * (tile.stages * row + tile.stages_v * row_v)
    ds = (1 if tile.wide else 2) * tile.block_n * tile.block_m * 2
    exchange = tile.block_m * tile.block_n * 4 if tile.wide else 0
    dq = 2 * 64 * 4 * (head_dim if tile.block_m == 128 else 64) if need_dq else 0
    stats = 4 * tile.block_m * (2 * tile.stages + tile.stages_v)
    barriers = 8 * (6 + 2 * (tile.stages + tile.stages_v))
    return keys + queries + ds + exchange + dq + stats + barriers + 16 + 1024


def backward_plan(
    problem,
    device,
    access,
    *,
    need_dq: bool,
    need_dkv: bool,
    deterministic: bool,
    tile: Tile | None = None,
) -> Plan:
    """The plan of bwd_sm90.cu or bwd_sm90_wide.cu."""
    head_dim, head_dim_v = (round_up(d, 16) for d in (problem.head_dim, problem.head_dim_v))
    tile = tile or tile_of(problem)
    smem = backward_smem(head_dim, head_dim_v, tile, need_dq)
    columns = accum_columns(head_dim, tile)
    tail = problem.seqlen_q % tile.block_m != 0 or problem.seqlen_k % tile.block_n != 0
    constants = (
        ("Element", CPP_TYPES[problem.dtype]),
        ("kScaleSign", (problem.scale > 0) - (problem.scale < 0)),
        ("kBand", problem.band is not None),
        ("kTail", problem.band is None and tail),
        ("kBlockMap", problem.block_map is not None),
        ("kHeadDim", head_dim),
        ("kHeadDimV", head_dim_v),
        ("kBlockM", tile.block_m),
        ("kBlockN", tile.block_n),
        ("kStages", tile.stages),
        ("kStagesV", tile.stages_v),
        ("kDsStages", 1 if tile.wide else 2),
        ("kExchange", tile.wide),
        ("kAccumTiles", columns // 8),
        ("kAccumVector", True),
        ("kNeedDq", need_dq),
        ("kNeedDkv", need_dkv),
        ("kDeterministic", deterministic),
        ("kProducerRegisters", PRODUCER_REGISTERS),
        ("kConsumerRegisters", CONSUMER_REGISTERS),
        ("kSmemBytes", smem),
        ("kStoreBytes", access.store_bytes),
    )
    products = (
        (tile.block_m, False, False),
        (head_dim_v, True, True),
        (head_dim, True, True),
        (head_dim if tile.block_m == 128 else 64, False, True),
    )
    kernel = "bwd_sm90_wide" if tile.wide else "bwd_sm90"
    operands = block_lists.rows(problem)
    return Plan(
        kernel, "backward_sm90", THREADS, smem, constants, products, operands=operands
    )
