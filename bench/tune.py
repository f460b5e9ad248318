"""`python -m bench.tune`: measures tiles of the kernels and prints them as table rows.

The best come first; a person copies them into cuflash/families/, and nothing is tuned at run time.
Of the families that can run the case the fastest is tuned, or the one that is named. Candidates are
the table's own rows and a grid of others that fit the device's shared memory. All are built, each
in its own process; those that spill registers or differ from the first row's result are named at
the end. Without a GPU there are no times: what would be tried is printed with its registers.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, fields, replace
from types import ModuleType
from typing import Any

import numpy as np

from cuflash import edge, jit, mask_bits
from cuflash.ahead import contiguous_accesses
from cuflash.arrays import home_of
from cuflash.cli_common import load_cupy
from cuflash.families import Device, choose, device_of, portable, sm90, sm90_backward
from cuflash.plan import ITEM_BYTES, Plan
from cuflash.problem import DTYPES, Problem
from cuflash.score_rows import pairable, stageable
from cuflash.score_text import Options

from . import scores
from .cases import Case
from .peers import arrays
from .timing import gpu_times

_TOKENS, _WIDTH = 16384, 2048  # batch * seqlen and heads * head_dim, as in cases.py

# Norm of the difference from the first row's result, relative to that result's: sums in another
# order and the results' own rounding, but no wrong block.
_TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 4e-6, "float64": 1e-14}

# By name and direction.
_FAMILIES = {
    (family.NAME, direction): family
    for family in (sm90, sm90_backward, portable)
    for direction in family.DIRECTIONS
}

# Values of a tile's fields; a field that is not here keeps the value that the table's row has.
_GRID = {
    ("sm90", "fwd"): {
        "block_m": (64, 128, 192),
        "block_n": (64, 80, 96, 112, 128, 144, 160, 176, 192),
        "stages": (2, 3, 4),
        "fused": (True, False),
        "skip": (True, False),
    },
    ("sm90", "bwd"): {
        "block_m": (64, 128),
        "block_n": (64, 128),
        "stages": (1, 2, 3),
        "stages_v": (1, 2, 3),
        "wide": (False, True),
    },
    ("portable", "fwd"): {
        "block_m": (32, 64, 128, 256),
        "block_n": (32, 64, 96, 128),
        "warps": (4, 8),
        "stages": (1, 2, 3),
        "blocks_per_sm": (1, 2, 3),
        "slices": (1, 2),
        "share": (1,),
        "direct": (False,),
    },
    ("portable", "bwd"): {
        "block_m": (16, 32, 64, 128),
        "block_n": (32, 64, 128),
        "warps": (4, 8),
        "stages": (1, 2),
        "blocks_per_sm": (1, 2),
        "slices": (1, 2, 4),
        "share": (1, 2),
        "direct": (False,),
    },
}


@dataclass(frozen=True)
class Setting:
    """What tiles are tuned for."""

    case: Case
    problem: Problem  # of the call
    seen: Problem  # as kernels see it: masks may be bits
    extras: Any
    device: Device
    arch: str
    deterministic: bool
    family: ModuleType

    def plan(self, tile) -> Plan:
        """The plan of contiguous arrays with that tile."""
        access = contiguous_accesses(self.problem, self.case.way == "bwd")[-1]
        if self.case.way == "fwd":
            read = {"paired": self.paired, "staged": self.staged} if self.family is sm90 else {}
            return self.family.forward_plan(self.seen, self.device, access, tile=tile, **read)
        return self.family.backward_plan(
            self.seen,
            self.device,
            access,
            need_dq=True,
            need_dkv=True,
            deterministic=self.deterministic,
            tile=tile,
        )

    @property
    def paired(self) -> tuple[int, ...]:
        """The arguments that Hopper's forward reads two at a time: all that it can, as those of the
        cases lie in memory.
        """
        args = () if self.seen.program is None else self.seen.program.args
        return tuple(n for n, arg in enumerate(args) if pairable(arg))

    @property
    def staged(self) -> int | None:
        """Of these the one whose blocks come by way of shared memory."""
        args = () if self.seen.program is None else self.seen.program.args
        return next((n for n in self.paired if stageable(args[n])), None)


@dataclass
class Row:
    """One candidate and what became of it."""

    tile: Any  # the family's Tile
    plan: Plan
    from_table: bool
    registers: int = 0
    spilled: int = 0
    failure: str = ""
    seconds: float = math.inf


def main(argv=None):
    args = _parser().parse_args(argv)
    cupy, reason = load_cupy()
    if args.arch:
        cupy, reason = None, f"--arch {args.arch} was named"
    try:
        setting = _setting(args, cupy)
        rows = candidates(setting, args.only_table)
    except (ValueError, NotImplementedError, RuntimeError, ImportError) as error:
        print(f"bench.tune: {error}", file=sys.stderr)
        return 2
    print(f"{setting.case.name} on {setting.device.name}: {len(rows)} candidates", file=sys.stderr)
    build(setting, rows, args.jobs)
    if cupy is None:
        print(f"no times: {reason}", file=sys.stderr)
        rows.sort(key=lambda row: (bool(row.failure), row.spilled))
    else:
        measure(setting, rows, cupy, args.rounds)
        rows.sort(key=lambda row: row.seconds)
    for row in rows:
        print(render(setting, row), flush=True)
    return 0


def _parser():
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D")
    parser.add_argument("--direction", choices=("fwd", "bwd"), default="fwd")
    parser.add_argument("--family", choices=("sm90", "portable"), help="(the one that would run)")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=int, metavar="W", help="with --causal: keys that count")
    parser.add_argument("--option", default="", help="on scores, as bench/scores.py names it")
    parser.add_argument("--seqlen", type=int, default=4096, metavar="N", help="(4096)")
    text = "backward: time the sum of dq in any order, not the deterministic one"
    parser.add_argument("--any-order", action="store_true", help=text)
    text = "print registers for this architecture and measure nothing (the GPU's, else sm_90a)"
    parser.add_argument("--arch", metavar="sm_XY", help=text)
    parser.add_argument("--only-table", action="store_true", help="no grid: the table's rows")
    text = "processes that build (one a processor)"
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="J", help=text)
    parser.add_argument("--rounds", type=int, default=5, help="timings a tile; the median (5)")
    return parser


def _setting(args, cupy) -> Setting:
    for name, value, most in (("head-dim", args.head_dim, 256), ("seqlen", args.seqlen, 2**20)):
        if not 1 <= value <= most:
            raise ValueError(f"--{name} {value}: it must be from 1 to {most}")
    if args.window is not None and (args.window < 1 or not args.causal):
        raise ValueError(f"--window {args.window}: it must be at least 1, and beside --causal")
    heads, batch = max(1, _WIDTH // args.head_dim), max(1, _TOKENS // args.seqlen)
    case = Case(
        args.direction, "gpu", args.dtype, batch, heads, args.seqlen, args.head_dim, args.causal,
        left=None if args.window is None else args.window - 1, option=args.option,
    )  # fmt: skip
    problem, extras = _call(case, cupy)
    if cupy is not None:
        from cuflash.launch_steps import device_facts

        device = device_facts(cupy.cuda.runtime.getDevice())
    else:
        match = re.fullmatch(r"sm_(\d+)a?", args.arch or "sm_90a")
        if match is None:
            raise ValueError(f"--arch {args.arch}: it must be a name such as sm_80 or sm_90a")
        device = device_of(int(match.group(1)))
    arch = jit.architecture(*divmod(device.capability, 10))
    way = "forward" if args.direction == "fwd" else "backward"
    access = contiguous_accesses(problem, way == "backward")[-1]
    family, _ = choose(problem, device, access, way)
    if args.family and args.family != family.NAME:
        family = _FAMILIES[args.family, way]
        reason = family.reject(problem, device, access)
        if reason is not None:
            raise ValueError(f"--family {args.family}: {reason}")
    seen = problem
    if family is not portable and mask_bits.pays(problem, extras.args):
        seen, _ = mask_bits.rewritten(problem, way == "backward")
    return Setting(case, problem, seen, extras, device, arch, not args.any_order, family)


def _call(case: Case, cupy):
    """(problem, extras) of the case's call: on the CPU, where dtypes are NumPy's own, of its twin in
    float16.
    """
    xp = np if cupy is None else cupy
    try:
        options = {"causal": case.causal, **scores.options(case, xp)}
    except KeyError:
        raise ValueError(f"--option {case.option}: bench/scores.py has none") from None
    if case.left is not None:
        options["window"] = case.left, None
    if cupy is None:
        q, k, v = (np.empty(shape, np.float16) for shape in case.shapes[:3])
    else:
        q, k, v, _ = arrays(case, cupy)
    home = home_of([("q", q)])
    shaping, own = edge.split_options("tune", options)
    with home.scope():
        call = edge.resolve(q, k, v, shaping)
        found = edge.scored(home, call, shaping, own)
    return replace(found.problem, dtype=case.dtype), found.extras


# ---- candidates ------------------------------------------------------------------------------


def candidates(setting: Setting, only_table: bool = False) -> list[Row]:
    """The table's rows first, then the grid's; tiles that make the same kernel once."""
    listed, grid = _listed(setting), ()
    if not only_table:
        values = itertools.product(*_grid(setting, listed[0]))
        grid = itertools.starmap(setting.family.Tile, values)
    rows, seen = [], set()
    for tile in itertools.chain(listed, grid):
        if not _divides(setting, tile):
            continue
        plan = setting.plan(tile)
        if plan.smem_bytes > setting.device.smem_per_block or plan in seen:
            continue
        seen.add(plan)
        rows.append(Row(tile, plan, tile in listed))
    if not rows:
        raise NotImplementedError(f"no tile fits {setting.device.smem_per_block} bytes")
    return rows


def _listed(setting: Setting) -> tuple:
    """The table's rows for the case."""
    if setting.family is sm90:
        return (sm90.forward_tile(setting.seen, setting.paired, setting.staged),)
    if setting.family is sm90_backward:
        return (sm90_backward.tile_of(setting.seen),)
    table = portable.FORWARD_TILES if setting.case.way == "fwd" else portable.BACKWARD_TILES
    item, dim = ITEM_BYTES[setting.case.dtype], setting.case.head_dim
    return next(tiles for (size, most), tiles in table.items() if size == item and dim <= most)


