"""The command line: every command on small inputs, and what it says and returns when misused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cuflash import cli_check, cli_demo, cli_run, reference
from cuflash.__main__ import main
from cuflash.cli_common import Device, UsageError, human

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = {"layout": "bhsd", "scale": None, "causal": False, "causal_offset": None, "window": None}
OPTIONS["precision"] = None


def python_m_cuflash(*arguments, **environment):
    """The finished process, run from the root of the tree as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "cuflash", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def files(tmp_path):
    """save(q=..., k=..., v=...) writes .npy files of normal numbers; returns (paths, arrays)."""

    def save(dtype="float32", **shapes):
        rng = np.random.default_rng(5)
        arrays = [rng.standard_normal(shapes[name]).astype(dtype) for name in "qkv"]
        for name, array in zip("qkv", arrays):
            np.save(tmp_path / f"{name}.npy", array)
        return [str(tmp_path / f"{name}.npy") for name in "qkv"], arrays

    return save


# --- whole processes


def test_info_names_versions_devices_and_cache(tmp_path):
    (tmp_path / "fwd-1234.cubin").write_bytes(b"x" * 2048)
    done = python_m_cuflash("info", CUFLASH_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for label in ("cuflash", "Python", "NumPy", "CuPy", "NVRTC", "device", "cache"):
        assert f"\n{label}" in "\n" + done.stdout
    assert np.__version__ in done.stdout
    assert f"{tmp_path}: 1 kernels, 2.0 KiB" in done.stdout


def test_demo_beats_the_most_frequent_byte_and_says_where_it_ran():
    done = python_m_cuflash("demo", "--length", 2500, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "accuracy" in line)
    ours, constant = (float(word.strip("%;")) for word in line.split() if "%" in word)
    assert ours > 1.5 * constant
    assert "CPU, NumPy path" in done.stdout
    for label in ("time", "peak extra memory", "the L x S matrix", "float64 reference"):
        assert label in done.stdout


def test_check_passes_and_prints_a_verdict():
    done = python_m_cuflash("check", "--cases", 12, "--seed", 1, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "check passed: 12 of 12 cases on CPU" in done.stdout
    assert "check: 100%" in done.stderr


def test_run_as_a_process(files, tmp_path):
    paths, arrays = files(q=(2, 3, 20, 8), k=(2, 1, 31, 8), v=(2, 1, 31, 5))
    out, lse = tmp_path / "out.npy", tmp_path / "lse.npy"
    done = python_m_cuflash("run", *paths, "-o", out, "--lse", lse, "--causal", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "wrote" in done.stdout and "run: 100%" in done.stderr
    truth = reference.attention(*arrays, causal=True)
    np.testing.assert_allclose(np.load(out), truth[0], atol=1e-5)
    np.testing.assert_allclose(np.load(lse), truth[1], atol=1e-5)


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("info", "--no-such-option"), ("run",)])
def test_misuse_has_status_2(arguments):
    done = python_m_cuflash(*arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr and not done.stdout


# --- run


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), {}),
        (("--causal", "top_left"), {"causal": "top_left"}),
        (("--window", "3", "none"), {"window": (3, None)}),
        (("--window", "-1", "2"), {"window": (-1, 2)}),
        (("--window", "5", "2", "--causal-offset", "-4"), {"window": (5, 2), "causal_offset": -4}),
        (("--causal", "--window", "9", "9"), {"causal": True, "window": (9, 9)}),
        (("--causal", "--causal-offset", "-30"), {"causal": True, "causal_offset": -30}),
        (("--scale", "-0.3"), {"scale": -0.3}),
    ],
)
@pytest.mark.parametrize("chunk", [None, 7])
def test_run_matches_the_reference(files, tmp_path, arguments, options, chunk):
    paths, arrays = files(q=(2, 4, 25, 8), k=(1, 2, 19, 8), v=(2, 2, 19, 6))
    out, lse = str(tmp_path / "out.npy"), str(tmp_path / "lse.npy")
    chunked = ("--chunk", str(chunk)) if chunk else ()
    command = ["run", *paths, "-o", out, "--lse", lse, "--device", "cpu", *arguments, *chunked]
    assert main(command) == 0
    truth = reference.attention(*arrays, **options)
    assert np.load(out).dtype == np.float32
    np.testing.assert_allclose(np.load(out), truth[0], atol=1e-5)
    np.testing.assert_allclose(np.load(lse), truth[1], atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "q", "k", "v"),
    [
        ("bshd", (2, 9, 4, 8), (2, 7, 2, 8), (2, 7, 2, 3)),
        ("bhsd", (9, 8), (7, 8), (7, 3)),
        ("bhsd", (9, 8), (5, 1, 7, 8), (7, 3)),
        ("bhsd", (2, 1, 0, 8), (2, 1, 7, 8), (2, 1, 7, 3)),
        ("bhsd", (2, 1, 9, 8), (2, 1, 0, 8), (2, 1, 0, 3)),
    ],
)
def test_run_layouts_ranks_and_empty_axes(files, tmp_path, layout, q, k, v):
    paths, arrays = files(q=q, k=k, v=v)
    out, lse = str(tmp_path / "out.npy"), str(tmp_path / "lse.npy")
    command = ["run", *paths, "-o", out, "--lse", lse, "--device", "cpu", "--layout", layout]
    assert main([*command, "--chunk", "4"]) == 0
    truth = reference.attention(*arrays, layout=layout)
    assert np.load(out).shape == truth[0].shape and np.load(lse).shape == truth[1].shape
    np.testing.assert_allclose(np.load(out), truth[0], atol=1e-5)
    np.testing.assert_allclose(np.load(lse), truth[1], atol=1e-5)


