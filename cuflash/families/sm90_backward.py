"""The Hopper family's backward kernels: their tiles, shared memory and plans."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import block_lists, score_text
from ..plan import CPP_TYPES, Plan, round_up
from ..score import BITS_BY_KEY, ordered
from ..score_text import Options
from . import sm90
from .sm90 import NAME

__all__ = ["DIRECTIONS", "NAME", "Tile", "backward_plan", "reject", "takes", "tile_of"]

DIRECTIONS = ("backward",)


@dataclass(frozen=True)
class Tile:
    """How one block cuts the problem: kBlockM queries, kBlockN keys, ring stages of q and of dout;
    ``wide``: the warpgroups divide the products, not the keys (bwd_sm90_wide.cu).

    Of dq in turns: how many threads add, whether the first writes, and how far apart, in blocks of
    queries, those are that go round together. Of wide kernels: buffers of dq, and whether dP^T of
    the next block runs while the last part of dq leaves.
    """

    block_m: int
    block_n: int
    stages: int = 2
    stages_v: int = 2
    wide: bool = False
    reducers: int = 2
    store_first: bool = True
    distance: int = 2
    dq_buffers: int = 3
    dp_early: bool = True


# By largest padded head dimension.
BACKWARD_TILES = {
    64: Tile(128, 128),
    128: Tile(64, 128),
    256: Tile(64, 64, 2, 1, wide=True),
}

# With scores of the caller's (score_text.py): a block of scores beside dk and dv leaves room for what
# these need.
SCORE_TILES = {
    128: Tile(64, 128),
    256: Tile(64, 64, 2, 1, wide=True),
}
# The same where the score takes so much that it would not fit beside dk and dv of 128 keys
# (`crowded`).
CROWDED_TILES = {256: Tile(64, 64, 2, 1, wide=True)}
LONG_SCORE = 12  # nodes of its expression
# The same where dS needs one more fragment, for gradients of arrays beside a derivative.
KEPT_TILES = {
    64: Tile(64, 128),
    192: Tile(64, 64, 2, 1, wide=True),
    256: Tile(64, 64, 1, 1, wide=True),
}

# Registers a thread of the producer's warpgroup and of the two consumers: an SM's 65,536 divided.
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
THREADS = 3 * 128


def reject(problem, device, access) -> str | None:
    """Why this family cannot run the problem backward, or None. Options on scores hinder only where
    they would not fit the registers of the wide kernel.
    """
    widest = max(problem.head_dim, problem.head_dim_v)
    if problem.block_map is not None and problem.program is not None and widest > 128:
        return "no register is left for a block map beside score functions and head_dim > 128"
    if problem.packed and problem.program and problem.program.gradients and widest > 192:
        return (
            f"a score's arrays beside packed sequences and head_dim {widest} need more registers "
            "than there are"
        )
    plain = replace(problem, program=None, sinks=False, dropout=False)
    return sm90.reject(plain, device, access)


def tile_of(problem, options: Options | None = None) -> Tile:
    """The table's tile for a problem."""
    widest = max(problem.head_dim, problem.head_dim_v)
    options = Options.of(problem) if options is None else options
    tiles = BACKWARD_TILES
    if options:
        tiles = SCORE_TILES
        mapped = problem.block_map is not None
        dropping = mapped and problem.dropout and widest > 64
        if dropping or crowded(options, widest, problem.bounded or mapped):
            tiles = CROWDED_TILES
        if keeps_fragment(options):
            tiles = KEPT_TILES
            # Beside places of packed sequences dk and dv of 128 keys would not fit either.
            widest = max(widest, 65) if problem.packed else widest
    return tiles[min(d for d in tiles if d >= widest)]


def crowded(options: Options, widest: int, band: bool) -> bool:
    """Whether a score takes more than the tiles of 128 keys have registers for, as the compiler
    says: arrays by computed indices, many grids; beside a band one at each pair, or a long function.
    """
    kinds = [arg.kind for arg in options.args]
    if "free" in kinds or kinds.count("grid") > 2:
        return True
    if not band or widest <= 64 or options.program is None:
        return False
    by_pair = any(
        arg.kind == "grid" and all(arg.along) and arg.dtype not in ("bool", BITS_BY_KEY)
        for arg in options.args
    )
    return by_pair or len(ordered(options.program.value)) > LONG_SCORE


def keeps_fragment(options: Options) -> bool:
    """kKeepsFragment in attn/backward_smem.cuh."""
    facts = score_text.facts(options)
    return bool(options.gradients) and (facts["kKeepsScore"] or not facts["kUnit"])


def _by_band(problem) -> bool:
    """Whether nothing but a band says which blocks meet."""
    return not problem.packed and problem.block_map is None


def takes(problem, tile: Tile) -> bool:
    """Whether a kernel has that tile: what the kernels assert, and no more accumulators than there
    are registers.
    """
    widest = max(problem.head_dim, problem.head_dim_v)
    if tile.wide:
        return tile.block_m == tile.block_n == 64
    if tile.block_n != 128 or tile.stages != 2 or tile.stages_v != 2:
        return False
    if tile.block_m == 128 and Options.of(problem):
        return False
    return widest <= (64 if tile.block_m == 128 else 128)


