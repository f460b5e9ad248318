"""The compile gate: every plan builds for its architecture without a spilled byte and without a
warning. No GPU is needed, only NVRTC.

A sample is built by default, chosen so that every dtype meets every architecture, pair of head
dimensions and feature; compiling.py says how to build more.
A build also proves plan.py's sums of shared memory: the kernels assert them statically.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, fields, replace

import conftest
import numpy as np
import pytest
from compiling import Job, check
from test_launch_scores import program_of

from cuflash import families, jit
from cuflash.ahead import LENGTHS
from cuflash.families import Access, device_of, portable, sm90
from cuflash.plan import CPP_TYPES, Plan
from cuflash.problem import Band, Problem
from cuflash.score import Arg, Expr, element
from cuflash.score_bounds import largest
from cuflash.score_rows import pairable, stageable
from cuflash.score_text import Gradient

pytestmark = pytest.mark.skipif(
    conftest.CUPY is not None, reason="a compiler and no GPU is all it needs: the CPU suite runs it"
)

ARCHITECTURES = tuple(families._SMEM_KIB)
SAMPLED_ARCHITECTURES = (75, 80, 86, 90, 120)
DTYPES = tuple(CPP_TYPES)
DIMS = ((64, 64), (128, 128), (256, 256), (40, 72), (17, 130), (192, 128))
MASKS = ("band", "tail", "whole", "packed")
NEEDS = ("all", "q", "kv")  # gradients of backward

# Where tiles of the wide types exceed the shared memory, so that inputs are read where they lie.
DIRECT_ARCHITECTURES = (75, 86)
DIRECT_DIMS = ((112, 112), (160, 192), (256, 256), (250, 17))


@dataclass(frozen=True)
class Point:
    """One kernel of the product: the values of all axes."""

    capability: int
    dtype: str
    dims: tuple[int, int]
    mask: str
    copy_bytes: int
    # forward, stats, hopper (forward of that family); for backward which gradients and in which
    # order
    kind: str

    def problem(self) -> Problem:
        length = LENGTHS[self.mask == "tail"]
        band = Band(-length, 0) if self.mask == "band" else None
        head_dim, head_dim_v = self.dims
        sequences = 3 if self.mask == "packed" else None
        return Problem(
            self.dtype, (1,), 4, 2, length, length, head_dim, head_dim_v, head_dim**-0.5, band,
            sequences,
        )  # fmt: skip

    def plan(self, problem: Problem | None = None, gradients: bool = False) -> Plan:
        """With ``gradients`` those of every array of the problem's program."""
        problem, device = problem or self.problem(), device_of(self.capability)
        access = Access(self.copy_bytes, 16 if self.copy_bytes == 16 else 0)
        if self.kind == "hopper":
            args = () if problem.program is None else problem.program.args
            paired = tuple(n for n, arg in enumerate(args) if pairable(arg))
            # Of one dtype's.
            staged = [n for n in paired if stageable(args[n]) and problem.dtype == "bfloat16"]
            return sm90.forward_plan(
                problem, device, access, paired=paired, staged=staged[0] if staged else None
            )
        if self.kind in ("forward", "stats"):
            return portable.forward_plan(problem, device, access, stats=self.kind == "stats")
        need, order = self.kind.split()
        return portable.backward_plan(
            problem,
            device,
            access,
            need_dq=need != "kv",
            need_dkv=need != "q",
            deterministic=order == "deterministic",
            gradients=every_gradient(problem) if gradients else (),
        )


def every_gradient(problem: Problem) -> tuple[Gradient, ...]:
    """Of slopes that meet in one entry, of others that do not."""
    found = []
    for n, (number, _, term) in enumerate(problem.program.gradients):
        along = problem.program.args[number].name != "alibi_slopes"
        measured = largest(term, problem) is None
        found.append(Gradient(n, (along, along), measured, 2 if measured else 1))
    return tuple(found)


FORWARD_KINDS = ("forward", "stats")
BACKWARD_KINDS = tuple(
    f"{need} {order}" for need in NEEDS for order in ("deterministic", "unordered")
)


def product(architectures, kinds, dims=DIMS) -> list[Point]:
    axes = itertools.product(architectures, DTYPES, dims, MASKS, (16, 0), kinds)
    return [Point(*values) for values in axes]


def sample(points: list[Point], seed: int) -> list[Point]:
    """A small part of `points` in which each dtype meets each value of every other axis."""

    def meetings(point):
        return {(point.dtype, field.name, getattr(point, field.name)) for field in fields(point)}

    def gain(point):
        return len(met[point] & missing)

    points = random.Random(seed).sample(points, len(points))
    met = {point: meetings(point) for point in points}
    missing = set().union(*met.values())
    chosen = []
    while missing:
        chosen.append(max(points, key=gain))
        missing -= meetings(chosen[-1])
    return chosen


