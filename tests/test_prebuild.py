"""Kernels built by a pool of processes."""

import os
import signal
from pathlib import Path

import pytest
from test_ahead import cache  # noqa: F401

from cuflash import cli_check, jit, prebuild
from cuflash.__main__ import main
from cuflash.families import portable
from cuflash.plan import CPP_TYPES

ARCH = "sm_80"
PLANS = [portable.combine_plan(dtype) for dtype in CPP_TYPES]


def test_is_built_makes_nothing(nvrtc, cache):
    plan = PLANS[0]
    assert not jit.is_built(plan, ARCH)
    assert not cache.exists()
    path = Path(prebuild.build(plan, ARCH).path)
    assert jit.is_built(plan, ARCH)
    assert not jit.is_built(plan, "sm_89")
    path.write_bytes(path.read_bytes()[:-100])
    assert not jit.is_built(plan, ARCH)


def test_a_pool_builds_each_kernel_once(nvrtc, cache):
    prebuild.build(PLANS[1], ARCH)
    records = list(prebuild.build_all([*PLANS, PLANS[0]], ARCH, jobs=2))
    assert [record.plan for record in records if record.cached] == [PLANS[1]]
    assert {record.plan for record in records} == set(PLANS)
    assert len(records) == len(PLANS)
    assert all(jit.is_built(plan, ARCH) for plan in PLANS)
    # Some compilers report nothing.
    assert all(record.registers is None or record.registers > 0 for record in records)


def _worker(plan, arch):
    """Who built it; the first worker of a pool to come to float64 is killed."""
    marker = Path(os.environ["CUFLASH_CACHE_DIR"]) / "killed"
    if plan == PLANS[-1] and not marker.exists():
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    if plan == PLANS[0]:
        raise jit.CompileError(f"{plan.kernel} did not compile")
    return plan, os.getpid()


def test_a_killed_worker_does_not_stop_the_others(cache, monkeypatch):
    monkeypatch.setattr(jit, "is_built", lambda plan, arch: False)
    outcomes = list(prebuild.build_all(PLANS, ARCH, jobs=2, worker=_worker))
    assert (cache / "killed").exists()
    failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert [str(error) for error in failed] == ["combine did not compile"]
    assert isinstance(failed[0], jit.CompileError)
    done = [outcome[0] for outcome in outcomes if outcome not in failed]
    assert sorted(map(PLANS.index, done)) == [1, 2, 3]


def test_one_job_needs_no_process(monkeypatch):
    monkeypatch.setattr(jit, "is_built", lambda plan, arch: False)
    monkeypatch.setattr(prebuild, "ProcessPoolExecutor", None)
    outcomes = prebuild.build_all(PLANS, ARCH, 1, lambda plan, arch: (plan, os.getpid()))
    assert list(outcomes) == [(plan, os.getpid()) for plan in PLANS]


def test_check_on_the_cpu_builds_nothing(monkeypatch):
    monkeypatch.setattr(cli_check, "_build_kernels", None)
    assert main(["check", "--cases", "2", "--device", "cpu", "--jobs", "2"]) == 0


@pytest.mark.parametrize("text", ["0", "two"])
def test_jobs_is_a_positive_number(text, capsys):
    with pytest.raises(SystemExit):
        main(["check", "--jobs", text])
    assert "--jobs" in capsys.readouterr().err