def _grid(setting: Setting, first) -> list:
    values = {field.name: (getattr(first, field.name),) for field in fields(first)}
    values |= _GRID[setting.family.NAME, setting.case.way]
    if setting.family is sm90 and setting.case.option:
        values |= {"turns": (False, True), "fused": (first.fused,), "skip": (first.skip,)}
    if setting.family is not portable:
        return list(values.values())
    if setting.case.head_dim <= 128 and setting.case.way == "fwd":
        values["slices"] = (1,)
    elif setting.case.head_dim <= 128 and ITEM_BYTES[setting.case.dtype] == 2:
        values["slices"] = (1,)
    if ITEM_BYTES[setting.case.dtype] != 2:
        values["share"] = (1,)
    return list(values.values())


def _divides(setting: Setting, tile) -> bool:
    """The rules that the kernels assert: whole fragments for every warp. And a warp has at most 32
    rows, since more do not fit its registers.
    """
    if setting.family is sm90:
        options = Options.of(setting.seen)
        staged = setting.staged if sm90.stages(setting.seen, tile) else None
        return sm90.takes(setting.seen, tile, options, setting.paired, staged)
    if setting.family is sm90_backward:
        return sm90_backward.takes(setting.seen, tile)
    if tile.warps % tile.share != 0:
        return False
    if setting.case.way == "fwd":
        rows, fits = tile.block_m / tile.warps, tile.block_n % 16 == 0
    else:
        rows, fits = tile.block_n * tile.share / tile.warps, tile.block_m % (16 * tile.share) == 0
    return fits and rows % 16 == 0 and rows <= 32


