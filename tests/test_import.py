"""`import cuflash` brings NumPy and nothing of CUDA, quickly; settings come from config alone."""

import os
import pathlib
import subprocess
import sys

import pytest

import cuflash
from cuflash import config

ROOT = pathlib.Path(cuflash.__file__).parent
HEAVY = ("cupy", "cupy_backends", "cuda", "torch", "jax", "ml_dtypes")


def run(code, **environment):
    """Standard output of a fresh interpreter that finds this cuflash first."""
    path = os.pathsep.join([str(ROOT.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_works_with_cupy_blocked():
    code = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None  # an import of it raises ImportError
import numpy as np, cuflash
x = np.ones((2, 3, 4), np.float32)
out, pullback = cuflash.attention_vjp(x, x, x, causal=True)
print(out.sum(), pullback(out).dv.shape)
"""
    assert run(code).split(maxsplit=1) == ["24.0", "(2, 3, 4)\n"]


def test_imports_nothing_heavy():
    code = f"import sys, cuflash; print([n for n in {HEAVY!r} if n in sys.modules])"
    assert run(code).strip() == "[]"


def test_a_numpy_call_imports_nothing_heavy():
    code = f"""
import sys, numpy as np, cuflash
x = np.ones((3, 4))
cuflash.attention(x, x, x)
print([n for n in {HEAVY!r} if n in sys.modules])
"""
    assert run(code).strip() == "[]"


def test_import_time():
    code = """
import time, numpy
start = time.perf_counter()
import cuflash
print(time.perf_counter() - start)
"""
    assert min(float(run(code)) for _ in range(3)) < 0.15


def test_public_names():
    assert set(cuflash.__all__) <= set(dir(cuflash))
    for name in cuflash.__all__:
        assert getattr(cuflash, name).__doc__
    assert cuflash.__version__.count(".") == 2


def test_only_config_reads_the_environment():
    for path in ROOT.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert path.name == "config.py" or ("os.environ" not in text and "getenv" not in text), path


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    assert config.cache_dir() == tmp_path
    monkeypatch.delenv("CUFLASH_CACHE_DIR")
    assert config.cache_dir().is_absolute() and config.cache_dir().name == "cuflash"


@pytest.mark.parametrize(
    "platform, variables, expected",
    [
        ("linux", {"XDG_CACHE_HOME": os.path.abspath("xdg")}, pathlib.Path("xdg").absolute()),
        ("linux", {"XDG_CACHE_HOME": "relative"}, pathlib.Path.home() / ".cache"),
        ("darwin", {}, pathlib.Path.home() / "Library" / "Caches"),
        ("win32", {"LOCALAPPDATA": os.path.abspath("local")}, pathlib.Path("local").absolute()),
        ("win32", {}, pathlib.Path.home() / "AppData" / "Local"),
    ],
)
def test_cache_dir_by_platform(monkeypatch, platform, variables, expected):
    for name in ("CUFLASH_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    assert config.cache_dir() == expected / "cuflash"


def test_num_threads(monkeypatch):
    monkeypatch.delenv("CUFLASH_NUM_THREADS", raising=False)
    assert config.num_threads() >= 1
    monkeypatch.setenv("CUFLASH_NUM_THREADS", " 3 ")
    assert config.num_threads() == 3


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_bad_num_threads(monkeypatch, text):
    monkeypatch.setenv("CUFLASH_NUM_THREADS", text)
    with pytest.raises(ValueError, match="CUFLASH_NUM_THREADS=.*at least 1"):
        config.num_threads()


def test_dump_dir(monkeypatch, tmp_path):
    monkeypatch.delenv("CUFLASH_DUMP_DIR", raising=False)
    assert config.dump_dir() is None
    monkeypatch.setenv("CUFLASH_DUMP_DIR", str(tmp_path))
    assert config.dump_dir() == tmp_path
