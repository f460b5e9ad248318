"""What is shipped: wheel, source distribution and editable install all find the CUDA sources; the
README's commands are the ones that are run.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import cuflash
from cuflash import source
from cuflash.cli_common import load_cupy

ROOT = Path(__file__).resolve().parent.parent
KERNELS = sorted(
    path.relative_to(ROOT / "kernels_cu").as_posix()
    for path in (ROOT / "kernels_cu").rglob("*")
    if path.suffix in (".cu", ".cuh")
)
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "cuflash").rglob("*.py"))
COPIED = ("setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
HOOK = "import setuptools.build_meta as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"
SHOW = "import cuflash.source; print(cuflash.__file__); print(cuflash.source.folder())"


def build(what, tree, target):
    """Run one hook of the build backend in ``tree``; the path of what it built."""
    target.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", HOOK, f"build_{what}", str(target)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target / done.stdout.split()[-1]


def imported_from(folder, elsewhere, *, site=False):
    """(cuflash/__init__.py, the CUDA sources) of a Python that finds cuflash in ``folder``.

    ``site`` also reads the .pth files there, as it is done for an environment's own packages. They
    hook a finder behind the normal ones; it goes to the front, before a copy of cuflash that this
    environment may hold.
    """
    start = ""
    if site:
        start = f"import site, sys; site.addsitedir({str(folder)!r}); "
        start += "sys.meta_path.sort(key=lambda finder: 'Editable' not in repr(finder)); "
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", start + SHOW]
    done = subprocess.run(
        command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [Path(line).resolve() for line in done.stdout.splitlines()]


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """A copy of what the build reads, so that building leaves nothing in the tree itself."""
    pytest.importorskip("setuptools", minversion="70.1", reason="builds need setuptools 70.1")
    copy = tmp_path_factory.mktemp("package") / "tree"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "results", ".hypothesis")
    for folder in ("cuflash", "kernels_cu", "tests", "bench", ".ci"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignore)
    for name in COPIED:
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="session")
def wheel(tree):
    return build("wheel", tree, tree.parent / "wheel")


@pytest.fixture(scope="session")
def sdist(tree):
    return build("sdist", tree, tree.parent / "sdist")


def test_the_checkout_finds_its_sources():
    assert source.folder() == ROOT / "kernels_cu"
    assert KERNELS


def test_wheel_is_small_and_complete(wheel):
    assert wheel.stat().st_size < 300_000
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = {f"cuflash/kernels_cu/{name}" for name in KERNELS} - names
    missing |= {*MODULES, "cuflash/py.typed"} - names
    assert not missing
    extra = {name for name in names if not name.startswith(("cuflash/", "cuflash-"))}
    assert not extra, "tests, bench and caches stay out of the wheel"


def test_wheel_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    facts = email.message_from_string(archive.read(name).decode())
    assert facts["Version"] == cuflash.__version__
    assert facts["Requires-Python"] == ">=3.10"
    assert set(facts.get_all("Provides-Extra")) == {"cuda12", "cuda13", "test", "bench"}
    needs = facts.get_all("Requires-Dist")
    plain = {re.match(r"[\w-]+", need)[0] for need in needs if "extra ==" not in need}
    assert plain == {"numpy", "threadpoolctl"}
    for extra in ("12", "13"):
        assert any(re.match(rf"cupy-cuda{extra}x\[ctk\].*cuda{extra}\b", need) for need in needs)
    assert any(name.endswith("/LICENSE") for name in archive.namelist())


def test_installed_wheel_finds_its_sources(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    package, kernels = imported_from(tmp_path / "site", tmp_path)
    assert package == (tmp_path / "site/cuflash/__init__.py").resolve()
    assert kernels == (tmp_path / "site/cuflash/kernels_cu").resolve()


def test_sdist_builds_the_same_wheel_and_carries_the_tests(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
        # Extracting by hand: the `filter` of extractall is not in every Python 3.10.
        for member in archive.getmembers():
            if member.isfile():
                path = tmp_path / member.name.partition("/")[2]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.extractfile(member).read())
    assert {"tests/test_package.py", "bench/cases.py", ".ci/run", "CHANGELOG.md"} <= set(names)
    assert {f"kernels_cu/{name}" for name in KERNELS} <= set(names)
    again = build("wheel", tmp_path, tmp_path / "dist")
    assert sorted(zipfile.ZipFile(again).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_editable_install_finds_the_tree(tree, tmp_path):
    zipfile.ZipFile(build("editable", tree, tmp_path / "dist")).extractall(tmp_path / "site")
    package, kernels = imported_from(tmp_path / "site", tmp_path, site=True)
    assert package == (tree / "cuflash/__init__.py").resolve()
    assert kernels == (tree / "kernels_cu").resolve()


# --- the README


def readme_commands():
    """The one-line commands of the README that start from nothing: they make an environment."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^python3 -m venv .*$", text, re.MULTILINE)


def test_readme_has_two_commands_and_ci_runs_the_second():
    demo, tests = readme_commands()
    assert demo.endswith("python -m cuflash demo")
    assert tests.endswith("python -m pytest")
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert kept == [tests]


def python_blocks():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def needed(block):
    """The libraries a README example imports, besides NumPy and cuflash."""
    names = ("cupy", "torch", "jax")
    return [name for name in names if re.search(rf"^import {name}\b", block, re.MULTILINE)]


@pytest.mark.parametrize("number", range(len(python_blocks())))
def test_readme_examples_run(number):
    block = python_blocks()[number]
    for name in needed(block):
        pytest.importorskip(name)
    if "cupy" in needed(block) and load_cupy()[0] is None:
        pytest.skip(load_cupy()[1])
    exec(compile(block, f"README.md, example {number}", "exec"), {})


def test_readme_links_and_names_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`((?:cuflash|kernels_cu|bench|tests)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