def test_run_reads_and_writes_bfloat16_and_fortran_order(tmp_path):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng(0)
    arrays = [np.asfortranarray(rng.standard_normal((2, 6, 8)).astype(bfloat16)) for _ in "qkv"]
    paths = [str(tmp_path / f"{name}.npy") for name in "qkv"]
    for path, array in zip(paths, arrays):
        np.save(path, array)
    out = str(tmp_path / "out.npy")
    assert main(["run", *paths, "-o", out, "--device", "cpu"]) == 0
    result = np.load(out).view(bfloat16).astype(np.float64)
    np.testing.assert_allclose(result, reference.attention(*arrays)[0], atol=0.03)


@pytest.mark.parametrize("window", [None, (5, 0), (0, 40)])
def test_keys_in_parts_are_merged(window):
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 30, 4)) for _ in "qkv")
    job = cli_run.Job.of(q, k, v, {**OPTIONS, "window": window})
    out, lse = np.full((2, 30, 4), np.nan), np.full((2, 30), np.nan)
    device = Device("cpu")
    for block in cli_run.plan_blocks(job, device, chunk=11)[0]:
        cli_run.run_block(job, block, device, 7, out, lse)
    truth = reference.attention(q, k, v, window=window)
    np.testing.assert_allclose(out, truth[0], atol=1e-12)
    np.testing.assert_allclose(lse, truth[1], atol=1e-12)


@pytest.mark.parametrize("free", [0, 1 << 22, 1 << 34])
@pytest.mark.parametrize("chunk", [None, 100])
def test_blocks_cover_every_row_once(free, chunk):
    class SmallGpu(Device):
        def free_bytes(self):
            return free

    shape = (3, 1, 6, 2000, 64)
    q = np.broadcast_to(np.float16(0), shape)
    k = np.broadcast_to(np.float16(0), (3, 1, 2, 90_000, 64))
    job = cli_run.Job.of(q, k, k, OPTIONS)
    blocks, key_limit = cli_run.plan_blocks(job, SmallGpu("cuda"), chunk)
    seen = np.zeros((3, 1, 2, 2000), int)
    for block in blocks:
        seen[(*block.index, slice(*block.heads), slice(*block.rows))] += 1
        assert chunk is None or block.rows[1] - block.rows[0] <= chunk
    assert (seen == 1).all()
    assert key_limit >= 128


@pytest.mark.parametrize(
    ("shapes", "arguments", "parts"),
    [
        ({"k": (2, 7, 9)}, (), ["k: its head_dim is 9"]),
        ({"v": (2, 6, 8)}, (), ["v: its length is 6"]),
        ({"q": (3, 5, 8)}, (), ["q: it has 3 heads"]),
        ({}, ("--window", "-2", "0"), ["window", "-2"]),
        ({}, ("--causal-offset", "1"), ["causal_offset=1"]),
        ({}, ("--precision", "tf32", "--dtype-of-test", "float64"), ["precision"]),
    ],
)
def test_run_refuses_what_the_library_refuses(files, tmp_path, capsys, shapes, arguments, parts):
    shapes = {"q": (2, 5, 8), "k": (2, 7, 8), "v": (2, 7, 8), **shapes}
    dtype = "float32"
    if "--dtype-of-test" in arguments:
        arguments, dtype = arguments[:-2], arguments[-1]
    paths, _ = files(dtype, **shapes)
    out = tmp_path / "out.npy"
    assert main(["run", *paths, "-o", str(out), "--device", "cpu", *arguments]) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in parts), message
    assert not out.exists()


