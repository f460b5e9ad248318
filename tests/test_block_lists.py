"""What kernels walk along a block map by: against brute force, and on its way into a launch."""

from __future__ import annotations

import ctypes
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launches import TILE, arrays_of, gpu_side  # noqa: F401
from test_plan import problem_of

from cuflash import block_lists
from cuflash.block_lists import Cut
from cuflash.blockmap import BlockMap
from cuflash.extras import Extras
from cuflash.problem import Band


@st.composite
def maps(draw):
    """(kinds, block, cut)"""
    lengths = draw(st.tuples(*[st.integers(1, 200)] * 2))
    block = draw(st.tuples(*[st.integers(1, 70)] * 2))
    tile = draw(st.tuples(*[st.sampled_from((16, 32, 64))] * 2))
    band = draw(st.none() | st.tuples(*[st.integers(-150, 150)] * 2).map(sorted).map(tuple))
    shape = (2, *(-(-n // size) for n, size in zip(lengths, block)))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    chances = draw(st.sampled_from(((1, 1, 1), (8, 1, 1), (1, 1, 8))))
    kinds = rng.choice(3, shape, p=np.array(chances) / sum(chances)).astype(np.uint8)
    return kinds, block, Cut(*lengths, *tile, band, draw(st.booleans()), draw(st.booleans()))


def brute(kinds, block, cut):
    """(visited, whole but for the sequences' ends) of one head's kernel blocks, pair by pair."""
    i, j = np.ogrid[: cut.seqlen_q, : cut.seqlen_k]
    of_pair = kinds[i // block[0], j // block[1]]
    lo, hi = cut.band or (-1000, 1000)
    seen = (j >= i + lo) & (j <= i + hi)
    visited, whole = (np.zeros(cut.blocks, bool) for _ in range(2))
    for m, n in np.ndindex(cut.blocks):
        at = tuple(
            slice(x * size, (x + 1) * size)
            for x, size in ((m, cut.block_m), (n, cut.block_n))
        )
        own = of_pair[at]
        visited[m, n] = (own > 0).any() and seen[at].any()
        whole[m, n] = visited[m, n] and seen[at].all() and (own > int(cut.masked)).all()
    return visited, whole


def round_from(start, flags):
    """Where flags are set, from `start` on and round."""
    found = np.flatnonzero(flags).tolist()
    return [n for n in found if n >= start] + [n for n in found if n < start]


@given(maps())
def test_lists_against_brute_force(case):
    """Every block that must be visited, no other; those that need no look first; turns without gaps
    in the order in which blocks of keys start.
    """
    kinds, block, cut = case
    rows, columns = cut.blocks
    forward, backward = (block_lists.lists(np, kinds, block, cut, x) for x in (False, True))
    assert forward.shape == (2, rows, block_lists.row_length(cut, False))
    assert backward.shape == (2, columns, block_lists.row_length(cut, True))
    assert forward.dtype == backward.dtype == np.int32
    inside_q = np.arange(1, rows + 1) * cut.block_m <= cut.seqlen_q
    inside_k = np.arange(1, columns + 1) * cut.block_n <= cut.seqlen_k
    for head in range(2):
        visited, whole = brute(kinds[head], block, cut)
        for m, (total, partial, *blocks) in enumerate(forward[head].tolist()):
            full = total - partial
            start = m * columns // rows if cut.spread else 0
            assert blocks[:full] == round_from(start, whole[m] & inside_k)
            assert blocks[full:total] == round_from(start, visited[m] & ~(whole[m] & inside_k))
        whole &= inside_q[:, None] & inside_k
        for n, (total, partial, *rest) in enumerate(backward[head].tolist()):
            blocks, turns = rest[:total], rest[rows : rows + total]
            full = total - partial
            start = n * rows // columns if cut.spread else 0
            assert blocks[:full] == round_from(start, whole[:, n])
            assert blocks[full:] == round_from(start, visited[:, n] & ~whole[:, n])
            assert turns == [visited[m, n + 1 :].sum() for m in blocks]


def test_memory():
    """The figure that block_lists.py gives."""
    cut = Cut(16384, 16384, 128, 128, None, False)
    kinds = np.ones((1, 128, 128), np.uint8)
    for backward in (False, True):
        size = block_lists.lists(np, kinds, (128, 128), cut, backward).nbytes
        assert size <= (8 if backward else 4) * 16384**2 // 128**2 * 1.02


# On the way into a launch -----------------------------------------------------------------------


class Stream:
    """A stream that tells what was asked of it."""

    def __init__(self):
        self.waits, self.capturing = [], False

    def is_capturing(self):
        return self.capturing

    def record(self):
        return f"event of {id(self)}"

    def wait_event(self, event):
        self.waits.append(event)


@pytest.fixture
def host(gpu_side, monkeypatch):  # noqa: F811
    """(cupy, launch, stream): lists are made by NumPy."""
    cupy, _, launch = gpu_side
    module = sys.modules["cuflash.launch_block_map"]
    stream = Stream()
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: stream)

    def lists(xp, kinds, *rest):
        return cupy.ndarray(None, base=block_lists.lists(np, kinds.base, *rest))

    monkeypatch.setattr(module, "lists", lists)
    launch.log.clear()
    return cupy, launch, stream


def view_of(cupy, problem, kinds, block):
    """The Extras of a call with a map."""
    block_map = BlockMap._of(cupy.ndarray(None, base=kinds), block, 0)
    cupy.ndarray.reshape = lambda self, shape: self.view_of(self.base.reshape(shape))
    home = SimpleNamespace(device=0, xp=cupy)
    heads = (*problem.batch, problem.num_heads)
    return Extras(block_map=block_map.fit(home, heads, (problem.seqlen_q, problem.seqlen_k)))


def rows_at(fields, place, count, length):
    """What a kernel finds of one head: `place` is (*batch axes, head)."""
    strides = fields["lists_strides"]
    index = (0,) * (4 - len(place)) + place
    start = fields["lists"] + 4 * sum(n * stride for n, stride in zip(index, strides))
    assert strides[4:] == [length, 1]
    memory = (ctypes.c_int32 * (count * length)).from_address(start)
    return np.array(memory).reshape(count, length)


@pytest.mark.parametrize("own", ((), (4,), (2, 1), (2, 4), (1, 4)))
@pytest.mark.parametrize("batch", ((2,), (3, 2), (2, 1, 3, 2)))
@pytest.mark.parametrize("band", (None, Band(-300, 0)))
def test_where_a_launch_finds_lists(host, own, batch, band):
    """Through the strides of the parameters, for each entry of a batch and each head, in the
    launches of a batch of more axes than a kernel takes, too.
    """
    cupy, launch, _ = host
    block = (128, 128)
    problem = problem_of(
        length=300, keys=500, batch=batch, num_heads=4, num_kv_heads=2, block_map=block, band=band
    )
    kinds = np.random.default_rng(3).integers(0, 3, (*own, 3, 4)).astype(np.uint8)
    extras = view_of(cupy, problem, kinds, block)
    arrays = arrays_of(cupy, problem)
    launch.forward(problem, *arrays, tile=TILE, extras=extras)
    pairs = None if band is None else (band.lo, band.hi)
    cut = Cut(300, 500, 64, 64, pairs, False)
    full = np.broadcast_to(kinds, (*batch, 4, 3, 4))
    want = block_lists.lists(np, full, block, cut, False)
    outer = list(np.ndindex(batch[:-3]))
    assert len(launch.log) == len(outer)
    for index, (plan, _, fields) in zip(outer, launch.log):
        assert plan["kBlockMap"] and ("lists", "in") in plan.operands
        for place in np.ndindex(*batch[-3:], 4):
            found = rows_at(fields, place, 5, block_lists.row_length(cut, False))
            assert np.array_equal(found, want[(*index, *place)])


def test_backward_has_lists_of_its_own(host):
    """Of its own tile; the statistics pass has forward's."""
    cupy, launch, _ = host
    problem = problem_of("float32", length=300, keys=500, block_map=(128, 256))
    kinds = np.random.default_rng(3).integers(0, 3, (2, 3, 2)).astype(np.uint8)
    extras = view_of(cupy, problem, kinds, (128, 256))
    q, k, v, out, lse = arrays_of(cupy, problem)
    launch.backward(problem, out, q, k, v, out, lse, None, q, k, v, True, extras=extras)
    plans = {plan.kernel: (plan, fields) for plan, _, fields in launch.log}
    assert set(plans) == {"delta", "fwd_portable", "bwd_portable", "cast"}
    for name, backward in (("fwd_portable", False), ("bwd_portable", True)):
        plan, fields = plans[name]
        cut = Cut(300, 500, plan["kBlockM"], plan["kBlockN"], None, False)
        want = block_lists.lists(np, kinds, (128, 256), cut, backward)
        for head in range(2):
            shape = want.shape[-2:]
            assert np.array_equal(rows_at(fields, (0, head), *shape), want[head])
    assert not plans["delta"][0].operands and not plans["cast"][0].operands


@pytest.mark.parametrize("deterministic", (True, False))
def test_hopper_walks_too(host, deterministic):
    """Its kernels find their lists, by the tiles that divide the map's blocks."""
    cupy, launch, _ = host
    problem = problem_of(length=300, keys=500, batch=(2,), block_map=(128, 256))
    kinds = np.random.default_rng(3).integers(0, 3, (2, 2, 3, 2)).astype(np.uint8)
    extras = view_of(cupy, problem, kinds, (128, 256))
    q, k, v, out, lse = arrays_of(cupy, problem)
    launch.forward(problem, q, k, v, out, lse, extras=extras)
    launch.backward(problem, out, q, k, v, out, lse, None, q, k, v, deterministic, extras=extras)
    plans = {plan.kernel: (plan, fields) for plan, _, fields in launch.log if plan}
    for name, backward in (("fwd_sm90", False), ("bwd_sm90", True)):
        plan, fields = plans[name]
        assert 128 % plan["kBlockM"] == 0 and 128 % plan["kBlockN"] == 0
        spread = backward and not deterministic
        cut = Cut(300, 500, plan["kBlockM"], plan["kBlockN"], None, False, spread)
        want = block_lists.lists(np, kinds, (128, 256), cut, backward)
        for place in np.ndindex(2, 2):
            assert np.array_equal(rows_at(fields, place, *want.shape[-2:]), want[place])


@pytest.mark.parametrize("dim", (64, 256))
def test_hopper_looks_at_masks_beside_a_map(host, dim):
    """Only whole blocks of full ones need no look; backward functions of scores beside a map have
    no registers in wide kernels.
    """
    from cuflash.score import Arg, Expr, Program, constant, element, symbol

    cupy, launch, _ = host
    mask = Arg("grid", "bool", 0, "mask")
    seen = (Expr(element(0, mask)) & True).node
    program = Program(symbol("s"), seen, (mask,), constant(1.0), ())
    problem = problem_of(
        dim=dim, dim_v=dim, length=300, keys=500, batch=(2,), block_map=(128, 256),
        program=program,
    )
    kinds = np.random.default_rng(3).integers(0, 3, (2, 2, 3, 2)).astype(np.uint8)
    view = view_of(cupy, problem, kinds, (128, 256)).block_map
    array = cupy.ndarray(None, base=np.ones((2, 2, 300, 500), bool))
    extras = Extras((array,), block_map=view)
    q, k, v, out, lse = arrays_of(cupy, problem)
    launch.forward(problem, q, k, v, out, lse, extras=extras)
    launch.backward(problem, out, q, k, v, out, lse, None, q, k, v, True, extras=extras)
    plans = {plan.kernel: (plan, fields) for plan, _, fields in launch.log if plan}
    main = "bwd_sm90" if dim == 64 else "bwd_portable"
    assert {"fwd_sm90", main} <= set(plans)
    for name in ("fwd_sm90", main):
        plan, fields = plans[name]
        assert 128 % plan["kBlockM"] == 0 and 128 % plan["kBlockN"] == 0
        assert "map_kinds" not in fields and fields["arg0"] == array.data.ptr
        cut = Cut(300, 500, plan["kBlockM"], plan["kBlockN"], None, True)
        want = block_lists.lists(np, kinds, (128, 256), cut, name == main)
        for place in np.ndindex(2, 2):
            assert np.array_equal(rows_at(fields, place, *want.shape[-2:]), want[place])


def test_hopper_leaves_maps_in_parts(host):
    cupy, launch, _ = host
    problem = problem_of(length=300, keys=500, block_map=(64, 128))
    extras = view_of(cupy, problem, np.ones((5, 4), np.uint8), (64, 128))
    launch.forward(problem, *arrays_of(cupy, problem), extras=extras)
    assert launch.log[-1][0].kernel == "fwd_portable"


def test_blocks_that_kernels_cut(host):
    """Where a kernel can meet a block in part, its scores look at the map, too."""
    cupy, launch, _ = host
    for block, looks in (((128, 256), False), ((64, 128), True), ((128, 96), True)):
        launch.log.clear()
        problem = problem_of(length=300, keys=500, block_map=block)
        shape = tuple(-(-n // size) for n, size in zip((300, 500), block))
        extras = view_of(cupy, problem, np.ones(shape, np.uint8), block)
        launch.forward(problem, *arrays_of(cupy, problem), tile=TILE, extras=extras)
        ((plan, _, fields),) = launch.log
        assert ("map_kinds" in fields) == looks == ("allowed(i, j)" in plan.score)
        if looks:
            assert f"i / {block[0]}" in plan.score and f"j / {block[1]}" in plan.score
            assert fields["map_kinds"] == extras.block_map.kinds.data.ptr
            assert fields["map_kinds_strides"] == [0, 0, 0, 0, shape[1], 1]


def test_lists_are_made_once(host):
    """Again for other tiles; another stream waits for them; a graph makes its own."""
    cupy, launch, stream = host
    steps = sys.modules["cuflash.launch_steps"]
    module = sys.modules["cuflash.launch_block_map"]
    problem = problem_of(length=300, keys=500, block_map=(128, 128))
    extras = view_of(cupy, problem, np.ones((3, 4), np.uint8), (128, 128))
    arrays = arrays_of(cupy, problem)

    def places(tile=TILE):
        launch.log.clear()
        launch.forward(problem, *arrays, tile=tile, extras=extras)
        return launch.log[0][2]["lists"]

    number = steps.stream_id
    try:
        first = places()
        assert places() == first and not stream.waits
        assert places(TILE.__class__(128, 64, 4, 2)) != first
        stream.capturing = True
        assert places() == first
        steps.stream_id = lambda stream: 7
        held = len(module.steps._held_by_graphs)
        assert places() != first and len(module.steps._held_by_graphs) == held + 1
        stream.capturing = False
        assert places() == first and len(stream.waits) == 1
    finally:
        steps.stream_id = number


def test_making_a_map(host):
    """The masks' arrays go to the kernel as they are, and heads that share masks share a launch."""
    from cuflash.score import Arg, Expr, Program, constant, element, symbol

    cupy, launch, _ = host
    mask = Arg("grid", "bool", 0, "mask")
    program = Program(
        symbol("s"), (Expr(element(0, mask)) & True).node, (mask,), constant(1.0), ()
    )
    problem = problem_of(length=300, keys=500, num_heads=4, batch=(2,), program=program)
    array = np.ones((2, 1, 300, 500), bool)
    view = cupy.broadcast_to(cupy.ndarray(None, base=array), (2, 4, 300, 500))
    kinds = cupy.ndarray(None, base=np.zeros((2, 1, 3, 4), np.uint8))
    launch.block_kinds(problem, Extras((view,)), (128, 128), kinds)
    ((plan, blocks, fields),) = launch.log
    assert plan.kernel == "block_map" and blocks == math.prod(kinds.shape)
    assert fields["kinds"] == kinds.data.ptr and fields["arg0"] == view.data.ptr
    assert fields["arg0_strides"] == [0, 0, 300 * 500, 0, 500, 1]
    assert (fields["num_heads"], fields["num_blocks"], fields["num_key_blocks"]) == (1, 3, 4)
    assert (fields["map_block_q"], fields["map_block_k"]) == (128, 128)
