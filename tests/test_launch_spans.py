"""Lengths and segments on the way to kernels, without a GPU: when they go as ends and block lists, the
kernels in front, and what the others read.
"""

from __future__ import annotations

import numpy as np
import pytest
from launches import TILE, arrays_of, gpu_side, on_host  # noqa: F401
from test_launch_scores import program_of
from test_plan import problem_of

import cuflash
from cuflash import spans
from cuflash.extras import Extras
from cuflash.score import Arg, Expr, element, symbol

IN_FRONT = ("lengths", "spans", "span_lists")
QUERIES, KEYS = 1152, 500  # pieces of one length, more than a device has room for


@pytest.fixture
def at_once(gpu_side, monkeypatch):  # noqa: F811
    for name in ("LENGTH_PAIRS", "SEGMENT_PAIRS", "SEGMENT_KEYS"):
        monkeypatch.setattr(spans, name, 0)
    gpu_side[1]._prepared.clear()
    yield
    gpu_side[1]._prepared.clear()


def inputs(cupy, dtype=np.float16, batch=(2, 3), dim=64):
    shapes = [(4, QUERIES, dim), (2, KEYS, dim), (2, KEYS, dim)]
    return [cupy.ndarray((*batch, *shape), dtype) for shape in shapes]


def launched(launch):
    return [x for x in launch.log if isinstance(x, tuple)]


def called(launch, arrays, **options):
    """The forward pass's (plan, blocks, fields) and then, if there are any, those of backward."""
    launch.log.clear()
    out, pullback = cuflash.attention_vjp(*arrays, **options)
    forward = launched(launch)
    launch.log.clear()
    pullback(out)
    return forward, launched(launch)


def test_lengths(on_host, at_once):  # noqa: F811
    cupy, launch = on_host
    lens = cupy.ndarray(None, base=np.zeros((2, 1), np.int64))
    ends = cupy.ndarray(None, base=np.zeros(6, np.uint8)[::2])
    for options, sides in (
        (dict(q_lens=lens, kv_lens=ends), "qk"), (dict(kv_lens=ends, causal=True), "k"),
        (dict(q_lens=lens, window=(9, 0)), "q"),
    ):  # fmt: skip
        forward, backward = called(launch, inputs(cupy), **options)
        (first, blocks, front), (main, _, fields) = forward
        assert (first.kernel, main.kernel, blocks) == ("lengths", "fwd_sm90", 1)
        assert first["GivenQ"] == ("i64" if "q" in sides else "i32")
        assert first["GivenK"] == ("unsigned char" if "k" in sides else "i32")
        assert front["q_given"] == (lens.data.ptr if "q" in sides else 0)
        assert front["k_given"] == (ends.data.ptr if "k" in sides else 0)
        assert front["q_given_strides"] == [0, int("q" in sides), 0, 0, 0, 0]
        assert front["k_given_strides"] == [0, 0, 2 * ("k" in sides), 0, 0, 0]
        assert (front["count"], front["batch_sizes"]) == (6, [1, 2, 3])
        assert (front["seqlen_q"], front["seqlen_k"]) == (QUERIES, KEYS)
        banded = "causal" in options or "window" in options
        assert main["kLengths"] and main["kBand"] == banded and main["kTail"] != banded
        assert fields["lengths"] == front["lengths"] and fields["ticket"] != 0
        plans = [plan.kernel for plan, *_ in backward]
        assert plans == ["lengths", "delta", "fwd_portable", "bwd_sm90", "cast"]
        for plan, _, fields in backward[2:]:
            assert plan["kLengths"] and fields["lengths"] == backward[0][2]["lengths"]
        assert backward[3][0]["kStoreFirst"] and backward[4][0]["kEmptyRows"] > 0
    said = str(cuflash.explain(*inputs(cupy), q_lens=lens))
    assert "lengths, as the ends of queries and keys" in said and "pair by pair" not in said


def test_what_stays_a_mask(on_host, at_once, monkeypatch):  # noqa: F811
    """Other options beside lengths, other types, arrays that maps cannot describe, small calls."""
    cupy, launch = on_host
    lens = cupy.ndarray(None, base=np.zeros(3, np.int32))

    def kernels(arrays, **options):
        forward, backward = called(launch, arrays, kv_lens=lens, **options)
        return {plan.kernel for plan, *_ in forward + backward}

    assert "lengths" in kernels(inputs(cupy))
    assert "lengths" not in kernels(inputs(cupy), softcap=2.0)
    assert "lengths" not in kernels(inputs(cupy), dropout_p=0.5, seed=1)
    assert "lengths" not in kernels(inputs(cupy), mask_mod=lambda b, h, i, j: i != j)
    assert "lengths" not in kernels(inputs(cupy, np.float32))
    assert "lengths" not in kernels(inputs(cupy, batch=(2, 1, 3)))
    # What is packed first has maps, what is read backwards has none.
    odd, turned = ([cupy.ndarray(None, base=x.base[at]) for x in inputs(cupy)]
                   for at in (np.s_[..., 1:], np.s_[..., ::-1, :]))  # fmt: skip
    assert "lengths" in kernels(odd) and "lengths" not in kernels(turned)
    monkeypatch.setattr(spans, "LENGTH_PAIRS", 24 * QUERIES * KEYS + 1)
    cuflash.launch_steps._prepared.clear()
    assert "lengths" not in kernels(inputs(cupy))


