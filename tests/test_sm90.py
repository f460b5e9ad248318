"""The Hopper family without a GPU: what it refuses, its plans, its kernels through the compiler."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from cuflash import jit, tensormap
from cuflash.families import Access, device_of, sm90
from cuflash.problem import Band, Problem

HOPPER = device_of(90)
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


@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (128, 128), (256, 256), (72, 40)])
@pytest.mark.parametrize("band", [None, Band(-500, 200)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_compile(nvrtc, head_dim, head_dim_v, band, dtype):
    """The kernel's assertions hold and the assembler serialises no product (notes C75xx); without
    a band nothing is spilled.
    """
    problem = replace(BASE, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim_v, band=band)
    plan = sm90.forward_plan(problem, HOPPER, Access(16, 16))
    _, log = jit.compile_text(jit.translation_unit(plan), plan.kernel, "sm_90a")
    assert "C75" not in log
    if band is None:
        assert " 0 bytes spill stores, 0 bytes spill loads" in log


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
