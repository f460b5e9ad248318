"""The Hopper family: TMA and wgmma for 16-bit types on compute capability 9.0."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import block_lists, score_rows, score_text
from ..plan import CPP_TYPES, Plan, round_up
from ..score import BITS
from ..score_text import MAP_UNIT, Options

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
    q_slots: int = 2  # pieces for which there is room for queries, if there is
    # With a band: look for hidden inf and NaN only where an output is not finite.
    lazy: bool = False
    skip: bool = True  # with a band, each warpgroup leaves out blocks that its own rows do not see


# By the largest head dimensions that a row serves: tiles for up to so many keys with a band, and
# without, as measured at 512 to 16384 (fwd_sm90.cu has the figures).
MANY = 1 << 31
_LATE_64 = Tile(192, 128, 4, late=True, turns=True)
_LATE_96, _LATE_128 = Tile(192, 96, 3, late=True), Tile(192, 80, 3, late=True)
_WIDE_192 = Tile(128, 80, 2, turns=True, lazy=True)
_WIDE = Tile(128, 64, 2, turns=True, lazy=True)
FORWARD_TILES = {
    (64, 64): ({1024: Tile(192, 128, 4), MANY: _LATE_64}, {MANY: _LATE_64}),
    (96, 96): ({MANY: _LATE_96}, {MANY: _LATE_96}),
    (128, 128): (
        {1024: Tile(192, 64, 4), MANY: _LATE_128},
        {1024: Tile(128, 128, 2), MANY: _LATE_128},
    ),
    (192, 128): ({MANY: Tile(128, 128, 2, q_slots=1)}, {MANY: Tile(128, 128, 2, q_slots=1)}),
    (192, 192): ({MANY: _WIDE_192}, {MANY: _WIDE_192}),
    (256, 256): ({512: Tile(128, 64, 2, lazy=True), MANY: _WIDE}, {MANY: _WIDE}),
}

# With a block map, whose blocks of 128 x 128 or more are met whole: for any number of keys.
MAP_TILES = {
    (64, 64): Tile(128, 128, 3, late=True, turns=True),
    (128, 128): Tile(128, 128, 2, late=True),
    (192, 128): Tile(128, 128, 2, q_slots=1),
    (192, 192): _WIDE,
    (256, 256): _WIDE,
}

# Registers a thread of the producer and of the consumers, by the number of consumer warpgroups: all
# of an SM's 65,536 divided.
REGISTERS = {1: (56, 256), 2: (40, 232), 3: (32, 160)}

# The same with a block map and options on scores: the producer keeps a list beside what it reads of
# longer parameters.
MAP_SCORE_REGISTERS = {**REGISTERS, 2: (72, 216)}

# With options on scores, which need registers of their own: two warpgroups of consumers, the first
# that holds all of it. Hidden inf and NaN are looked for only where an output is not finite.
SCORE_TILES = (
    *(Tile(128, keys, 2, lazy=True) for keys in (128, 112, 96, 80, 64, 48, 32)),
    *(Tile(64, keys, 2, lazy=True) for keys in (48, 32, 16)),
)
# Where nothing but numbers and slopes is read: three warpgroups in turn, as plain kernels have.
# bfloat16, 8192 keys, TFLOP/s beside the tile above without turns, with turns: slopes at 64 463, 377
# and 377, at 128 594, 560 and 596 (causal 614 and 572); softcap at 128 553, 540 and 532.
_LIGHT_64 = Tile(192, 128, 4, turns=True, lazy=True)
_SLOPES_128, _CAPPED_128 = (Tile(192, keys, 3, turns=True, lazy=True) for keys in (80, 64))
SCORE_REGISTERS = 16  # of a consumer, to compute with
MAP_REGISTERS = 24  # a block map has loops for masked and for full blocks
BITS_REGISTERS = 8  # without either, masks as bits beside dropout and a changed score
BAND_REGISTERS = 24  # so has a band, and the band's ends
SINGLE_REGISTERS = 8  # there, of arrays that are read element by element
PACKED_REGISTERS = 8  # intervals of two queries, on top of those
LONG_REGISTERS = 48  # where a pair takes many instructions
FEW_ARRAYS = 4  # with dropout; beside these a staged one takes no registers of its own
LONG_KEYS = 64  # of a block, then: all pairs of a lane are unrolled
MAP_LONG_KEYS = 32
SMEM = 227 * 1024

WARPGROUP_ROWS = 64  # of queries: each consumer warpgroup's are loaded apart
STORE_ROWS = 16  # of the output: each warp's leave apart
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
    if Options.of(problem).map_block is not None:
        return f"blocks of {problem.block_map} would be met in part: only multiples of 128 are not"
    if problem.num_heads >= 2**31:
        return f"{problem.num_heads} heads: the coordinates of a tensor map have 31 bits"
    if access.unmapped is not None:
        return f"tensor maps cannot describe the inputs: {access.unmapped}"
    return None


def _score_tile(problem, options, paired, staged) -> Tile:
    """With options on scores: the widest whose registers hold all of it, else the narrowest.

    Turns pay (dropout at 128 427 TFLOP/s for 381, a staged bias 551 for 454) except where masks are
    looked at.
    """
    tile = _light_tile(problem, options)
    if tile is not None:
        return tile
    tile = _fitting_tile(problem, options, paired, staged)
    crowded = problem.bounded and (options.sinks or (options.dropout and bool(options.args)))
    crowded = crowded or problem.packed or problem.block_map
    without = crowded or hides(problem) or tile.block_m == 64
    return tile if without else replace(tile, turns=True)


def _light_tile(problem, options) -> Tile | None:
    widest = max(problem.head_dim, problem.head_dim_v)
    others = problem.packed or problem.block_map or options.dropout or options.sinks
    arrays = any(arg.kind == "grid" and any(arg.along) for arg in options.args)
    slopes, capped = score_rows.adds(options), score_rows.is_capped(options)
    if widest > 128 or others or arrays or hides(problem) or not (slopes or capped):
        return None
    if problem.bounded and (capped or widest <= 64):  # there are no registers for it
        return None
    return _LIGHT_64 if widest <= 64 else _SLOPES_128 if slopes else _CAPPED_128


def _fitting_tile(problem, options, paired, staged) -> Tile:
    long_keys = LONG_KEYS if problem.block_map is None else MAP_LONG_KEYS
    tiles = [
        tile for tile in SCORE_TILES if tile.block_n <= long_keys or not score_rows.is_long(options)
    ]
    if problem.block_map is not None:  # no block of keys may be met in part
        tiles = [tile for tile in tiles if MAP_UNIT % tile.block_n == 0]
    if score_rows.reads_bits(options):  # from one word, while there is room
        tiles = [tile for tile in tiles if 128 % tile.block_n == 0 or tile.block_m == 64]
    if staged is not None:
        tiles = [*(tile for tile in tiles if stages(problem, tile)), *tiles]
    for tile in tiles:
        held = staged is not None and stages(problem, tile)
        own = staged if held else None
        fits = takes(problem, tile, options, paired, own)
        if fits and forward_smem(problem, tile, held)[0] <= SMEM:
            return tile
    return tiles[-1]


def stages(problem, tile: Tile) -> bool:
    """Whether blocks of an array of the caller's can come by way of shared memory: whole panels. (At
    256 the one case that was tried came out wrong, and why is not known.)
    """
    return tile.block_n % 64 == 0 and max(problem.head_dim, problem.head_dim_v) <= 128


def forward_tile(problem, paired=(), staged=None) -> Tile:
    """The table's tile for a problem: by the keys that a query sees at most."""
    options = Options.of(problem)
    if options:
        return _score_tile(problem, options, paired, staged)
    table = FORWARD_TILES if problem.block_map is None else MAP_TILES
    rows = (
        row for (dim, dim_v), row in table.items()
        if problem.head_dim <= dim and problem.head_dim_v <= dim_v
    )
    if problem.block_map is not None:
        return next(rows)
    tiles = next(rows)[not problem.bounded]
    seen = problem.seqlen_k
    if problem.packed:  # their mean length
        seen = -(-seen // max(1, problem.sequences))
    elif problem.band is not None:
        seen = min(seen, problem.band.hi - problem.band.lo + 1)
    tile = tiles[min(keys for keys in tiles if seen <= keys)]
    # Blocks at both ends of a window, or of a sequence, are masked, and values in them would be
    # looked through.
    return replace(tile, lazy=True) if seen < problem.seqlen_k else tile


def hides(problem) -> bool:
    """Whether the program hides keys."""
    return problem.program is not None and problem.program.visible is not None


def registers(problem, tile: Tile) -> tuple[int, int]:
    """Of a thread of the producer and of the consumers."""
    listed = problem.block_map is not None and Options.of(problem)
    return (MAP_SCORE_REGISTERS if listed else REGISTERS)[tile.block_m // 64]


def takes(problem, tile: Tile, options=None, paired=(), staged=None) -> bool:
    """Whether a consumer's registers hold scores, weights and output, and what options need. What a
    ``staged`` argument's elements take was found to be free beside few others: no addresses are
    held.
    """
    accumulators = (tile.block_n + tile.block_n // 2 + round_up(problem.head_dim_v, 16)) // 2
    others = OTHER_REGISTERS
    if options:
        crowded = len(options.args) + options.dropout > FEW_ARRAYS
        own = paired if crowded else [n for n in paired if n != staged]
        others += score_rows.ahead_registers(options, own, tile.block_n // 8)
        others += SCORE_REGISTERS + score_rows.query_registers(options)
        singles = sum(
            arg.kind == "grid" and arg.along[1] and n not in paired and arg.dtype != BITS
            for n, arg in enumerate(options.args)
        )
        if problem.block_map is not None:
            others += MAP_REGISTERS
        elif problem.bounded:
            others += BAND_REGISTERS + SINGLE_REGISTERS * (singles + options.sinks)
        elif score_rows.reads_bits(options) and options.dropout and score_rows.changes(options):
            others += BITS_REGISTERS
        # One warpgroup alone has all that a thread can name, and nothing to spare.
        long = score_rows.is_long(options)
        others += PACKED_REGISTERS * problem.packed * (2 if long or tile.block_m == 64 else 1)
        others += LONG_REGISTERS * long
    return accumulators + others <= registers(problem, tile)[1]


def forward_smem(problem, tile: Tile, staged: bool = False) -> tuple[int, int, int, bool]:
    """Bytes of shared memory of fwd_sm90.cu; for how many pieces it holds queries; how many panels
    of the output it holds at a time; whether these take q's place, where none fits beside it.
    ``staged``: with a block of another array for each warpgroup.
    """
    panels, panels_v = (round_up(d, 64) // 64 for d in (problem.head_dim, problem.head_dim_v))
    groups = tile.block_m // 64
    panel = WARPGROUP_ROWS * 128  # bytes of 64 rows
    ring = tile.stages * tile.block_n * 128 * (panels + panels_v)
    ring += groups * panel * (tile.block_n // 64) * staged

    def total(q_slots, held):
        barriers = 8 * (4 + 2 * groups * (q_slots + staged) + 5 * tile.stages)
        pieces = 96 if problem.block_map is None else 128
        return groups * panel * held + ring + round_up(barriers, 16) + pieces + 1024

    for slots in range(tile.q_slots, 0, -1):
        for held in range(panels_v, 0, -1):
            apart = total(slots, slots * panels + held)
            if panels_v % held == 0 and apart <= 227 * 1024:
                return apart, slots, held, False
    return total(1, max(panels, panels_v)), 1, panels_v, True


def forward_plan(
    problem, device, access, *, tile: Tile | None = None, paired: tuple[int, ...] = (),
    staged: int | None = None,
) -> Plan:
    """The plan of fwd_sm90.cu. ``paired``: the program's arguments that can be read two keys at a
    time; ``staged``: of these, the one whose blocks can be loaded as keys are
    (launch_extras.Operands).

    Raises
    ------
    NotImplementedError
        The tile's accumulators do not fit the registers of a consumer.
    """
    head_dim, head_dim_v = (round_up(d, 16) for d in (problem.head_dim, problem.head_dim_v))
    options = Options.of(problem)
    given, tile = tile, forward_tile(problem, paired, staged) if tile is None else tile
    if not stages(problem, tile) or forward_smem(problem, tile, staged is not None)[0] > SMEM:
        staged = None
    smem, q_slots, out_panels, out_in_q = forward_smem(problem, tile, staged is not None)
    consumers = tile.block_m // 64
    producer_registers, consumer_registers = registers(problem, tile)
    if given is not None and not takes(problem, tile, options, paired, staged):
        raise NotImplementedError(
            f"{tile} needs more than {consumer_registers} registers a thread for head_dim_v "
            f"{problem.head_dim_v}"
        )
    sign = (problem.scale > 0) - (problem.scale < 0)
    tail = problem.seqlen_k % tile.block_n != 0
    constants = (
        ("Element", CPP_TYPES[problem.dtype]),
        ("kScaleSign", sign),
        ("kBand", problem.bounded),
        ("kIntervals", problem.packed),
        ("kLengths", problem.lengths),
        ("kTail", not problem.bounded and (tail or problem.lengths)),
        ("kHeadDim", head_dim),
        ("kHeadDimV", head_dim_v),
        ("kBlockM", tile.block_m),
        ("kBlockN", tile.block_n),
        ("kStages", tile.stages),
        ("kQSlots", q_slots),
        ("kOutPanels", out_panels),
        ("kOutInQ", out_in_q),
        ("kFused", tile.fused),
        ("kLate", tile.late),
        ("kTurns", tile.turns),
        ("kLazy", tile.lazy and (problem.bounded or problem.lengths or hides(problem))),
        ("kSkip", tile.skip and problem.bounded and problem.block_map is None),
        ("kBlockMap", problem.block_map is not None),
        ("kStaged", staged is not None),
        ("kProducerRegisters", producer_registers),
        ("kConsumerRegisters", consumer_registers),
        ("kSmemBytes", smem),
        ("kStoreBytes", access.store_bytes),
    )
    products = ((tile.block_n, False, False), (head_dim_v, True, True))
    return Plan(
        "fwd_sm90",
        "forward_sm90",
        128 * (consumers + 1),
        smem,
        constants,
        products,
        score_text.text(options, paired, staged=staged),
        score_text.rows(options, forward=True, staged=staged) + block_lists.rows(problem),
    )
