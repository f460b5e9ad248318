"""The Hopper family without a GPU: what it refuses, its plans, its kernels through the compiler."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import compiling
import numpy as np
import pytest
import score_cases
from conftest import np_dtype
from running import check
from strategies import HOPPER_TILES, Case, thinned

import cuflash
from cuflash import tensormap
from cuflash.families import Access, device_of, sm90
from cuflash.problem import Band, Problem

HOPPER = device_of(90)
REPEATED = (*(f"stride 0 at {axis}" for axis in (-2, -3, -4)), "packed", "packed")
BASE = Problem("bfloat16", (2,), 4, 2, 500, 700, 64, 64, 0.125, None)


@pytest.mark.parametrize(
    "change, capability, reason",
    [
        ({"num_heads": 2**31}, 90, "coordinates of a tensor map"),
        ({}, 80, "compute capability 9.0, the device has 8.0"),
        ({}, 100, "compute capability 9.0, the device has 10.0"),
        ({"dtype": "float32"}, 90, "16-bit types, not float32"),
        ({"batch": (2, 3, 4)}, 90, "3 leading axes"),
        ({}, 90, None),
        ({"dtype": "float16", "batch": (2, 3)}, 90, None),
    ],
)
def test_what_it_refuses(change, capability, reason):
    said = sm90.reject(replace(BASE, **change), device_of(capability), Access(16, 16))
    assert said is None if reason is None else reason in said


def test_arrays_without_maps_are_refused():
    said = sm90.reject(BASE, HOPPER, Access(16, 16, "q: its columns are not contiguous"))
    assert said == (
        "tensor maps cannot describe the inputs: q: its columns are not contiguous"
    )


@pytest.mark.parametrize("head_dim", range(1, 257, 15))
@pytest.mark.parametrize("head_dim_v", (1, 40, 64, 128, 200, 256))
def test_every_head_dim_fits_the_shared_memory(head_dim, head_dim_v):
    problem = replace(BASE, head_dim=head_dim, head_dim_v=head_dim_v)
    plan = sm90.forward_plan(problem, HOPPER, Access(16, 16))
    assert plan.smem_bytes <= HOPPER.smem_per_block
    assert plan["kHeadDim"] - head_dim in range(16) and plan["kHeadDim"] % 16 == 0
    producer, consumers = plan["kProducerRegisters"], plan["kConsumerRegisters"]
    assert 128 * producer + (plan.threads - 128) * consumers <= 65536


def _problems():
    """One for every tile of the table, with keys that fill whole blocks and with others."""
    yield replace(BASE, head_dim=72, head_dim_v=40)
    for (head_dim, head_dim_v), ways in sm90.FORWARD_TILES.items():
        for banded, tiles in zip((True, False), ways):
            for most in tiles:
                length = min(most, 16 * 720_720)
                for length in (length,) if banded else (length, length - 1):
                    yield replace(
                        BASE, dtype=("float16", "bfloat16")[length % 2], head_dim=head_dim,
                        head_dim_v=head_dim_v, seqlen_q=length, seqlen_k=length,
                        band=Band(-length, 0) if banded else None,
                    )  # fmt: skip


def test_every_tile_compiles(gate):
    """The kernel's assertions hold, the assembler serialises no product and nothing is spilled."""
    jobs = []
    for problem in _problems():
        mask = "full" if problem.band is None else "band"
        name = f"{problem.head_dim} {problem.head_dim_v} {problem.seqlen_k} {mask}"
        jobs.append((name, sm90.forward_plan(problem, HOPPER, Access(16, 16)), "sm_90a"))
    compiling.check(gate.build(jobs, sample=8))


@pytest.mark.parametrize(
    "shape, strides, address, reason",
    [
        ((2, 4, 64), (512, 128, 2), 256, None),
        ((2, 4, 64), (0, 128, 2), 256, None),
        ((2, 4, 64), (512, 128, 2), 264, "address 0x108 is not"),
        ((2, 4, 64), (512, 120, 2), 256, "stride of 120 bytes"),
        ((2, 4, 64), (512, -128, 2), 256, "stride of -128 bytes"),
        ((2, 4, 64), (512, 128, 4), 256, "columns are not contiguous"),
        ((1, 4, 64), (7, 128, 2), 256, None),  # the stride of an axis of one is of no consequence
        ((2, 4, 64), (1 << 40, 128, 2), 256, "stride of 1099511627776 bytes"),
    ],
)
def test_what_a_tensor_map_describes(shape, strides, address, reason):
    array = SimpleNamespace(
        shape=shape, strides=strides, itemsize=2, data=SimpleNamespace(ptr=address)
    )
    said = tensormap.unfit(array)
    assert said is None if reason is None else reason in said


