"""The Hopper family's backward without a GPU: its plans, its kernels through the compiler."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from compiling import check

from cuflash.families import Access, device_of, sm90_backward
from cuflash.problem import Band, Problem

HOPPER = device_of(90)
BASE = Problem("bfloat16", (2,), 4, 2, 512, 768, 64, 64, 0.125, None)
DIMS = ((64, 64), (128, 128), (256, 256), (96, 96), (192, 128), (40, 72), (16, 136))
# Visible elements, and whether sequences end inside a block.
FORMS = {"whole": {}, "tail": {"seqlen_q": 500}, "band": {"band": Band(-512, 200)},
         "packed": {"sequences": 3}}  # fmt: skip


def plan_of(problem, need_dq=True, need_dkv=True, deterministic=True, tile=None):
    return sm90_backward.backward_plan(
        problem,
        HOPPER,
        Access(16, 16),
        need_dq=need_dq,
        need_dkv=need_dkv,
        deterministic=deterministic,
        tile=tile,
    )


@pytest.mark.parametrize("head_dim", range(1, 257, 15))
@pytest.mark.parametrize("head_dim_v", (1, 40, 64, 128, 200, 256))
def test_every_head_dim_fits_the_shared_memory(head_dim, head_dim_v):
    problem = replace(BASE, head_dim=head_dim, head_dim_v=head_dim_v)
    assert sm90_backward.takes(problem, sm90_backward.tile_of(problem))
    plan = plan_of(problem)
    assert plan.smem_bytes <= HOPPER.smem_per_block
    assert plan["kHeadDim"] - head_dim in range(16) and plan["kHeadDim"] % 16 == 0
    assert 8 * plan["kAccumTiles"] >= head_dim
    # What setmaxnreg hands out is what a launch of 168 registers a thread holds.
    producer, consumers = plan["kProducerRegisters"], plan["kConsumerRegisters"]
    assert 128 * (producer + 2 * consumers) <= 168 * plan.threads


def whole_jobs(deterministic):
    pairs = itertools.product(DIMS, enumerate(FORMS.items()))
    for dims, (n, (form, change)) in pairs:
        problem = replace(
            BASE, dtype=("bfloat16", "float16")[n % 2], head_dim=dims[0], head_dim_v=dims[1],
            **change,
        )  # fmt: skip
        yield f"{dims}, {form}", plan_of(problem, deterministic=deterministic), "sm_90a"


def part_jobs():
    axes = itertools.product((64, 128, 256), (False, True), (0.1, -0.1, 0.0))
    for head_dim, need_dq, scale in axes:
        band = Band(-512, 200)
        problem = replace(BASE, head_dim=head_dim, head_dim_v=head_dim, band=band, scale=scale)
        plan = plan_of(problem, need_dq=need_dq, need_dkv=not need_dq)
        yield f"{head_dim}, {need_dq}, {scale}", plan, "sm_90a"


def test_kernels_compile(gate):
    """The kernel's assertions hold, the assembler serialises no product (notes C75xx), and the
    order of sums by default spills nothing.
    """
    check(gate.build(whole_jobs(True), sample=7))


def test_kernels_of_the_other_order_compile(gate):
    """A few bytes of some are spilled outside of the loops."""
    check(gate.build(whole_jobs(False), sample=4), may_spill=True)


def test_kernels_of_some_gradients_compile(gate):
    """No product is serialised; NVRTC 13.0 notes (C7519) that it adds a fence of its own to dq."""
    built = gate.build(part_jobs(), sample=4)
    check(built, may_spill=True, excused="arrive is injected")


def test_tiles_that_no_kernel_has():
    problem = replace(BASE, head_dim=128)
    for values in ((128, 128), (64, 64), (64, 128, 1), (64, 128, 2, 2, True)):
        assert not sm90_backward.takes(problem, sm90_backward.Tile(*values))


@pytest.mark.parametrize("tile", [sm90_backward.Tile(128, 128), sm90_backward.Tile(64, 128)])
@pytest.mark.parametrize("heads", [1, 2, 3, 7, 16, 32, 100, 131, 133, 512])
def test_blocks_that_wait_for_each_other_fit_the_device(tile, heads):
    sms = HOPPER.num_sms
    for blocks_q, blocks_k in itertools.product((1, 2, 3, 8, 31, 128, 300), repeat=2):
        problem = replace(
            BASE, seqlen_q=blocks_q * tile.block_m - 1, seqlen_k=blocks_k * tile.block_n - 1
        )
        section, group, last_group = sm90_backward.turn_groups(problem, tile, sms, heads, True)
        assert 1 <= section <= heads and section * group <= sms
        assert (heads % section or section) * last_group <= sms
        section, group, last_group = sm90_backward.turn_groups(problem, tile, sms, heads)
        assert 1 <= section <= heads and 1 <= group <= last_group <= blocks_k
        assert section * group <= sms and (heads % section or section) * last_group <= sms
        # Every SM has work while there is enough of it.
        if section > 1 and group < blocks_k:
            assert section * group > sms // 2
        # Places are as far apart as asked for, unless there are too few heads for that.
        if heads >= sms and blocks_q >= tile.distance:
            assert blocks_q >= tile.distance * group
