"""The kernels that a call needs, listed without launching any: host arrays in CuPy's place."""

import numpy as np
import pytest
from launches import gpu_side, on_host  # noqa: F401

from cuflash import attention_vjp, cli_check, jit, prebuild

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def _launched(log):
    return list(dict.fromkeys(entry[0] for entry in log if isinstance(entry, tuple)))


def _on_device(cupy, views):
    return [cupy.ndarray(None, base=np.asarray(view)) for view in views]


def _options(cupy, options):
    return {
        name: cupy.ndarray(None, base=x) if isinstance(x, np.ndarray) else x
        for name, x in options.items()
    }


def _cases(count):
    """(case, q, k, v and dout, all options) of the first cases of the check command."""
    for number in range(count):
        case, rng = cli_check._drawn(number, 0, DTYPES)
        views = [view(base) for base, view in case.arrays(rng)]
        yield case, views, case.options | case.scored(rng)


def test_listed_are_the_kernels_that_a_call_launches(on_host):
    """Random calls of the check command: both families, packed and strided inputs, groups."""
    cupy, launch = on_host
    kernels, scored = set(), set()
    for case, views, options in _cases(60):
        q, k, v, dout = _on_device(cupy, views)
        options = _options(cupy, options)
        scored.update(case.scores)
        launch.log.clear()
        listed = prebuild.plans_of_call(dout, q, k, v, options)
        assert not launch.log  # nothing is launched by listing
        attention_vjp(q, k, v, **options)[1](dout)
        assert list(dict.fromkeys(listed)) == _launched(launch.log)
        kernels |= {plan.kernel for plan in listed}
    hopper = {"fwd_sm90", "bwd_sm90", "bwd_sm90_wide"}
    assert kernels == hopper | {"fwd_portable", "bwd_portable", "delta", "cast"}
    assert scored == set(cli_check._SCORES)


def test_listed_are_the_kernels_of_all_launches_of_many_leading_axes(on_host):
    cupy, launch = on_host
    rows = np.zeros((2, 1, 2, 1, 2, 3, 70, 64), np.float16)
    q, k, v, dout = _on_device(cupy, [rows] * 4)
    listed = prebuild.plans_of_call(dout, q, k, v, {})
    launch.log.clear()
    attention_vjp(q, k, v)[1](dout)
    assert len(_launched(launch.log)) < len(launch.log)
    assert list(dict.fromkeys(listed)) == _launched(launch.log)


def test_listing_refuses_what_the_call_refuses(on_host):
    cupy, _ = on_host
    q, k, v, dout = _on_device(cupy, [np.zeros((2, 8, 4), np.float32)] * 4)
    with pytest.raises(ValueError, match="window"):
        prebuild.plans_of_call(dout, q, k, v, {"window": (-5, 0)})


class _Device:
    """A GPU to the check command; arrays stay on the host until they are listed."""

    kind, capability = "cuda", 90

    def put(self, array):
        return array


def test_check_builds_what_its_cases_launch(on_host, monkeypatch, capsys):
    cupy, launch = on_host
    built, list_plans = [], prebuild.plans_of_call

    def plans_of_call(*arguments):
        *views, options = arguments
        return list_plans(*_on_device(cupy, views), _options(cupy, options))

    def build_all(plans, arch, jobs):
        assert (arch, jobs) == ("sm_90a", 3)
        built.extend(plans)
        return iter([jit.CompileError("no"), *plans[1:]])

    monkeypatch.setattr(prebuild, "plans_of_call", plans_of_call)
    monkeypatch.setattr(prebuild, "build_all", build_all)
    monkeypatch.setattr(jit, "architecture", lambda *capability: "sm_90a")
    monkeypatch.setattr(jit, "is_built", lambda plan, arch: plan.kernel == "delta")
    cli_check._build_kernels(range(20), 0, DTYPES, _Device(), 3)
    launch.log.clear()
    for _, views, options in _cases(20):
        q, k, v, dout = _on_device(cupy, views)
        attention_vjp(q, k, v, **_options(cupy, options))[1](dout)
    assert set(built) == {plan for plan in _launched(launch.log) if plan.kernel != "delta"}
    said = capsys.readouterr()
    assert f"{len(built)} of {len(_launched(launch.log))} kernels are not in the cache" in said.out
    assert "build: 100%" in said.err and "1 failed" in said.err