def small_plans(problem: Problem, device) -> list[Plan]:
    """The kernels beside forward and backward."""
    plans = [portable.combine_plan(problem.dtype)]
    plans += [
        portable.delta_plan(problem, vector=vector, dlse=dlse)
        for vector, dlse in itertools.product((True, False), repeat=2)
    ]
    backward = portable.backward_plan(
        problem, device, Access(16, 16), need_dq=True, need_dkv=True, deterministic=True
    )
    plans += [portable.cast_plan(problem, backward, whole=whole) for whole in (True, False)]
    plans += [portable.row_norm_plan(problem.dtype)]
    plans += [portable.pair_gradient_plan(problem.dtype, band) for band in (True, False)]
    return plans


# jobs ---------------------------------------------------------------------------------------------


def known_architectures(nvrtc) -> list[int]:
    return [capability for capability in nvrtc.getSupportedArchs() if capability >= 75]


def jobs_of(points, known) -> list[Job]:
    jobs = []
    for point in points:
        if point.capability not in known:
            continue
        plan = point.plan()
        tile = f"{plan['kBlockM']}x{plan['kBlockN']}x{plan.threads // 32}x{plan['kStages']}"
        arch = jit.architecture(*divmod(point.capability, 10))
        jobs.append((f"{point}, tile {tile}", plan, arch))
    return jobs


# tests --------------------------------------------------------------------------------------------


def test_sample_meets_everything():
    """The sample is what its comment says, and small."""
    for kinds in (FORWARD_KINDS, BACKWARD_KINDS):
        points = sample(product(SAMPLED_ARCHITECTURES, kinds), 0)
        assert len(points) <= 30
        met = Counter((p.dtype, p.capability) for p in points)
        assert set(met) == set(itertools.product(DTYPES, SAMPLED_ARCHITECTURES))
        assert {(p.dtype, p.dims) for p in points} == set(itertools.product(DTYPES, DIMS))
        assert {(p.dtype, p.kind) for p in points} == set(itertools.product(DTYPES, kinds))
        assert points == sample(product(SAMPLED_ARCHITECTURES, kinds), 0)


@pytest.mark.parametrize("kinds", [FORWARD_KINDS, BACKWARD_KINDS], ids=["forward", "backward"])
def test_kernels_build_clean(nvrtc, gate, kinds, capsys):
    """No spills, no warnings, and none takes long."""
    full = gate.extent == "product"
    points = product(ARCHITECTURES, kinds)
    if not full:
        points = sample(product(SAMPLED_ARCHITECTURES, kinds), 0)

    def progress(built, done, count):
        if built.faults() or done % 100 == 0 or done == count:
            with capsys.disabled():
                print(f"\n{done}/{count} {built.name} {'; '.join(built.faults())}", end="")

    jobs = jobs_of(points, known_architectures(nvrtc))
    check(gate.build(jobs, progress=progress if full else None))


@pytest.mark.parametrize("kinds", [FORWARD_KINDS, BACKWARD_KINDS], ids=["forward", "backward"])
def test_direct_kernels_build_clean(nvrtc, gate, kinds):
    """The kernels without input tiles, of which the sample above has few."""
    points = product(DIRECT_ARCHITECTURES, kinds, DIRECT_DIMS)
    points = [point for point in points if point.plan()["kDirect"]]
    assert {point.dtype for point in points} >= {"float64"}
    if gate.extent != "product":
        points = sample(points, 0)
    check(gate.build(jobs_of(points, known_architectures(nvrtc)), sample=4))


