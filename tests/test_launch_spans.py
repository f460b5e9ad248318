"""Lengths and segments on the way to kernels, without a GPU: when they are no masks, and what kernels
read then.
"""

from __future__ import annotations

import numpy as np
import pytest
from launches import TILE, arrays_of, gpu_side, on_host  # noqa: F401
from test_launch_scores import program_of
from test_plan import problem_of

import cuflash
from cuflash import mask_bits
from cuflash.extras import Extras
from cuflash.score import Arg, Expr, element, symbol

QUERIES, KEYS = 1152, 500  # pieces of one length, more than a device has room for


@pytest.fixture
def at_once(gpu_side, monkeypatch):  # noqa: F811
    for name in ("LENGTH_PAIRS", "SEGMENT_PAIRS", "SEGMENT_KEYS"):
        monkeypatch.setattr(mask_bits, name, 0)
    cupy = gpu_side[0]

    def clip(x, least, most, out):
        out.base[...] = np.clip(x.base, least, most)
        cupy.clipped.append(out.base.ravel().tolist())

    monkeypatch.setattr(cupy, "clip", clip, raising=False)
    full = lambda shape, x, dtype: cupy.ndarray(None, base=np.full(shape, x, dtype))  # noqa: E731
    monkeypatch.setattr(cupy, "full", full, raising=False)
    cupy.clipped = []
    gpu_side[1]._prepared.clear()
    yield
    gpu_side[1]._prepared.clear()


def inputs(cupy, dtype=np.float16, batch=(2, 3), dim=64):
    shapes = [(4, QUERIES, dim), (2, KEYS, dim), (2, KEYS, dim)]
    return [cupy.ndarray((*batch, *shape), dtype) for shape in shapes]


def launched(launch):
    return [x for x in launch.log if isinstance(x, tuple)]


def called(launch, arrays, **options):
    """(plan, blocks, fields) of the forward pass's kernels, and of backward's."""
    cuflash.launch_mask_bits.cupy.clipped = []
    launch.log.clear()
    out, pullback = cuflash.attention_vjp(*arrays, **options)
    forward = launched(launch)
    launch.log.clear()
    pullback(out)
    return forward, launched(launch)


def test_lengths(on_host, at_once):  # noqa: F811
    """Those of int32 are read where they are, others are copied, however they lie."""
    cupy, launch = on_host
    lens = cupy.ndarray(None, base=np.arange(6, dtype=np.int32).reshape(2, 3))
    ends = cupy.ndarray(None, base=np.array([-5, 1 << 40, 7])[::-1])
    for options, sides in (
        (dict(q_lens=lens, kv_lens=ends), "qk"), (dict(kv_lens=ends, causal=True), "k"),
        (dict(q_lens=lens, window=(9, 0)), "q"),
    ):  # fmt: skip
        forward, backward = called(launch, inputs(cupy), **options)
        assert [plan.kernel for plan, *_ in backward] == ["delta", "fwd_portable", "bwd_sm90", "cast"]
        banded = "causal" in options or "window" in options
        for plan, _, fields in forward + backward[1:]:
            assert plan["kLengths"] and plan["kBand"] == banded
            assert (fields["q_lengths"] == lens.data.ptr) == ("q" in sides)
            assert 0 != fields["k_lengths"] not in (ends.data.ptr, fields["q_lengths"])
        assert cupy.clipped == ([[7, KEYS, 0] * 2] * 2 if "k" in sides else [])
        ((main, _, fields),) = forward
        assert main.kernel == "fwd_sm90" and main["kTail"] != banded and fields["ticket"] != 0
        assert backward[2][0]["kStoreFirst"] and backward[3][0]["kEmptyRows"] > 0
    said = str(cuflash.explain(*inputs(cupy), q_lens=lens))
    assert "lengths, as the ends of queries and keys" in said and "pair by pair" not in said


def test_what_stays_a_mask(on_host, at_once, monkeypatch):  # noqa: F811
    """Other options beside lengths, other types, arrays that maps cannot describe, small calls."""
    cupy, launch = on_host
    lens = cupy.ndarray(None, base=np.zeros(3, np.int32))

    def short(arrays, **options):
        """Of the forward and the backward kernel."""
        forward, backward = called(launch, arrays, kv_lens=lens, **options)
        found = [plan["kLengths"] for plan, *_ in forward + backward
                 if plan.kernel not in ("delta", "cast", "mask_bits")]  # fmt: skip
        return found[0], found[-1]

    assert short(inputs(cupy)) == (True, True)
    for options in (
        dict(softcap=2.0), dict(dropout_p=0.5, seed=1), dict(mask_mod=lambda b, h, i, j: i != j),
    ):  # fmt: skip
        assert short(inputs(cupy), **options) == (False, False)
    assert short(inputs(cupy, np.float32)) == short(inputs(cupy, batch=(2, 1, 3))) == (False, False)
    turned = [cupy.ndarray(None, base=x.base[..., ::-1, :]) for x in inputs(cupy)]
    assert short(turned) == (False, False)
    monkeypatch.setattr(mask_bits, "LENGTH_PAIRS", 24 * QUERIES * KEYS + 1)
    cuflash.launch_steps._prepared.clear()
    assert short(inputs(cupy)) == (False, False)


