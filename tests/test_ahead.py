"""Kernels built ahead of time: what is built, under which names, and what is refused."""

import re

import pytest

import cuflash
from cuflash import ahead, jit, tensormap
from cuflash.__main__ import main
from cuflash.families import portable

ARCH = "sm_80"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_compile_from_the_command_line(nvrtc, cache, capsys):
    command = ["compile", "--arch", ARCH, "--dtype", "float16", "--head-dim", "16"]
    assert main([*command, "--no-backward"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"fwd_portable sm_80 f16 head_dim 16, 16: \d+ registers, 0 bytes spilled", out)
    assert re.search(r"fwd_portable sm_80 f16 head_dim 16, 16, band: \d+ registers", out)
    files = sorted(cache.iterdir())
    assert {path.suffix for path in files} == {".cubin"}
    assert main([*command, "--no-backward", "--jobs", "1"]) == 0
    again = capsys.readouterr().out
    assert again.count(": cached, ") == len(files) == out.count(" registers, ")
    assert sorted(cache.iterdir()) == files


def test_hopper_kernels_from_the_command_line(nvrtc, cache, monkeypatch, capsys):
    """Rows that do not start on 16 bytes are packed where that pays: both families are built."""
    monkeypatch.setattr(tensormap, "missing", lambda: None)
    for dim, families in (("64", {"sm90"}), ("20", {"sm90", "portable"})):
        command = ["compile", "--arch", "sm_90a", "--dtype", "float16", "--head-dim", dim]
        assert main([*command, "--no-backward"]) == 0
        out = capsys.readouterr().out
        assert set(re.findall(r"fwd_(\w+) sm_90a f16 head_dim", out)) == families


@pytest.mark.parametrize("name", ["sm_90", "sm_90a", "sm_100a", "sm_80a"])
def test_ahead_builds_what_the_device_will_ask_for(nvrtc, monkeypatch, name):
    """Not by the name as given: a call on the device would never look for another one's files."""
    built = []

    def build_all(plans, arch, jobs):
        built.extend((plan, arch) for plan in dict.fromkeys(plans))
        return []

    monkeypatch.setattr(ahead, "build_all", build_all)
    cuflash.compile(name, dtypes=["float16"], head_dims=[64])
    capability = int(re.search(r"\d+", name).group())
    assert {arch for _, arch in built} == {jit.architecture(*divmod(capability, 10))}
    kernels = {plan.kernel for plan, _ in built}
    main = {"bwd_portable"}
    if capability == 90 and tensormap.missing() is None:
        main = {"fwd_sm90", "bwd_sm90"}
    assert kernels == {"fwd_portable", "delta", "cast"} | main


@pytest.mark.parametrize(
    "options, error, match",
    [
        ({"arch": "sm_70"}, ValueError, "sm_70 is not one of"),
        ({"arch": "gfx90a"}, ValueError, "gfx90a"),
        ({"arch": 90}, ValueError, "90"),
        ({"dtypes": "float16"}, TypeError, "dtypes='float16': it must be a sequence"),
        ({"dtypes": ["int8"]}, ValueError, "dtypes: 'int8' is not one of"),
        ({"head_dims": 64}, TypeError, "head_dims=64: it must be a sequence"),
        ({"head_dims": [0]}, ValueError, "head_dims: 0 is not from 1 to 256"),
        ({"head_dims": [64.0]}, TypeError, "head_dims: 64.0 is not an int"),
        ({"head_dims_v": [64]}, ValueError, "1 values for 2 head_dims"),
        ({"causal": True}, TypeError, "causal=True: it must be a sequence"),
        ({"causal": ["top_left"]}, TypeError, "causal: 'top_left' is not a bool"),
    ],
)
def test_ahead_refuses(monkeypatch, options, error, match):
    monkeypatch.setattr(ahead, "build_all", lambda *_: pytest.fail("built"))
    with pytest.raises(error, match=match):
        cuflash.compile(**{"arch": ARCH, **options})


def test_records_of_ptx_say_so():
    record = ahead.Record(
        portable.combine_plan("float16"), "compute_90", "x.ptx", 0.5, False, None, 0
    )
    assert "PTX" in str(record) and "None" not in str(record)