def test_hopper_kernels_build_clean(nvrtc, gate):
    """The Hopper family's: the assembler serialises no product either (its notes speak of
    performance).
    """
    pairs = itertools.product(DIMS, MASKS)
    points = [
        Point(90, ("float16", "bfloat16")[(n + n // len(MASKS)) % 2], dims, mask, 16, "hopper")
        for n, (dims, mask) in enumerate(pairs)
    ]
    if gate.extent == "product":
        axes = itertools.product(("float16", "bfloat16"), DIMS, MASKS, (16, 0))
        points = [Point(90, *values, "hopper") for values in axes]
    jobs = jobs_of(points, known_architectures(nvrtc))
    assert len(jobs) == len(points)
    check(gate.build(jobs, sample=5))


def score_programs() -> dict:
    """Facts of problems with scores of the caller's, as options make them."""
    slopes = Arg("grid", "float32", 0, "alibi_slopes", (False, False))
    ids = [Arg("grid", "int32", 0, "segment_ids", along) for along in ((True, False), (False, True))]
    bias, mask = Arg("grid", "float16", 0, "bias"), Arg("grid", "bool", 0, "mask")
    table = Arg("free", "float32", 2, "score_args[0]")
    cap = Arg("scalar", "float32", 0, "softcap")
    hidden = element(2, mask)
    bent = program_of(lambda s, i, j, cap: cap * np.tanh(s / cap), [cap])
    biased = program_of(
        lambda s, i, j: s + Expr(element(0, bias)) - Expr(element(1, slopes)) * abs(i - j),
        [bias, slopes, mask],
        hidden,
    )
    traced = program_of(lambda s, i, j, table: s * table[i % 4, j] + table[0, j], [table])
    same = Expr(element(0, ids[0])) == Expr(element(1, ids[1]))
    everything = program_of(
        lambda s, i, j, cap: cap * np.tanh(s / cap) + Expr(element(3, bias))
        - Expr(element(4, slopes)) * abs(i - j),
        [*ids, cap, bias, slopes, mask],
        (same & Expr(element(5, mask))).node,
    )
    return {
        "softcap": dict(program=bent),
        "bias, slopes and mask": dict(program=biased),
        "score_mod": dict(program=traced, sinks=True, dropout=True),
        "everything": dict(program=everything, sinks=True, dropout=True),
        "dropout": dict(dropout=True),
    }


# Everything at once for a dtype and architecture each, forward, statistics and backward.
SCORE_POINTS = (
    (90, "bfloat16", (64, 64), "softcap", "forward"),
    (90, "float16", (128, 128), "bias, slopes and mask", "forward"),
    (80, "float16", (128, 128), "score_mod", "forward"),
    (75, "float16", (256, 256), "bias, slopes and mask", "forward"),
    (80, "float32", (64, 64), "bias, slopes and mask", "stats"),
    (86, "float64", (40, 72), "score_mod", "stats"),
    (90, "bfloat16", (64, 64), "score_mod", "all deterministic"),
    (90, "float16", (128, 128), "bias, slopes and mask", "all unordered"),
    (75, "float16", (64, 64), "score_mod", "kv unordered"),
    (80, "bfloat16", (256, 256), "softcap", "all deterministic"),
    (120, "float32", (64, 64), "bias, slopes and mask", "q deterministic"),
)


# The Hopper forward: each program, the widest outputs with each.
HOPPER_SCORE_POINTS = tuple(
    (90, ("float16", "bfloat16")[n % 2], dims, name, "hopper")
    for n, (dims, name) in enumerate(
        itertools.product(
            ((128, 128), (256, 256)),
            ("softcap", "bias, slopes and mask", "score_mod", "everything", "dropout"),
        )
    )
) + ((90, "bfloat16", (64, 64), "everything", "hopper"),)


@pytest.mark.parametrize("points", [SCORE_POINTS, HOPPER_SCORE_POINTS], ids=["all", "hopper"])
def test_score_kernels_build_clean(nvrtc, gate, points):
    """Kernels with scores, masks, sinks and dropout, backward with the gradients of all arrays."""
    jobs, programs = [], score_programs()
    for n, (capability, dtype, dims, name, kind) in enumerate(points):
        point = Point(capability, dtype, dims, MASKS[n % 3], 16, kind)
        problem = replace(point.problem(), **programs[name])
        plan = point.plan(problem, gradients=kind.startswith("all"))
        arch = jit.architecture(*divmod(capability, 10))
        if capability in known_architectures(nvrtc):
            jobs.append((f"{point}, {name}", plan, arch))
    check(gate.build(jobs, sample=4))


def test_small_kernels_build_clean(nvrtc, gate):
    """delta, cast, row_norm and combine, for all dtypes; on Hopper and before, where additions
    differ.
    """
    jobs = []
    for capability, dtype in itertools.product((80, 90), DTYPES):
        point = Point(capability, dtype, (72, 40), "whole", 16, "all deterministic")
        device = device_of(capability)
        arch = jit.architecture(*divmod(capability, 10))
        for plan in small_plans(point.problem(), device):
            jobs.append((f"{plan} for {arch}", plan, arch))
    check(gate.build(jobs, sample=16))


def test_every_architecture(nvrtc, gate):
    """A kernel for each architecture that the compiler knows and no other gate builds for, forward
    and backward in turn, those that are newer than this library too: they get the plans of the
    smallest shared memory.
    """
    jobs, access, known = [], Access(16, 16), known_architectures(nvrtc)
    assert len(known) >= 6
    for n, capability in enumerate(known):
        if gate.extent == "sample" and capability in SAMPLED_ARCHITECTURES:
            continue
        device = replace(device_of(75), capability=capability)
        arch = jit.architecture(*divmod(capability, 10))
        problem = Point(capability, "float16", (64, 64), "whole", 16, "forward").problem()
        plans = [portable.forward_plan(problem, device, access)]
        plans.append(
            portable.backward_plan(
                problem, device, access, need_dq=True, need_dkv=True, deterministic=True
            )
        )
        if gate.extent == "sample":
            plans = [plans[n % 2]]
        jobs += [(f"{plan} for {arch}", plan, arch) for plan in plans]
    others = set(known) - set(SAMPLED_ARCHITECTURES)
    assert len(jobs) == (len(others) if gate.extent == "sample" else 2 * len(known))
    check(gate.build(jobs))