def test_run_refuses_bad_files(files, tmp_path, capsys):
    (q, k, v), arrays = files(q=(2, 5, 8), k=(2, 7, 8), v=(2, 7, 8))
    bad = {name: str(tmp_path / name) for name in ("text", "cut", "archive", "swapped", "integers")}
    Path(bad["text"]).write_text("not an array")
    Path(bad["cut"]).write_bytes(Path(q).read_bytes()[:-8])
    with open(bad["archive"], "wb") as file:
        np.savez(file, a=arrays[0])
    for name, array in (("swapped", arrays[0].astype(">f4")), ("integers", arrays[0].astype(int))):
        with open(bad[name], "wb") as file:
            np.save(file, array)
    out = str(tmp_path / "out.npy")
    rules = {
        "text": "cannot be read as a .npy file",
        "cut": "cannot be read as a .npy file",
        "archive": "archive of several arrays",
        "swapped": "byte order",
        "integers": "dtype",
    }
    for name, rule in rules.items():
        assert main(["run", bad[name], k, v, "-o", out, "--device", "cpu"]) == 2, name
        message = capsys.readouterr().err
        assert rule in message and "q" in message
    targets = {q: "a file of its own", str(tmp_path / "no" / "o.npy"): "its folder does not exist"}
    for target, rule in targets.items():
        assert main(["run", q, k, v, "-o", target, "--device", "cpu"]) == 2
        assert rule in capsys.readouterr().err
    assert main(["run", q, k, v, "-o", out, "--lse", out, "--device", "cpu"]) == 2
    assert "must differ" in capsys.readouterr().err
    np.testing.assert_array_equal(np.load(q), arrays[0])


def test_a_failed_run_leaves_the_old_result(files, tmp_path, monkeypatch):
    paths, _ = files(q=(2, 5, 8), k=(2, 7, 8), v=(2, 7, 8))
    out = tmp_path / "out.npy"
    np.save(out, np.arange(3))

    def out_of_memory(*_):
        raise MemoryError("no memory")

    monkeypatch.setattr(cli_run, "run_block", out_of_memory)
    assert main(["run", *paths, "-o", str(out), "--device", "cpu"]) == 1
    np.testing.assert_array_equal(np.load(out), np.arange(3))
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["k.npy", "out.npy", "q.npy", "v.npy"]


# --- check, demo, the rest


def test_check_reports_a_wrong_result_with_status_1(monkeypatch, capsys):
    right = cli_check.cuflash.attention_vjp

    def wrong(*inputs, **options):
        (out, lse), pullback = right(*inputs, **options)
        return (out * out.dtype.type(1.25), lse), pullback

    monkeypatch.setattr(cli_check.cuflash, "attention_vjp", wrong)
    assert main(["check", "--cases", "6", "--device", "cpu"]) == 1
    printed = capsys.readouterr()
    assert "check FAILED" in printed.err
    assert "out is off by" in printed.out and "--only" in printed.out


def test_check_draws_the_same_case_again():
    first, second = (cli_check.Case.draw(np.random.default_rng([4, 2]), ["float32"]) for _ in "ab")
    assert first == second


def test_codes_of_equal_contexts_are_equal_and_of_others_nearly_orthogonal():
    text = np.frombuffer(b"abcdef--abcdef--xbcdef", np.uint8)
    codes = cli_demo.context_codes(text).astype(int)
    products = codes @ codes.T
    assert np.isin(codes, (-1, 1)).all()
    assert products[14, 6] == codes.shape[1]  # after "abcdef" both times, five bytes back and more
    same_two = products[18, 10]  # after "xb" and "ab": only the last byte agrees
    assert same_two < 0.7 * codes.shape[1]


def test_demo_refuses_a_text_that_is_too_short(tmp_path, capsys):
    (tmp_path / "one").write_bytes(b"x")
    assert main(["demo", str(tmp_path / "one"), "--device", "cpu"]) == 2
    assert main(["demo", str(tmp_path / "none"), "--device", "cpu"]) == 2
    printed = capsys.readouterr().err
    assert "at least 2" in printed and "cannot be read" in printed


def test_demo_on_a_file_of_all_bytes(tmp_path, capsys):
    (tmp_path / "bytes").write_bytes(bytes(range(256)) * 3)
    assert main(["demo", str(tmp_path / "bytes"), "--device", "cpu"]) == 0
    assert "Dv = 256" in capsys.readouterr().out


def test_device_cuda_without_one_is_a_usage_error(monkeypatch):
    monkeypatch.setattr("cuflash.cli_common.load_cupy", lambda: (None, "no CUDA device is present"))
    with pytest.raises(UsageError, match="--device cuda: no CUDA device is present"):
        Device.pick("cuda")
    assert "no CUDA device is present" in str(Device.pick("auto"))


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "int64"])
def test_arrays_travel_to_a_device_and_back(dtype):
    device = Device("cuda", cupy=SimpleNamespace(asarray=np.array, asnumpy=np.array))
    array = np.arange(6).reshape(2, 3).astype(dtype)
    there = device.put(array)
    assert there.dtype == array.dtype
    assert np.array_equal(device.get(there), array)


def test_compile_refuses_unknown_architectures(capsys):
    assert main(["compile", "--arch", "nonsense"]) == 2
    assert "arch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")]
)
def test_human(count, text):
    assert human(count) == text