def accum_columns(head_dim: int, tile: Tile) -> int:
    """Columns of dq as they are summed: whole parts (kDqCols in attn/backward_smem.cuh)."""
    return head_dim if tile.block_m == 128 else round_up(head_dim, 64)


def turn_groups(
    problem, tile: Tile, num_sms: int, heads: int, squares: bool = False
) -> tuple[int, int, int]:
    """Blocks of keys that go round the blocks of queries together and take turns at them
    (attn/backward_sm90.cuh): all of a group must be on the device at once.

    Returns
    -------
    (section, group, last_group)
        How many key/value heads go together, how many blocks of each, and how many where the last
        section has fewer heads.

    Notes
    -----
    Places in a group are tile.distance blocks of queries apart, or further: a turn then has the
    time of so many steps to be completed and seen. Where a head has too few queries for all its
    blocks, several heads share the device, unless there are too few of them to fill it; and with
    ``squares``, at which sections take turns.
    """
    blocks = -(-problem.seqlen_k // tile.block_n)
    apart = max(1, -(-problem.seqlen_q // tile.block_m) // tile.distance)
    group = min(blocks, num_sms)
    if group <= apart:
        return min(heads, num_sms // group) if squares else 1, group, group
    section = min(heads, num_sms // apart)
    group = min(group, apart if heads >= num_sms // apart else num_sms // heads)
    group = -(-blocks // -(-blocks // group))
    last = heads % section or section
    return section, group, max(group, min(blocks, num_sms // last))


def backward_smem(
    head_dim: int, head_dim_v: int, tile: Tile, need_dq: bool, reducers: int, dq_buffers: int,
    options: Options = Options(),
) -> int:
    """Bytes of shared memory, the sum that attn/backward_smem.cuh asserts."""
    row, row_v = (round_up(d, 64) * 2 for d in (head_dim, head_dim_v))
    keys = tile.block_n * (row + row_v)
    queries = tile.block_m * (tile.stages * row + tile.stages_v * row_v)
    ds = (1 if tile.wide else 2) * tile.block_n * tile.block_m * 2
    fragments = 2 if keeps_fragment(options) else int(tile.wide or bool(options.gradients))
    exchange = fragments * tile.block_m * tile.block_n * 4
    exchange += 8 * 128 if tile.wide and options else 0
    dq = 2 * 64 * 4 * (head_dim if tile.block_m == 128 else 64) if need_dq else 0
    stats = 4 * tile.block_m * (2 * tile.stages + tile.stages_v)
    squares = tile.block_n // 64 if options.squared else 0
    barriers = 8 * (2 + dq_buffers * (1 + reducers) + 2 * (tile.stages + tile.stages_v + squares))
    starts = 16 * sum(arg.kind == "grid" for arg in options.args)
    return keys + queries + ds + exchange + dq + stats + round_up(barriers, 16) + 16 + starts + 1024


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
    """The plan of bwd_sm90.cu or bwd_sm90_wide.cu. ``gradients``: as in score_text.Options."""
    head_dim, head_dim_v = (round_up(d, 16) for d in (problem.head_dim, problem.head_dim_v))
    options = Options.of(problem, gradients=gradients)
    tile = tile or tile_of(problem, options)
    ordered = deterministic and need_dq
    reducers = tile.reducers if ordered and tile.stages == 2 else 1  # a stage of q is a step
    dq_buffers = tile.dq_buffers if tile.wide and head_dim > 128 else 2
    smem = backward_smem(head_dim, head_dim_v, tile, need_dq, reducers, dq_buffers, options)
    columns = accum_columns(head_dim, tile)
    tail = problem.seqlen_q % tile.block_m != 0 or problem.seqlen_k % tile.block_n != 0
    constants = (
        ("Element", CPP_TYPES[problem.dtype]),
        ("kScaleSign", (problem.scale > 0) - (problem.scale < 0)),
        ("kBand", problem.bounded),
        ("kIntervals", problem.packed),
        ("kLengths", problem.lengths),
        ("kTail", not problem.bounded and (tail or problem.lengths)),
        ("kBlockMap", problem.block_map is not None),
        ("kHeadDim", head_dim),
        ("kHeadDimV", head_dim_v),
        ("kBlockM", tile.block_m),
        ("kBlockN", tile.block_n),
        ("kStages", tile.stages),
        ("kStagesV", tile.stages_v),
        ("kDsStages", 1 if tile.wide else 2),
        ("kExchange", tile.wide),
        ("kAhead", 6),
        ("kAccumTiles", columns // 8),
        ("kAccumVector", True),
        ("kNeedDq", need_dq),
        ("kNeedDkv", need_dkv),
        ("kDeterministic", deterministic),
        ("kReducers", reducers),
        ("kDqBuffers", dq_buffers),
        ("kDpEarly", tile.dp_early),
        # cast.cu finds the blocks that nobody adds to by a band only; and what waits for the first
        # turn (restore_queries) has no registers left beside options.
        ("kStoreFirst", ordered and tile.store_first and _by_band(problem) and not options),
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
    return Plan(
        kernel,
        "backward_sm90",
        THREADS,
        smem,
        constants,
        products,
        # An inverse beside a number is one register more, which many arrays leave no room for.
        score=score_text.text(options, quick=True, inverses=len(options.args) <= 2),
        operands=score_text.rows(options, forward=False) + block_lists.rows(problem),
    )
