"""The Hopper family: TMA and wgmma for 16-bit types on compute capability 9.0."""

from __future__ import annotations

from dataclasses import dataclass

from ..plan import CPP_TYPES, Plan, round_up, tile_bytes

NAME = "sm90"
DIRECTIONS = ("forward",)


@dataclass(frozen=True)
class Tile:
    """How one block cuts the problem: kBlockM queries, 64 for each consumer warpgroup, kBlockN
    keys, ring stages.
    """

    block_m: int
    block_n: int
    stages: int
    fused: bool = True  # the exponent by one multiply-add (attn/softmax.cuh)
    late: bool = False  # exponentials before the block's maximum is known
    turns: bool = False  # warpgroups start their products in turn
    skip: bool = True  # with a band, each warpgroup leaves out blocks that its own rows do not see


# By largest padded head dimension: with a band or few keys, and without, as measured at 1024 to
# 16384 (fwd_sm90.cu has the figures).
FORWARD_TILES = {
    64: (Tile(192, 128, 3), Tile(192, 128, 3, late=True, turns=True)),
    128: (Tile(192, 80, 3), Tile(192, 80, 3, late=True)),
    256: (Tile(128, 80, 2), Tile(128, 80, 2)),
}
FEW_KEYS = 2048

# Registers a thread of the producer and of the consumers, by the number of consumer warpgroups: all
# of an SM's 65,536 divided.
REGISTERS = {1: (56, 256), 2: (40, 232), 3: (32, 160)}

WARPGROUP_ROWS = 64  # of queries: each consumer warpgroup's are loaded apart
OTHER_REGISTERS = 24  # of a consumer, besides scores, weights and output
MAX_BATCH_DIMS = 2  # a tensor map has five dimensions, three of which are the matrix's and the head


def reject(problem, device, access) -> str | None:
    """Why this family cannot run the problem, or None."""
    if device.capability != 90:
        return f"it needs compute capability 9.0, the device has {device.capability / 10}"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"it multiplies 16-bit types, not {problem.dtype}"
    if len(problem.batch) > MAX_BATCH_DIMS:
        return f"{len(problem.batch)} leading axes cannot be merged into {MAX_BATCH_DIMS}"
    asked = {
        "score or mask": problem.program is not None,
        "sinks": problem.sinks,
        "dropout": problem.dropout,
    }
    if any(asked.values()):
        names = ", ".join(name for name, on in asked.items() if on)
        return f"its kernels do not compute {names}"
    if problem.num_heads >= 2**31:
        return f"{problem.num_heads} heads: the coordinates of a tensor map have 31 bits"
    if access.unmapped is not None:
        return f"tensor maps cannot describe the inputs: {access.unmapped}"
    return None


def forward_tile(problem) -> Tile:
    """The table's tile for a problem."""
    widest = max(problem.head_dim, problem.head_dim_v)
    short, long = FORWARD_TILES[min(d for d in FORWARD_TILES if d >= widest)]
    return long if problem.band is None and problem.seqlen_k > FEW_KEYS else short


def takes(problem, tile: Tile) -> bool:
    """Whether a consumer's registers hold scores, weights and output."""
    accumulators = (tile.block_n + tile.block_n // 2 + round_up(problem.head_dim_v, 16)) // 2
    return accumulators + OTHER_REGISTERS <= REGISTERS[tile.block_m // 64][1]


def forward_smem(problem, tile: Tile) -> tuple[int, bool]:
    """Bytes of shared memory of fwd_sm90.cu, and whether the output leaves through q's place."""
    panel, panel_v = (round_up(d, 64) * 2 for d in (problem.head_dim, problem.head_dim_v))
    groups = tile.block_m // 64
    q, out = 64 * panel, tile_bytes(64, round_up(problem.head_dim_v, 16), 2)
    ring = tile.stages * tile.block_n * (panel + panel_v)
    rest = ring + round_up(8 * (4 + 2 * groups + 5 * tile.stages), 16) + 64 + 1024
    apart = groups * (q + out) + rest
    if apart <= 227 * 1024:
        return apart, False
    return groups * max(q, round_up(out, 1024)) + rest, True


def forward_plan(problem, device, access, *, tile: Tile | None = None) -> Plan:
    """The plan of fwd_sm90.cu.

    Raises
    ------
    NotImplementedError
        The tile's accumulators do not fit the registers of a consumer.
    """
    head_dim, head_dim_v = (round_up(d, 16) for d in (problem.head_dim, problem.head_dim_v))
    tile = forward_tile(problem) if tile is None else tile
    smem, out_in_q = forward_smem(problem, tile)
    consumers = tile.block_m // 64
    producer_registers, consumer_registers = REGISTERS[consumers]
    if not takes(problem, tile):
        raise NotImplementedError(
            f"{tile} needs more than {consumer_registers} registers a thread for head_dim_v "
            f"{problem.head_dim_v}"
        )
    sign = (problem.scale > 0) - (problem.scale < 0)
    constants = (
        ("Element", CPP_TYPES[problem.dtype]),
        ("kScaleSign", sign),
        ("kBand", problem.band is not None),
        ("kTail", problem.band is None and problem.seqlen_k % tile.block_n != 0),
        ("kHeadDim", head_dim),
        ("kHeadDimV", head_dim_v),
        ("kBlockM", tile.block_m),
        ("kBlockN", tile.block_n),
        ("kStages", tile.stages),
        ("kOutInQ", out_in_q),
        ("kFused", tile.fused),
        ("kLate", tile.late),
        ("kTurns", tile.turns),
        ("kSkip", tile.skip and problem.band is not None),
        ("kProducerRegisters", producer_registers),
        ("kConsumerRegisters", consumer_registers),
        ("kSmemBytes", smem),
        ("kStoreBytes", access.store_bytes),
    )
    products = ((tile.block_n, False, False), (head_dim_v, True, True))
    return Plan("fwd_sm90", "forward_sm90", 128 * (consumers + 1), smem, constants, products)
