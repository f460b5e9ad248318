"""Compiling and the cache of kernels: what decides a file's name, damage, folders, errors. No GPU
is needed; what compiles needs NVRTC.
"""

import errno
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from cuflash import jit, params, source
from cuflash.families import Access, device_of, portable
from cuflash.plan import Plan
from cuflash.problem import Problem

ROOT = Path(__file__).resolve().parent.parent
ARCH = "sm_80"
SMALL = portable.combine_plan("float16")  # compiles in a moment
FORWARD = portable.forward_plan(
    Problem("float16", (1,), 1, 1, 128, 128, 16, 16, 0.25), device_of(80), Access(16, 16)
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, not yet made."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(folder))
    monkeypatch.delenv("CUFLASH_DUMP_DIR", raising=False)
    return folder


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the CUDA sources that may be edited; call ``reread`` after that."""
    folder = tmp_path / "kernels_cu"
    shutil.copytree(source.folder(), folder)
    monkeypatch.setattr(source, "folder", lambda: folder)
    source.unit.cache_clear()
    yield folder
    source.unit.cache_clear()


def key_of(plan, arch=ARCH):
    return jit.key(jit.translation_unit(plan), arch)


def edit(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    source.unit.cache_clear()


# the key ------------------------------------------------------------------------------------------


def test_every_file_of_a_kernel_is_in_its_key(nvrtc, sources):
    """Bug 219: the content of headers counts, of those that are included by others as well."""
    plans = [SMALL, FORWARD]
    files = {
        plan: source.closure(f"{plan.kernel}.cu", lambda p: (sources / p).read_text())
        for plan in plans
    }
    before = {plan: key_of(plan) for plan in plans}
    for path in sorted(set().union(*files.values())):
        whole = (sources / path).read_text()
        (sources / path).write_text(whole + "// edited\n")
        source.unit.cache_clear()
        for plan in plans:
            assert (key_of(plan) != before[plan]) == (path in files[plan]), (path, plan.kernel)
        (sources / path).write_text(whole)
    source.unit.cache_clear()
    assert {plan: key_of(plan) for plan in plans} == before


def test_everything_that_decides_a_cubin_is_in_its_key(nvrtc, monkeypatch):
    keys = {key_of(SMALL), key_of(SMALL, "sm_90a"), key_of(portable.combine_plan("float32"))}
    keys.add(key_of(Plan("combine", "combine", 128, 0, (*SMALL.constants[:-1], ("kWarps", 8)))))
    with monkeypatch.context() as patch:
        patch.setattr(jit, "OPTIONS", (*jit.OPTIONS, "--use_fast_math"))
        keys.add(key_of(SMALL))
    with monkeypatch.context() as patch:
        patch.setattr(jit, "SCHEMA", jit.SCHEMA + 1)
        keys.add(key_of(SMALL))
    with monkeypatch.context() as patch:
        patch.setattr(jit, "_nvrtc", lambda: types.SimpleNamespace(getVersion=lambda: (99, 1)))
        keys.add(key_of(SMALL))
    with monkeypatch.context() as patch:
        patch.setattr(jit, "_compiler_build", lambda version: "nvidia-cuda-nvrtc 0.0.1")
        keys.add(key_of(SMALL))
    with monkeypatch.context() as patch:
        rows = [("first", "in"), *params.TABLES["combine"]]
        patch.setitem(params.TABLES, "combine", rows)
        params.layout.cache_clear()
        keys.add(key_of(SMALL))
        params.layout.cache_clear()
    assert len(keys) == 9
    assert key_of(SMALL) in keys  # and nothing else does: the first one is found again


def test_names_of_architectures(monkeypatch):
    """Exact where the compiler knows the device, else PTX of the newest it knows (bug 233)."""
    archs = (50, 60, 70, 75, 80, 86, 90, 100, 120)
    fake = types.SimpleNamespace(getSupportedArchs=lambda: archs)
    monkeypatch.setattr(jit, "_nvrtc", lambda: fake)
    jit.architecture.cache_clear()
    try:
        names = {(7, 5): "sm_75", (8, 6): "sm_86", (9, 0): "sm_90a", (10, 0): "sm_100"}
        names |= {(8, 9): "compute_86", (10, 3): "compute_100", (13, 7): "compute_120"}
        for capability, name in names.items():
            assert jit.architecture(*capability) == name
        for capability in ((7, 0), (7, 2), (5, 0)):
            with pytest.raises(RuntimeError, match=r"needs 7\.5"):
                jit.architecture(*capability)
    finally:
        jit.architecture.cache_clear()


# the cache ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [ARCH, "compute_80"])
def test_a_second_build_is_a_hit(nvrtc, cache, arch):
    built = jit.build(SMALL, arch)
    assert not built.cached and built.path.parent == cache
    assert built.path.suffix == (".ptx" if arch.startswith("compute") else ".cubin")
    source.unit.cache_clear()
    start = time.perf_counter()
    again = jit.build(SMALL, arch)
    seconds = time.perf_counter() - start
    assert again == jit.Build(built.path, "", True)
    assert seconds <= 0.1
    assert [path.name for path in cache.iterdir()] == [built.path.name]


@pytest.mark.parametrize("arch", [ARCH, "compute_80"])
def test_damaged_files_are_built_again(nvrtc, cache, arch):
    """Cut off anywhere, emptied, or never written to disk."""
    path = jit.build(SMALL, arch).path
    whole = path.read_bytes()
    cuts = (0, 1, 63, len(whole) // 2, len(whole) - 2)
    for damaged in [whole[:n] for n in cuts] + [bytes(len(whole))]:
        path.write_bytes(damaged)
        assert not jit._intact(path)
    assert not jit.build(SMALL, arch).cached
    assert path.read_bytes() == whole
    assert jit.build(SMALL, arch).cached


class _Loader:
    """Stands in for loading a module; the first ``failures`` calls fail."""

    def __init__(self, failures):
        self.failures, self.paths = failures, []

    def __call__(self, plan, path):
        self.paths.append(path)
        if len(self.paths) <= self.failures:
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")
        time.sleep(0.05)  # long enough for other threads to arrive
        return lambda *arguments: arguments


@pytest.fixture
def loading(nvrtc, cache, monkeypatch):
    """Makes jit.kernel work without a GPU: call it with the number of loads that fail."""
    device = types.SimpleNamespace(compute_capability="80")
    cuda = types.SimpleNamespace(Device=lambda number: device)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(jit, "_nvrtc", lambda: nvrtc)
    monkeypatch.setattr(jit, "_kernels", {})

    def start(failures):
        loader = _Loader(failures)
        monkeypatch.setattr(jit, "_load", loader)
        return loader

    return start


def test_a_cached_file_that_does_not_load_is_built_again_once(loading):
    path = jit.build(SMALL, ARCH).path
    stamp = path.stat().st_ino, path.stat().st_mtime_ns
    loader = loading(1)
    assert jit.kernel(SMALL, 0) is jit.kernel(SMALL, 0)
    assert loader.paths == [path, path]
    assert (path.stat().st_ino, path.stat().st_mtime_ns) != stamp
    jit._kernels.clear()
    loading(2)
    with pytest.raises(RuntimeError, match="INVALID_IMAGE"):
        jit.kernel(SMALL, 0)


def test_a_new_file_that_does_not_load_raises(loading):
    loader = loading(1)
    with pytest.raises(RuntimeError, match="INVALID_IMAGE"):
        jit.kernel(SMALL, 0)
    assert len(loader.paths) == 1


def test_threads_share_one_kernel(loading):
    """Bug 205: several threads meet at a kernel that none has loaded; each device gets its own."""
    loader, found = loading(0), []
    threads = [
        threading.Thread(target=lambda n=n: found.append((n % 2, jit.kernel(SMALL, n % 2))))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loader.paths) == 2
    for device in (0, 1):
        assert len({kernel for number, kernel in found if number == device}) == 1


def test_a_launch_asks_the_driver(monkeypatch):
    """On the stream that is current at the call; a thread's first launch on a device makes the
    context.
    """
    calls, contexts = [], []
    driver = types.SimpleNamespace(launchKernel=lambda *arguments: calls.append(arguments))
    stream = types.SimpleNamespace(ptr=11)
    cuda = types.SimpleNamespace(
        get_current_stream=lambda: stream,
        runtime=types.SimpleNamespace(memGetInfo=lambda: contexts.append(1)),
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    for name in ("cupy_backends", "cupy_backends.cuda"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    api = types.SimpleNamespace(driver=driver)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", api)
    monkeypatch.setattr(jit, "_thread", jit._Thread())
    plan = Plan("combine", "combine", 96, 4096, SMALL.constants)
    kernel = jit.Kernel(plan, types.SimpleNamespace(ptr=77))
    kernel(0, 1000, 0xABC0)
    stream.ptr = 12
    kernel(0, 5, 0xDEF0)
    assert calls == [
        (77, 1000, 1, 1, 96, 1, 1, 4096, 11, 0xABC0, 0),
        (77, 5, 1, 1, 96, 1, 1, 4096, 12, 0xDEF0, 0),
    ]
    assert len(contexts) == 1
    kernel(1, 5, 0xDEF0)
    thread = threading.Thread(target=kernel, args=(0, 5, 0xDEF0))
    thread.start()
    thread.join()
    assert len(contexts) == 3


_RACER = """
import sys, time
from pathlib import Path
from cuflash import jit
from cuflash.families import portable
jit._nvrtc()
Path(sys.argv[1]).touch()
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
built = jit.build(portable.combine_plan("float16"), "sm_80")
print(built.cached, built.path, jit._intact(built.path))
"""


def test_eight_processes_at_a_cold_cache(nvrtc, cache, tmp_path):
    """Bugs 221 and 223: all of them get the whole file, and nothing else is left."""
    ready = [tmp_path / f"ready{n}" for n in range(8)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, str(path), str(tmp_path / "go")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for path in ready
    ]
    try:
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in ready) and time.monotonic() < deadline:
            if any(racer.poll() for racer in racers):
                break
            time.sleep(0.02)
        (tmp_path / "go").touch()
        answers = [racer.communicate(timeout=60) for racer in racers]
    finally:
        for racer in racers:
            racer.kill()
    assert [racer.returncode for racer in racers] == [0] * 8, answers
    (file,) = cache.iterdir()
    assert jit._intact(file)
    words = [out.split() for out, _ in answers]
    assert {tuple(each[1:]) for each in words} == {(str(file), "True")}
    assert "False" in {each[0] for each in words}  # somebody compiled it


# folders ------------------------------------------------------------------------------------------

posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX owners and modes")


@posix
def test_the_folder_is_made_for_its_owner_alone(cache):
    assert jit._own_folder() == cache
    assert cache.stat().st_mode & 0o777 == 0o700


@posix
def test_a_folder_of_somebody_else_is_refused(nvrtc, cache, monkeypatch):
    cache.mkdir()
    if os.geteuid() == 0:
        os.chown(cache, 54321, -1)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PermissionError, match="belongs to user .* set CUFLASH_CACHE_DIR"):
        jit.build(SMALL, ARCH)
    assert list(cache.iterdir()) == []


def test_a_folder_that_cannot_be_made(nvrtc, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "cache"):
        monkeypatch.setenv("CUFLASH_CACHE_DIR", str(folder))
        with pytest.raises(OSError, match="cannot be kept in .* set CUFLASH_CACHE_DIR"):
            jit.build(SMALL, ARCH)


def test_a_folder_that_cannot_be_written(nvrtc, cache, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(jit.tempfile, "mkstemp", refuse)
    with pytest.raises(PermissionError, match="Permission denied.* set CUFLASH_CACHE_DIR"):
        jit.build(SMALL, ARCH)


def test_a_full_disk_leaves_nothing_behind(nvrtc, cache, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jit.os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        jit.build(SMALL, ARCH)
    assert list(cache.iterdir()) == []


def test_a_file_in_use_need_not_be_replaced(nvrtc, cache, monkeypatch):
    """Windows refuses to replace a file that another process has open: its content is the same."""

    def refuse(old, new):
        raise PermissionError(errno.EACCES, "Access is denied")

    path = jit.build(SMALL, ARCH).path
    monkeypatch.setattr(jit.os, "replace", refuse)
    assert jit.build(SMALL, ARCH, force=True).path == path
    assert list(cache.iterdir()) == [path]
    path.write_bytes(b"damaged")
    with pytest.raises(PermissionError, match="Access is denied"):
        jit.build(SMALL, ARCH)


# errors -------------------------------------------------------------------------------------------


def test_a_compile_error_names_file_and_line(nvrtc, cache, sources, tmp_path, monkeypatch):
    header = sources / "attn" / "band.cuh"
    lines = header.read_text().splitlines()
    header.write_text("\n".join([*lines, "int broken = nowhere;"]) + "\n")
    source.unit.cache_clear()
    monkeypatch.setenv("CUFLASH_DUMP_DIR", str(tmp_path / "dump"))
    with pytest.raises(jit.CompileError) as caught:
        jit.build(FORWARD, ARCH)
    text = str(caught.value)
    assert f'attn/band.cuh({len(lines) + 1}): error: identifier "nowhere" is undefined' in text
    assert "fwd_portable(" in text and "kBlockM=" in text and ARCH in text
    dump = Path(re.search(r"The whole source is in (.*)", text).group(1))
    assert dump.parent == tmp_path / "dump"
    assert dump.read_text(encoding="utf-8") == jit.translation_unit(FORWARD)
    assert list(cache.iterdir()) == []


def test_a_compile_error_in_a_kernel_and_in_a_plan(nvrtc, cache, sources):
    edit(sources / "combine.cu", "const int lane = threadIdx.x", "const int lane = nobody")
    number = [
        n
        for n, line in enumerate((sources / "combine.cu").read_text().splitlines(), 1)
        if "nobody" in line
    ]
    with pytest.raises(jit.CompileError, match=rf"combine\.cu\({number[0]}\): error.*nobody"):
        jit.build(SMALL, ARCH)
    wrong = Plan("combine", "combine", 128, 0, (("Element", "f17"), ("kWarps", 4)))
    with pytest.raises(jit.CompileError, match=r'plan\.py\(2\): error: identifier "f17"') as caught:
        jit.build(wrong, ARCH)
    assert f"The whole source is in {cache}" in str(caught.value)  # where no other folder is named


def test_a_dump_that_cannot_be_written_hides_nothing(nvrtc, cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUFLASH_DUMP_DIR", str(tmp_path / "file"))
    wrong = Plan("combine", "combine", 128, 0, (("Element", "f17"), ("kWarps", 4)))
    with pytest.raises(jit.CompileError, match='(?s)"f17".*could not be written.*CUFLASH_DUMP_DIR'):
        jit.build(wrong, ARCH)


def test_an_unknown_option_is_a_compile_error(nvrtc, cache, monkeypatch):
    monkeypatch.setattr(jit, "OPTIONS", (*jit.OPTIONS, "--no-such-option"))
    with pytest.raises(jit.CompileError, match="no-such-option|INVALID_OPTION"):
        jit.build(SMALL, ARCH)


def test_missing_cupy_and_missing_nvrtc(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        patch.setitem(sys.modules, "cupy.cuda", None)
        with pytest.raises(ImportError, match="needs CuPy.*cuda12 or cuda13"):
            jit._nvrtc()

    def absent():
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    cuda = types.ModuleType("cupy.cuda")
    cuda.nvrtc = types.SimpleNamespace(getVersion=absent)
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    with pytest.raises(RuntimeError, match="needs NVRTC.*cuda12 or cuda13.*libnvrtc"):
        jit._nvrtc()
