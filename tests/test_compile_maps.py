"""Kernels that walk along a block map's lists build clean: no GPU is needed."""

from __future__ import annotations

import itertools
from dataclasses import replace

from compiling import check
from test_compile import Point, every_gradient, known_architectures, score_programs

from cuflash import jit
from cuflash.families import Access, device_of, portable, sm90, sm90_backward

# With the map's block: one that kernels' blocks divide, one that they meet in part.
WHOLE, CUT = (128, 128), (96, 64)
POINTS = (
    (90, "float16", (64, 64), "whole", 16, "forward", WHOLE, None),
    (80, "bfloat16", (128, 128), "band", 16, "forward", WHOLE, None),
    (80, "float16", (128, 128), "tail", 0, "forward", WHOLE, None),
    (75, "float16", (256, 256), "band", 0, "forward", WHOLE, None),
    (120, "bfloat16", (64, 64), "tail", 16, "forward", WHOLE, None),
    (80, "float32", (128, 128), "band", 16, "forward", WHOLE, None),
    (86, "float64", (256, 256), "tail", 16, "forward", WHOLE, None),
    (80, "float16", (128, 128), "band", 16, "forward", CUT, None),
    (90, "bfloat16", (64, 64), "tail", 16, "forward", WHOLE, "bias, slopes and mask"),
    (80, "float16", (128, 128), "band", 16, "forward", CUT, "score_mod"),
    (80, "float32", (64, 64), "band", 16, "stats", WHOLE, None),
    (86, "float64", (40, 72), "tail", 16, "stats", CUT, "score_mod"),
    (90, "float16", (64, 64), "whole", 16, "all deterministic", WHOLE, None),
    (80, "bfloat16", (128, 128), "band", 16, "all deterministic", WHOLE, None),
    (80, "float16", (128, 128), "tail", 0, "all unordered", WHOLE, None),
    (75, "float16", (64, 64), "band", 16, "kv unordered", WHOLE, None),
    (90, "float32", (128, 128), "band", 16, "all deterministic", WHOLE, None),
    (80, "float64", (64, 64), "tail", 16, "q deterministic", WHOLE, None),
    (120, "bfloat16", (256, 256), "band", 16, "all deterministic", WHOLE, None),
    (90, "bfloat16", (64, 64), "band", 16, "all deterministic", CUT, "bias, slopes and mask"),
    (80, "float16", (128, 128), "tail", 16, "all unordered", WHOLE, "score_mod"),
)


def test_kernels_with_maps_build_clean(nvrtc, gate):
    jobs, programs = [], score_programs()
    for *axes, block, name in POINTS:
        point = Point(*axes)
        program = {} if name is None else programs[name]
        problem = replace(point.problem(), block_map=block, **program)
        plan = point.plan(problem, gradients=point.kind.startswith("all") and name is not None)
        assert plan["kBlockMap"] and 128 % plan["kBlockM"] == 128 % plan["kBlockN"] == 0
        if point.capability in known_architectures(nvrtc):
            arch = jit.architecture(*divmod(point.capability, 10))
            jobs.append((f"{point}, {block}, {name}", plan, arch))
    check(gate.build(jobs, sample=5))


def test_hopper_kernels_with_maps_build_clean(nvrtc, gate):
    """Every width, mask and order; blocks of kernels divide those of the map."""
    jobs, device, access = [], device_of(90), Access(16, 16)
    for dim, mask in itertools.product((64, 128, 192, 256), ("band", "tail", "whole")):
        dims = (dim, 128 if dim == 192 else dim)
        point = Point(90, "bfloat16", dims, mask, 16, "hopper")
        problem = replace(point.problem(), block_map=WHOLE)
        plans = [sm90.forward_plan(problem, device, access)]
        plans += [
            sm90_backward.backward_plan(
                problem, device, access, need_dq=True, need_dkv=True, deterministic=deterministic
            )
            for deterministic in (True, False)
        ]
        for plan in plans:
            assert plan["kBlockMap"] and 128 % plan["kBlockM"] == 128 % plan["kBlockN"] == 0
            jobs.append((f"{point}: {plan}", plan, "sm_90a"))
    check(gate.build(jobs, sample=6))


def test_the_kernel_that_makes_maps_builds_clean(nvrtc, gate):
    jobs, programs = [], score_programs()
    for capability, mask, name in ((75, "whole", None), (80, "band", "bias, slopes and mask")):
        point = Point(capability, "float16", (64, 64), mask, 16, "forward")
        problem = replace(point.problem(), **({} if name is None else programs[name]))
        plan = portable.block_map_plan(problem)
        if capability in known_architectures(nvrtc):
            jobs.append((f"{plan}", plan, jit.architecture(*divmod(capability, 10))))
    check(gate.build(jobs))


def test_hopper_kernels_with_maps_and_scores_build_clean(nvrtc, gate):
    """Lists beside what scores need: the producer's registers and the consumers'."""
    jobs, programs = [], score_programs()
    device, access = device_of(90), Access(16, 16)
    for name, dim, mask, backward in (
        ("dropout", 64, "tail", False),
        ("score_mod", 64, "band", False),
        ("score_mod", 128, "band", False),
        ("everything", 256, "tail", False),
        ("dropout", 128, "tail", True),
        ("bias, slopes and mask", 64, "band", True),
        ("everything", 128, "tail", True),
    ):
        point = Point(90, "bfloat16", (dim, dim), mask, 16, "hopper")
        problem = replace(point.problem(), block_map=WHOLE, **programs[name])
        plan = point.plan(problem)
        if backward:
            assert sm90_backward.reject(problem, device, access) is None
            gradients = every_gradient(problem) if problem.program is not None else ()
            plan = sm90_backward.backward_plan(
                problem, device, access, need_dq=True, need_dkv=True, deterministic=True,
                gradients=gradients,
            )  # fmt: skip
        assert plan["kBlockMap"] and 128 % plan["kBlockM"] == 128 % plan["kBlockN"] == 0
        jobs.append((f"{point}, {name}: {plan}", plan, "sm_90a"))
    check(gate.build(jobs, sample=3))
