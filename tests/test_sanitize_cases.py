"""The cases for compute-sanitizer cover every kind of Hopper's kernels."""

import itertools

import numpy as np
import pytest
import sanitize_cases
from conftest import NUMPY
from launches import gpu_side, on_host  # noqa: F401
from sanitize_cases import CASES, HOPPER, PACKED, SCORED, arrays_of, sanitize, ways
from score_cases import OPTIONAL, check

import cuflash

DIMS = (64, 128, 256)


def _plans(host, case):
    """The plans of all launches that `sanitize` makes of a case."""
    cupy, launch = host
    launch.log.clear()
    arrays = {name: cupy.ndarray(None, base=x) for name, x in arrays_of(case).items()}
    inputs = [arrays[name] for name in "qkv"]
    out, lse = cuflash.attention(*inputs, **case.options, return_lse=True)
    for way in ({}, *ways(case)):
        cuflash.attention_backward(
            arrays["dout"], *inputs, out, lse, dlse=arrays["dlse"], **way, **case.options
        )
    return {entry[0] for entry in launch.log if isinstance(entry, tuple)}


@pytest.fixture
def hopper(on_host):
    """(case, plan) of every launch of a Hopper kernel."""
    pairs = [(case, plan) for case in CASES for plan in _plans(on_host, case)]
    return [(case, plan) for case, plan in pairs if "sm90" in plan.kernel]


@pytest.mark.parametrize("case", sanitize_cases.MAPS[::3], ids=repr)
def test_maps(case):
    """What the script compares stands on the CPU, too."""
    sanitize_cases.sanitize_map(NUMPY, case)


def _shape(plan):
    return "band" if plan["kBand"] else "tail" if plan["kTail"] else "whole"


def test_every_kind_of_forward(hopper):
    kinds = {
        (plan["kHeadDim"], plan["kLate"], _shape(plan))
        for _, plan in hopper
        if plan.kernel == "fwd_sm90"
    }
    assert {(dim, shape) for dim, _, shape in kinds} >= set(
        itertools.product(DIMS, ("whole", "tail", "band"))
    )
    exact = set(itertools.product(DIMS[1:], (False,), ("whole", "tail", "band")))
    exact.add((DIMS[0], False, "band"))
    assert kinds >= exact | set(itertools.product(DIMS[:2], (True,), ("whole", "tail")))


def test_every_kind_of_backward(hopper):
    kinds = {
        (
            plan["kHeadDim"],
            plan["kDeterministic"],
            plan["kNeedDq"],
            plan["kNeedDkv"],
            _shape(plan),
        )
        for _, plan in hopper
        if plan.kernel.startswith("bwd")
    }
    parts = [(True, True, True), (False, True, True), (True, True, False), (False, True, False)]
    parts.append((True, False, True))
    wanted = itertools.product(DIMS, parts, ("whole", "tail", "band"))
    assert kinds >= {(dim, *part, shape) for dim, part, shape in wanted}
    assert {plan.kernel for _, plan in hopper} == {"fwd_sm90", "bwd_sm90", "bwd_sm90_wide"}


@pytest.mark.parametrize("head_dim", DIMS)
def test_groups_and_hidden_nan(hopper, head_dim):
    """Each direction meets grouped heads with and without a band, and a block with both seen and
    NaN-filled keys.
    """
    for direction in ("fwd", "bwd"):
        some = [
            (case, plan)
            for case, plan in hopper
            if plan.kernel.startswith(direction) and plan["kHeadDim"] == head_dim
        ]
        grouped = {plan["kBand"] for case, plan in some if case.group > 1}
        assert grouped == {False, True}
        for case, plan in some:
            if not plan["kBand"]:
                continue
            bad = np.isnan(arrays_of(case)["v"]).all(axis=(0, 2))
            blocks = np.array_split(bad, range(plan["kBlockN"], bad.size, plan["kBlockN"]))
            if any(block.any() and not block.all() for block in blocks):
                break
        else:
            pytest.fail("no block holds both")


@pytest.mark.parametrize("case", SCORED, ids=repr)
def test_a_scored_case_passes_on_the_cpu(case):
    check(NUMPY, case)


def test_scored_cases_have_every_gradient():
    asked = {name for case in SCORED for name in case.scores}
    assert asked >= {*OPTIONAL, "dropout", "score_mod"}


@pytest.mark.parametrize("case", HOPPER[4:6], ids=repr)
def test_a_case_passes_on_the_cpu(case):
    assert np.isnan(arrays_of(case)["k"]).any()
    assert sanitize_cases.ways(case) != ways(CASES[0])
    sanitize(NUMPY, case)


@pytest.mark.parametrize("case", PACKED[2:4], ids=repr)
def test_a_packed_case_passes_on_the_cpu(case):
    sanitize(NUMPY, case)