def test_plans_and_tiles(on_host, at_once):  # noqa: F811
    """What is said to run is what runs; a portable tile asks for masks."""
    cupy, launch = on_host
    ends = Arg("grid", "int32", 0, "kv_lens", (False, False))
    ids = [Arg("grid", "int32", 0, "ids", along) for along in ((True, False), (False, True))]
    by_lengths = Expr(symbol("j")) < Expr(element(0, ends))
    by_ids = Expr(element(0, ids[0])) == Expr(element(1, ids[1]))
    for args, seen, lists in (([ends], by_lengths, 0), (ids, by_ids, 1)):
        program = program_of(lambda s, i, j: s, args, seen.node)
        problem = problem_of(batch=(2,), program=program)
        view = np.broadcast_to(np.zeros((2, 1, 1, 1), np.int32), (2, 2, 128, 128))
        extras = Extras((cupy.ndarray(None, base=view),) * len(args))
        q, k, v, out, lse = arrays = arrays_of(cupy, problem)
        whole = out, q, k, v, out, lse, None, q, k, v, True
        for function, plans_of, given in (
            (launch.forward, launch.plans_of, arrays),
            (launch.backward, cuflash.launch_backward.plans_of, whole),
        ):
            launch.log.clear()
            function(problem, *given, extras=extras)
            ran = [plan for plan, *_ in launched(launch)]
            said = plans_of(problem, *given, extras=extras)
            assert sorted(map(str, ran)) == sorted(map(str, said))
            assert sum(plan.kernel == "span_lists" for plan in ran) >= lists
        plans = launch.plans_of(problem, *arrays, tile=TILE, extras=extras)
        assert [plan.kernel for plan in plans] == ["fwd_portable"]


def test_segments(on_host, at_once):  # noqa: F811
    """Ids made 32 bits wide, lists for each kernel's blocks, and scores that read those ids."""
    cupy, launch = on_host
    q_ids = cupy.ndarray(None, base=np.full((2, 1, QUERIES), 1 << 40))
    k_ids = cupy.ndarray(None, base=np.zeros((2, 3, KEYS), np.int32))
    options = dict(q_segment_ids=q_ids, kv_segment_ids=k_ids)
    for band in (dict(), dict(causal=True)):
        forward, backward = called(launch, inputs(cupy), **options, **band)
        assert len(cupy.clipped) == 2 and set(cupy.clipped[0]) == {2**31 - 1}
        assert len(cupy.clipped[0]) == 6 * QUERIES
        names = [plan.kernel for plan, *_ in backward]
        assert names == ["delta", "span_lists", "fwd_portable", "span_lists", "bwd_sm90", "cast"]
        for n, log in enumerate((forward, backward[1:3], backward[3:5])):
            (lists, blocks, listed), (main, _, fields) = log
            assert (lists.kernel, main["kBlockMap"], main["kLengths"]) == ("span_lists", True, False)
            assert (lists["kBlockM"], lists["kBlockN"]) == (main["kBlockM"], main["kBlockN"])
            assert lists["kBackward"] == (n == 2) and main["kBand"] == bool(band)
            size = -(-QUERIES // main["kBlockM"]), -(-KEYS // main["kBlockN"])
            rows, row = (size[1], 2 + 2 * size[0]) if n == 2 else (size[0], 2 + size[1])
            assert (listed["num_rows"], listed["row_length"], blocks) == (rows, row, 6 * rows)
            low, high = (-QUERIES, KEYS - QUERIES) if band else (-QUERIES, KEYS)
            assert (listed["band_lo"], listed["band_hi"]) == (low, high)
            assert listed["lists"] == fields["lists"] and listed["k_ids"] == k_ids.data.ptr
            assert fields["lists_strides"] == [0, 3 * rows * row, rows * row, 0, row, 1]
            assert (fields["arg0"], fields["arg1"]) == (listed["q_ids"], listed["k_ids"])
            assert fields["arg0_strides"] == [0, 3 * QUERIES, QUERIES, 0, 1, 0]
            assert fields["arg1_strides"] == [0, 3 * KEYS, KEYS, 0, 0, 1]
        assert "Two<i32> arg1" in forward[1][0].score  # two ids are one read
    said = str(cuflash.explain(*inputs(cupy), **options))
    assert "in blocks that lists name" in said


def test_which_segments_stay_masks(on_host, at_once, monkeypatch):  # noqa: F811
    cupy, launch = on_host

    def kernels(dim=64, keys=KEYS, need=("q", "k", "v"), **options):
        q, k, v = inputs(cupy, dim=dim)
        k, v = (cupy.ndarray(None, base=x.base[..., :keys, :]) for x in (k, v))
        ids = [cupy.ndarray(None, base=np.zeros(n, np.int32)) for n in (QUERIES, keys)]
        names = ("q_segment_ids", "kv_segment_ids")
        forward, backward = called(launch, (q, k, v), **dict(zip(names, ids)), **options)
        return ["span_lists" in [plan.kernel for plan, *_ in log] for log in (forward, backward)]

    assert kernels() == kernels(dim=128) == kernels(window=(50, 3)) == [True, True]
    assert kernels(dim=192) == [True, False]
    assert kernels(dim=256) == kernels(keys=KEYS - 1) == [False, False]
    lens = cupy.ndarray(None, base=np.zeros(3, np.int32))
    assert kernels(kv_lens=lens) == kernels(softcap=1.0) == [False, False]
    monkeypatch.setattr(mask_bits, "SEGMENT_KEYS", KEYS + 1)
    cuflash.launch_steps._prepared.clear()
    assert kernels() == [False, False]
