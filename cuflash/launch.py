"""Runs plans on CuPy arrays: forward, merge and explain here, backward in launch_backward.py.

Outputs, workspaces and the order of kernels, all on the current device and its current stream.
Workspaces come from CuPy's pool, which hands memory out again on the stream that freed it: so it
may be freed here while kernels are still to run.
"""

from __future__ import annotations

import math
import threading
from typing import NamedTuple

import cupy

from . import jit
from . import launch_steps as steps
from . import score_rows
from .families import choose, sm90
from .launch_backward import backward
from .launch_block_map import block_kinds, list_plans, list_rest, list_words
from .launch_extras import NONE, Operands
from .launch_mask_bits import as_bits
from .launch_steps import BATCH_DIMS, Step
from .plan import Plan, round_up
from .score_text import Options
from .tensormap import Encoder, unfit

__all__ = ["backward", "block_kinds", "explain", "forward", "merge", "plans_of"]

MAX_COMBINE_BLOCKS = 65536  # each loops over its rows
MAX_WORK = 2**32 - 1  # pieces of a launch of fwd_sm90, which counts them in 32 bits

# The counters of streams, a few bytes each, by device and stream.
_tickets: dict = {}
_tickets_lock = threading.Lock()


class _Forward(NamedTuple):
    """A prepared forward pass."""

    step: Step
    packed: tuple[str, ...]  # names of the inputs that are packed first
    mapped: tuple[int, ...]  # which of q, k, v, out and lse are passed by tensor maps, in order
    staged: int | None  # which argument of the program is, too
    ticket: bool  # whether blocks draw their work from a counter, if the kernel can
    options: Options  # what its scores know of