def test_plans_and_tiles(on_host, at_once):  # noqa: F811
    """What is said to run is what runs; a portable tile asks for masks."""
    cupy, launch = on_host
    ends = Arg("grid", "int32", 0, "kv_lens", (False, False))
    ids = [Arg("grid", "int32", 0, "ids", along) for along in ((True, False), (False, True))]
    by_lengths = Expr(symbol("j")) < Expr(element(0, ends))
    by_ids = Expr(element(0, ids[0])) == Expr(element(1, ids[1]))
    for args, seen, more in (([ends], by_lengths, 1), (ids, by_ids, 2)):
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
            assert sum(plan.kernel in IN_FRONT for plan in ran) >= more
        plans = launch.plans_of(problem, *arrays, tile=TILE, extras=extras)
        assert [plan.kernel for plan in plans] == ["fwd_portable"]


def test_segments(on_host, at_once):  # noqa: F811
    """Ids made 32 bits wide, lists for each kernel's blocks, and scores that read those ids."""
    cupy, launch = on_host
    q_ids = cupy.ndarray(None, base=np.zeros((2, 1, QUERIES), np.int64))
    k_ids = cupy.ndarray(None, base=np.zeros(2 * KEYS, np.uint8)[::2])
    options = dict(q_segment_ids=q_ids, kv_segment_ids=k_ids)
    for band in (dict(), dict(causal=True)):
        forward, backward = called(launch, inputs(cupy), **options, **band)
        (first, blocks, front), (lists, rows, listed), (main, _, fields) = forward
        assert (first.kernel, lists.kernel, main.kernel) == ("spans", "span_lists", "fwd_sm90")
        assert (first["GivenQ"], first["GivenK"]) == ("i64", "unsigned char")
        assert (front["q_given"], front["k_given"]) == (q_ids.data.ptr, k_ids.data.ptr)
        assert front["q_given_strides"] == [0, QUERIES, 0, 0, 1, 0]
        assert front["k_given_strides"] == [0, 0, 0, 0, 0, 2]
        pitch = QUERIES + 512  # both end on a multiple of 32
        assert (front["first_key"], front["pitch"], front["count"]) == (QUERIES, pitch, 6)
        assert blocks == -(-6 * pitch // 128)
        assert listed["spans"] == front["spans"] and listed["lists"] == fields["lists"]
        size = -(-QUERIES // main["kBlockM"]), -(-KEYS // main["kBlockN"])
        assert (listed["num_rows"], listed["row_length"]) == (size[0], 2 + size[1])
        assert rows == -(-6 * size[0] * 32 // 128)
        assert (lists["kBlockM"], lists["kBlockN"]) == (main["kBlockM"], main["kBlockN"])
        assert lists["kBand"] == main["kBand"] == bool(band) and not lists["kBackward"]
        row = 2 + size[1]
        assert fields["lists_strides"] == [0, 3 * size[0] * row, size[0] * row, 0, row, 1]
        assert main["kBlockMap"] and not main["kLengths"]
        assert fields["arg0"] == front["ids"] and fields["arg1"] == front["ids"] + 4 * QUERIES
        assert fields["arg0_strides"] == [0, 3 * pitch, pitch, 0, 1, 0]
        assert fields["arg1_strides"] == [0, 3 * pitch, pitch, 0, 0, 1]
        assert "Two<i32> arg1" in main.score  # two ids are one read
        plans = [plan.kernel for plan, *_ in backward]
        assert plans == ["spans", "delta", "span_lists", "fwd_portable", "span_lists", "bwd_sm90",
                         "cast"]  # fmt: skip
        (lists, _, listed), (main, _, fields) = backward[4:6]
        assert lists["kBackward"] and not lists["kSpread"] and listed["lists"] == fields["lists"]
        size = -(-QUERIES // main["kBlockM"]), -(-KEYS // main["kBlockN"])
        assert (listed["num_rows"], listed["row_length"]) == (size[1], 2 + 2 * size[0])
        assert fields["lists_strides"][2:] == [size[1] * (2 + 2 * size[0]), 0, 2 + 2 * size[0], 1]
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
        return ["spans" in [plan.kernel for plan, *_ in log] for log in (forward, backward)]

    assert kernels() == kernels(dim=128) == kernels(window=(50, 3)) == [True, True]
    assert kernels(dim=192) == [True, False]
    assert kernels(dim=256) == kernels(keys=KEYS - 1) == [False, False]
    lens = cupy.ndarray(None, base=np.zeros(3, np.int32))
    assert kernels(kv_lens=lens) == kernels(softcap=1.0) == [False, False]
    monkeypatch.setattr(spans, "SEGMENT_KEYS", KEYS + 1)
    cuflash.launch_steps._prepared.clear()
    assert kernels() == [False, False]