# ---- building --------------------------------------------------------------------------------


def _compiled(plan: Plan, arch: str) -> tuple[int, int, str]:
    """(registers, bytes spilled, why it did not compile); in a process of its own."""
    try:
        log = jit.build(plan, arch, force=True).log  # the log is not cached
    except jit.CompileError as error:
        return 0, 0, str(error).splitlines()[1]
    registers = re.search(r"Used (\d+) registers", log)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log)))
    return int(registers.group(1)) if registers else 0, spilled, ""


def build(setting: Setting, rows: list[Row], jobs: int) -> None:
    """Compile every row into the cache and note its registers."""
    plans = [row.plan for row in rows]
    # spawn: a process that has started CUDA must not be forked.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(jobs, len(rows))), mp_context=context) as pool:
        results = pool.map(_compiled, plans, itertools.repeat(setting.arch))
        for number, (row, result) in enumerate(zip(rows, results), 1):
            row.registers, row.spilled, row.failure = result
            if row.spilled and not row.from_table:
                row.failure = f"{row.spilled} bytes spilled"
            print(f"\rbuilt {number} of {len(rows)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


# ---- measuring -------------------------------------------------------------------------------


def measure(setting: Setting, rows: list[Row], cupy, rounds: int) -> None:
    """Compare every row's result with the first one's, then time those that agree."""
    good = [row for row in rows if not row.failure]
    if not good:
        return
    calls, results = _calls(setting, good, cupy)
    expected = None
    for row in good:
        for result in results:
            result.fill(math.nan)
        try:
            calls[row.tile]()
            cupy.cuda.get_current_stream().synchronize()
        except Exception as error:  # an exhausted resource of one tile must not end the others
            row.failure = f"{type(error).__name__}: {error}".splitlines()[0]
            del calls[row.tile]
            continue
        found = [result.astype(np.float64) for result in results]
        if expected is None:
            expected = found
        error = max(_distance(cupy, a, b) for a, b in zip(found, expected))
        if not error <= _TOLERANCE[setting.case.dtype]:  # NaN fails
            row.failure = f"wrong: differs from the first row by {error:.1e}"
            del calls[row.tile]
    times = gpu_times(calls, cupy, rounds)
    for row in good:
        row.seconds = times.get(row.tile, math.inf)


def _calls(setting: Setting, rows: list[Row], cupy):
    """({tile: function of no arguments}, the arrays that it writes)."""
    from cuflash import launch

    problem, extras = setting.problem, setting.extras
    q, k, v, dout = arrays(setting.case, cupy)
    out = cupy.empty_like(q)
    lse = cupy.empty(q.shape[:-1], problem.lse_dtype)
    if setting.case.way == "fwd":
        calls = {
            row.tile: lambda tile=row.tile: launch.forward(
                problem, q, k, v, out, lse, tile=tile, extras=extras
            )
            for row in rows
        }
        return calls, [out, lse]
    launch.forward(problem, q, k, v, out, lse, extras=extras)
    grads = [cupy.empty_like(x) for x in (q, k, v)]
    inputs = (problem, dout, q, k, v, out, lse, None, *grads, setting.deterministic)
    calls = {
        row.tile: lambda tile=row.tile: launch.backward(*inputs, tile, extras) for row in rows
    }
    return calls, grads


def _distance(cupy, found, expected) -> float:
    norm = float(cupy.linalg.norm(expected.ravel()))
    return float(cupy.linalg.norm((found - expected).ravel())) / max(norm, 1e-300)


def render(setting: Setting, row: Row) -> str:
    """A row as it stands in the tables, and what is known of it."""
    values = list(astuple(row.tile))
    defaults = [field.default for field in fields(row.tile)]
    while values[-1] == defaults[len(values) - 1]:
        values.pop()
    facts = []
    if row.failure:
        facts.append(row.failure)
    elif row.seconds < math.inf:
        speed = setting.case.flop / row.seconds / 1e12
        facts.append(f"{speed:.1f} TFLOP/s, {row.seconds * 1e6:.1f} us")
    if row.registers:
        facts.append(f"{row.registers} registers")
    if row.spilled and not row.failure:
        facts.append(f"{row.spilled} bytes spilled")
    blocks = dict(row.plan.constants).get("kBlocksPerSm", 1)
    facts.append(f"{row.plan.smem_bytes} bytes shared, {blocks} blocks an SM")
    if row.from_table:
        facts.append("in the table")
    return f"{'Tile(' + ', '.join(map(str, values)) + '),':<34}# {', '.join(facts)}"


if __name__ == "__main__":
    sys.exit(main())