def _work(problem, plan) -> tuple[int, int]:
    """(blocks of queries of a head, heads of all batches)"""
    blocks = -(-problem.seqlen_q // plan["kBlockM"])
    return blocks, problem.num_heads * math.prod(problem.batch)


def _portable_step(problem, device, plan, operands, q, k, v, out, lse) -> Step:
    options = Options.of(problem)
    blocks, heads = _work(problem, plan)
    return Step.of(
        plan,
        blocks * plan["kSlices"] * heads,
        *steps.all_strides(problem, q, k, v, out, lse),
        *steps.shape_values(problem, blocks),
        *steps.section_values(problem, device, heads, _key_bytes(problem, q)),
        *steps.band_values(problem),
        steps.scale_log2(problem, options),
        0,  # stats_pitch and lse_threshold: of the statistics pass
        0.0,
        *operands.rest(problem, options, forward=True),
        *list_rest(problem, plan, operands),
    )


def _sm90_step(problem, device, plan, operands, staged, q, k, v, out, lse) -> Step:
    options = Options.of(problem)
    scale = steps.scale_log2(problem, score_rows.changes(options))
    if score_rows.is_capped(options):
        scale = 1.0
    blocks, heads = _work(problem, plan)
    work, grid = blocks * heads, min(blocks * heads, device.num_sms)
    if work + 2 * grid > MAX_WORK:  # what blocks count up to before they stop
        raise NotImplementedError(
            f"{plan.kernel} would have {work} pieces of work; a launch has fewer than 2**32"
        )
    return Step.of(
        plan,
        grid,
        *steps.all_strides(problem, v, out, lse),
        *steps.shape_values(problem, blocks),
        *steps.section_values(
            problem, device, heads, _key_bytes(problem, q), operands.shared_by_heads(problem)
        ),
        work,
        *steps.band_values(problem),
        scale,
        *operands.rest(problem, options, forward=True),
        *list_rest(problem, plan, operands),
        encoders=(
            Encoder(q, sm90.WARPGROUP_ROWS),
            Encoder(k, plan["kBlockN"]),
            Encoder(v, plan["kBlockN"]),
            # Where the output does not leave by a map, q's stands in.
            Encoder(out if plan["kStoreBytes"] else q, sm90.STORE_ROWS),
            *(() if staged is None else (Encoder(operands.args[staged], sm90.WARPGROUP_ROWS),)),
        ),
    )


def _key_bytes(problem, q) -> int:
    """Of the keys and values of a head, shared by its group."""
    return problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * q.itemsize // problem.group


def _prepare(problem, device, arrays, operands, tile=None):
    """The forward pass of (q, k, v, out, lse), its family and why others were not taken."""
    q, k, v, out, lse = arrays
    read = steps.pack_narrow(problem, q, k, v)
    store = steps.whole_rows(out, problem.head_dim_v) and unfit(out) is None
    access = steps.access_of(store, **dict(zip("qkv", read)))
    family, rejections = choose(problem, device, access, "forward", tile)
    staged = None
    if family is sm90:
        ways = dict(paired=operands.paired(problem), staged=operands.staged(problem))
        plan = sm90.forward_plan(problem, device, access, tile=tile, **ways)
        staged = ways["staged"] if plan["kStaged"] else None
        step = _sm90_step(problem, device, plan, operands, staged, *read, out, lse)
    else:
        plan = family.forward_plan(problem, device, access, tile=tile)
        step = _portable_step(problem, device, plan, operands, *read, out, lse)
    packed = tuple(name for name, a, b in zip("qkv", read, (q, k, v)) if a is not b)
    # With one piece for each block nothing is left to draw, with pieces of one length no gain.
    uneven = problem.bounded or problem.lengths or problem.block_map is not None
    uneven = uneven or problem.seqlen_q % plan["kBlockM"] != 0
    ticket = uneven and math.prod(_work(problem, plan)) > step.blocks
    mapped = (0, 1, 2, 3 if plan["kStoreBytes"] else 0) if family is sm90 else ()
    return _Forward(step, packed, mapped, staged, ticket, Options.of(problem)), family, rejections


def _ready(problem, device_id: int, arrays, starts, operands, tile) -> _Forward:
    """The forward pass of (q, k, v, out, lse), prepared now or kept from an equal call."""

    def make():
        steps.check_aligned(**dict(zip(("q", "k", "v", "out", "lse"), arrays)), **operands.arrays)
        return _prepare(problem, steps.device_facts(device_id), arrays, operands, tile)[0]

    key = (problem, device_id, tile, steps.key_of(arrays, starts), operands.key())
    return steps.prepared(key, make)


def plans_of(problem, q, k, v, out, lse, tile=None, extras=None) -> list[Plan]:
    """The kernels that :func:`forward` would launch; none is built or launched.

    It takes what `forward` takes, and raises ValueError and NotImplementedError as that does.
    """
    return _plans_of(problem, (q, k, v, out, lse), Operands.of(problem, extras), tile)


def _plans_of(problem, arrays, operands, tile):
    if len(problem.batch) > BATCH_DIMS:
        return steps.plans_of_outer(_plans_of, problem, arrays, operands, tile)
    device_id, starts = arrays[0].data.device_id, steps.starts_of(arrays)
    problem, operands, first, _ = as_bits(problem, operands, arrays[:3], False, tile)
    plan = _ready(problem, device_id, arrays, starts, operands, tile).step.plan
    plans = [plan, *list_plans(problem, plan, operands)]
    return plans if first is None else [*plans, first.plan]


def forward(problem, q, k, v, out, lse, tile=None, extras=None) -> None:
    """Attention forward.

    Parameters
    ----------
    problem : Problem
    q, k, v : cupy.ndarray (*batch, Hq, L, D), (*batch, Hkv, S, D), (*batch, Hkv, S, Dv)
    out : cupy.ndarray (*batch, Hq, L, Dv)
    lse : cupy.ndarray (*batch, Hq, L) or None
    tile : a family's Tile, optional
        In place of the one that would be chosen; it chooses its family.
    extras : Extras, optional
        What the problem's program, sinks, dropout and block map read.

    Raises
    ------
    ValueError
        Elements that do not lie on multiples of their size.
    NotImplementedError
        No kernel for this device, or more thread blocks than a launch can have.
    CompileError, OSError
        As :func:`cuflash.jit.build`.
    RuntimeError
        The driver refused a launch or a tensor map.
    """
    _forward(problem, (q, k, v, out, lse), Operands.of(problem, extras), tile)


def _forward(problem, arrays, operands, tile) -> None:
    if len(problem.batch) > BATCH_DIMS:
        for inner, some, its in steps.outer(problem, arrays, operands):
            _forward(inner, some, its, tile)
        return
    q, k, v, out, lse = arrays
    device_id = q.data.device_id
    starts = steps.starts_of(arrays)
    if problem.program is not None:
        masked = as_bits(problem, operands, arrays[:3], False, tile)
        masked.launch(device_id)
        problem, operands = masked.problem, masked.operands
    step, packed, mapped, staged, ticket, options = _ready(
        problem, device_id, arrays, starts, operands, tile
    )
    if packed:
        arrays = (*steps.pack_narrow(problem, q, k, v), out, lse)
        starts = steps.starts_of(arrays)
    lists = list_words(problem, step.plan, operands)
    if not mapped:
        step.launch(device_id, *starts, 0, *operands.words(options), *lists)
        return
    place = _ticket(device_id) if ticket else 0
    mapped = [starts[n] for n in mapped]
    if staged is not None:
        mapped.append(operands.args[staged].data.ptr)
    step.launch(device_id, *starts[2:], place, *operands.words(options), *lists, mapped=mapped)


def _ticket(device_id: int) -> int:
    """Where a counter lies that is 0 for the next kernel of the current stream, which leaves it so.

    Kernels of one stream run one after the other and share one. What a graph runs, and when, nobody
    knows: each of its launches has its own.
    """
    stream = cupy.cuda.get_current_stream()
    if stream.is_capturing():
        return steps.kept(_zeroed()).ptr
    key = device_id, steps.stream_id(stream)
    counter = _tickets.get(key)
    if counter is None:
        with _tickets_lock:
            counter = _tickets.get(key) or _zeroed()
            _tickets[key] = counter
    return counter.ptr


def _zeroed():
    counter = cupy.cuda.alloc(4)
    counter.memset_async(0, 4)
    return counter


def merge(outs, lses, out, lse) -> None:
    """Attention over the union of the keys from attention over parts of them.

    Parameters
    ----------
    outs : list of cupy.ndarray (..., Dv)
    lses : list of cupy.ndarray (...)
    out, lse : cupy.ndarray of the same shapes
    """
    from .families import portable

    if out.size == 0:
        return
    plan = portable.combine_plan(out.dtype.name)
    all_outs = cupy.empty((len(outs), *out.shape), out.dtype)
    all_lses = cupy.empty((len(lses), *lse.shape), lse.dtype)
    for n, (part, part_lse) in enumerate(zip(outs, lses)):
        all_outs[n], all_lses[n] = part, part_lse
    whole_out = out if out.flags.c_contiguous else cupy.empty(out.shape, out.dtype)
    whole_lse = lse if lse.flags.c_contiguous else cupy.empty(lse.shape, lse.dtype)
    blocks = min(-(-lse.size // plan["kWarps"]), MAX_COMBINE_BLOCKS)
    step = Step.of(plan, blocks, lse.size, len(outs), out.shape[-1])
    step.launch(
        out.data.device_id, *(a.data.ptr for a in (all_outs, all_lses, whole_out, whole_lse))
    )
    if whole_out is not out:
        out[...] = whole_out
    if whole_lse is not lse:
        lse[...] = whole_lse


def explain(problem, q, k, v, extras=None):
    """Which kernel forward would run and why: an :class:`cuflash.explanation.Explanation`, or a str
    where none runs.
    """
    from .explanation import Explanation

    device_id = q.data.device_id
    device = steps.device_facts(device_id)
    rows = math.prod(problem.batch) * problem.num_heads * problem.seqlen_q
    if rows == 0 or problem.seqlen_k == 0:
        return f"no kernel on {device.name}: without queries or keys the result is a constant"
    operands = Operands.of(problem, extras)
    if len(problem.batch) > BATCH_DIMS:  # one of the launches that run in turn
        problem, (q, k, v), operands = next(steps.outer(problem, (q, k, v), operands))
    steps.check_aligned(q=q, k=k, v=v, **operands.arrays)
    problem, operands, *_ = as_bits(problem, operands, (q, k, v), False)
    shape = (*problem.batch, problem.num_heads, problem.seqlen_q, problem.head_dim_v)
    out = cupy.empty(shape, q.dtype)
    prepared, family, rejections = _prepare(problem, device, (q, k, v, out, None), operands)
    step = prepared.step
    attributes = jit.attributes(jit.kernel(step.plan, device_id))
    item = 8 if problem.dtype == "float64" else 4
    return Explanation(
        device.name,
        family.NAME,
        step.plan,
        step.blocks,
        attributes["registers"],
        attributes["local_bytes"],
        prepared.packed,
        tuple(rejections),
        rows * item * (3 + round_up(problem.head_dim, 16)),
        str(prepared.options),
    )