def test_drawn_tiles_fit_every_head_dim():
    for tile in HOPPER_TILES:
        problem = replace(BASE, head_dim=256, head_dim_v=128 if tile[0] > 128 else 256)
        plan = sm90.forward_plan(problem, HOPPER, Access(16, 16), tile=sm90.Tile(*tile))
        assert plan.smem_bytes <= HOPPER.smem_per_block
    with pytest.raises(NotImplementedError, match="registers"):
        sm90.forward_plan(
            replace(BASE, head_dim=256, head_dim_v=256), HOPPER, Access(16, 16),
            tile=sm90.Tile(192, 80, 2),
        )  # fmt: skip


# on a Hopper GPU ----------------------------------------------------------------------------------


@pytest.fixture
def hopper(gpu):
    """The CuPy home; skipped on other GPUs."""
    if gpu.xp.cuda.Device().compute_capability != "90":
        pytest.skip("needs compute capability 9.0")
    assert tensormap.missing() is None, "cuda.bindings comes with cuflash's extras"
    return gpu


def _random(hopper, *shapes, dtype="bfloat16", seed=0):
    rng = np.random.default_rng(seed)
    return [hopper.to_home(rng.standard_normal(s).astype(np_dtype(dtype))) for s in shapes]


def test_it_is_chosen(hopper):
    q, k, v = _random(hopper, (2, 4, 130, 64), (2, 2, 200, 64), (2, 2, 200, 64))
    assert cuflash.explain(q, k, v).family == "sm90"
    assert cuflash.explain(q, k, v, causal=True).family == "sm90"
    swapped = [hopper.xp.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    assert cuflash.explain(*swapped, layout="bshd").family == "sm90"
    (room,) = _random(hopper, (2 * 4 * 130 * 64 + 1,))
    late = room[1:].reshape(q.shape)
    told = cuflash.explain(late, k, v)
    assert told.family == "portable" and "q: its address" in str(told)
    late[...] = q
    want = cuflash.attention(q, k, v).astype(np.float32)
    assert float(abs(cuflash.attention(late, k, v).astype(np.float32) - want).max()) < 0.02


@pytest.mark.parametrize("tile", (None, *HOPPER_TILES))
@pytest.mark.parametrize(
    "case",
    (
        Case(300, 500, 64, 64, 4, 2, (2,), (2,), (2,), dtype="bfloat16"),
        Case(300, 500, 72, 40, 4, 2, (2,), (1,), (2,), dtype="float16", causal=True),
        Case(130, 130, 128, 128, 2, 1, (2, 3), (3,), (), dtype="bfloat16", window=(40, 9)),
        Case(257, 65, 256, 256, 1, 1, dtype="float16", layout="bshd", causal="top_left"),
        # Tensor maps with a stride of 0 along rows, heads and batches.
        Case(200, 90, 64, 64, 2, 2, (2,), (2,), (2,), dtype="float16", strides=REPEATED),
    ),
    ids=repr,
)
def test_tiles_against_the_oracle(hopper, case, tile):
    check(hopper, replace(case, tile=tile), gradients=False)


def _repeated(hopper, causal):
    """q, k, v and options with more pieces of work than an SM takes at once."""
    q, k, v = _random(hopper, (2, 40, 700, 64), (2, 8, 500, 64), (2, 8, 500, 64))
    return (q, k, v), {"causal": causal}


@pytest.mark.parametrize("causal", (False, True))
def test_a_thousand_runs_give_the_same_bits(hopper, causal):
    arrays, options = _repeated(hopper, causal)
    first = cuflash.attention(*arrays, return_lse=True, **options)
    differ = hopper.xp.zeros((), bool)
    for _ in range(1000):
        again = cuflash.attention(*arrays, return_lse=True, **options)
        for got, want in zip(again, first):
            bits = f"u{want.itemsize}"
            differ |= (got.view(bits) != want.view(bits)).any()
    assert not bool(differ)


@pytest.mark.parametrize("cap", (6.0, 40.0, 1000.0))
@pytest.mark.parametrize("more", ({}, dict(causal=True), dict(mask=True, sinks=True)), ids=str)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_capped_scores_that_grow(hopper, dtype, more, cap):
    """Blocks from the last to the first, which begin with the lowest scores there are, go on within
    reach of these, and end with the highest.
    """
    case = Case(130, 700, 64, 64, 2, 2, dtype=dtype, causal=more.get("causal", False), seed=9)
    arrays, options = case.arrays(), {"softcap": cap}
    rng = np.random.default_rng(5)
    arrays["q"] = np.abs(arrays["q"]).astype(arrays["q"].dtype)
    size = np.repeat([9.0, 2.5, -0.5, -1.0, -9.0], 140)[:, None] * rng.uniform(0.9, 1.1, (700, 64))
    arrays["k"] = np.broadcast_to(size, arrays["k"].shape).astype(arrays["k"].dtype)
    if "mask" in more:
        options["mask"] = rng.random((130, 700)) < 0.9
        options["sinks"] = rng.standard_normal(2).astype(np.float32)
    score_cases.check(hopper, case, arrays, options)


STAGED = (
    dict(bias=(1, 1)), dict(bias=(2, 4), causal=True), dict(bias=(2, 1), window=(100, 40)),
    dict(bias=(1, 4), mask=True), dict(bias=(2, 4), alibi=True, causal=True),
    dict(bias=(1, 1), softcap=True, dropout=True), dict(bias=(1, 4), block_map=True, causal=True),
)  # fmt: skip


@pytest.mark.parametrize(
    "dim, more, lengths",
    thinned(4, (40, 128, 256), STAGED, ((330, 296), (64, 1024), (700, 136))),
    ids=str,
)
def test_biases_that_come_by_tensor_maps(hopper, dim, more, lengths):
    """Broadcast over batches or heads, lengths that end within blocks, pieces without rows."""
    rows, cols = lengths
    band = {name: more[name] for name in ("causal", "window") if name in more}
    dtype = "float16" if dim % 128 else "bfloat16"
    case = Case(rows, cols, dim, dim, 4, 2, (2,), (2,), (2,), dtype=dtype, seed=dim, **band)
    rng, options = np.random.default_rng(dim), {}
    shape = (*more["bias"], rows, cols)
    options["bias"] = rng.standard_normal(shape).astype(np_dtype(("bfloat16", "float16")[rows % 3]))
    if "mask" in more:
        options["mask"] = rng.random((rows, cols)) < 0.8
    if "alibi" in more:
        options["alibi_slopes"] = rng.uniform(-0.1, 0.5, 4).astype(np.float32)
    if "softcap" in more:
        options["softcap"] = 5.0
    if "dropout" in more:
        options.update(dropout_p=0.25, seed=3)
    if "block_map" in more:
        kinds = rng.integers(0, 3, (-(-rows // 128), -(-cols // 128))).astype(np.uint8)
        options["block_map"] = cuflash.BlockMap(kinds, (128, 128))
    score_cases.check(hopper, case, options=options)


@pytest.mark.parametrize("causal", (False, True))
def test_forward_in_a_graph(hopper, causal):
    """Captured once, replayed on other data, while the pool hands out what was free at capture."""
    xp = hopper.xp
    (q, k, v), options = _repeated(hopper, causal)
    others = [_random(hopper, q.shape, k.shape, v.shape, seed=seed) for seed in (1, 2)]
    wants = [cuflash.attention(*other, **options) for other in others]
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        out = xp.empty_like(q)
        cuflash.attention(q, k, v, out=out, **options)
        stream.synchronize()
        stream.begin_capture()
        cuflash.attention(q, k, v, out=out, **options)
        graph = stream.end_capture()
        room = [xp.full(size, 255, np.uint8) for size in (1, 4, 64, 512, 512)]
        for other, want in zip(others * 2, wants * 2):
            for array, values in zip((q, k, v), other):
                array[...] = values
            graph.launch(stream)
            stream.synchronize()
            assert bool((out.view("u2") == want.view("u2")).all())
        assert all(bool((x == 255).all()) for x in room)
