"""Text to cubin to kernel: NVRTC, a content-addressed cache of cubins, CuPy modules.

A cubin's name is the digest of everything that went into it, so an edited header, another compiler
or another option is another file and nothing is ever stale. Files are published by an atomic
rename: a process that is killed leaves at most a temporary file behind, and of several that build
the same kernel at once the last one wins with the same bytes.

The cache folder holds code that the GPU will run, so it is made for its owner alone, and one that
belongs to another user is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import struct
import tempfile
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from . import config, params, source, wgmma
from .plan import Plan

SCHEMA = 1
OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")

PTX_END = b"\n// end\n"  # text has no size of its own that a file could be checked against


class CompileError(RuntimeError):
    """A kernel did not compile; the text has the plan, the compiler's first errors and where the
    source was dumped.
    """


@dataclass(frozen=True)
class Build:
    """A compiled kernel: its file and what the compiler said about it."""

    path: Path
    log: str
    cached: bool


def _nvrtc():
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except ImportError as error:
        raise ImportError(
            "compiling kernels needs CuPy, which cannot be imported: install cuflash with the "
            f"extra for your CUDA version, cuda12 or cuda13 ({error})"
        ) from error
    except Exception as error:  # CuPy loads the library on the first call: what the loader said
        raise RuntimeError(
            "compiling kernels needs NVRTC, which was not found; CuPy's own extra brings it: "
            f"install cuflash with the extra cuda12 or cuda13 (the loader said: {error})"
        ) from error
    return nvrtc


@lru_cache(maxsize=None)
def _compiler_build(version: tuple[int, int]) -> str:
    """The full version of the compiler's wheel, since NVRTC itself does not tell its patch release;
    empty where it came with a toolkit.
    """
    for name in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{version[0]}"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return ""


@lru_cache(maxsize=None)
def architecture(major: int, minor: int) -> str:
    """The compiler's name for a device: exact where NVRTC knows it, else PTX of the newest one that
    it does know.

    Raises
    ------
    RuntimeError
        The device is older than compute capability 7.5.
    """
    capability = 10 * major + minor
    known = [arch for arch in _nvrtc().getSupportedArchs() if 75 <= arch <= capability]
    if not known:
        raise RuntimeError(
            f"the GPU has compute capability {major}.{minor}; cuflash needs 7.5 or later"
        )
    if max(known) < capability:
        return f"compute_{max(known)}"
    return "sm_90a" if capability == 90 else f"sm_{capability}"


def translation_unit(plan: Plan) -> str:
    """What NVRTC compiles: the types, this plan's constants and parameters, then the kernel with
    its includes.
    """
    layout = params.layout(plan.params, plan.operands)
    first = ["types.cuh"]
    first += ["ptx/tma.cuh"] if layout.num_maps else []
    first += ["attn/program.cuh"] if plan.score else []
    parts, seen = [], ()
    for name in first:
        parts.append(source.unit(name, skip=seen))
        seen = source.included(name, seen)
    parts += [
        '#line 1 "params.py"',
        params.text(plan.params, plan.operands),
        '#line 1 "plan.py"',
        plan.text(),
        *wgmma.overloads(plan),
        f'static_assert(sizeof(Params) == {layout.size}, "params.py packs this struct");',
        *(['#line 1 "score_text.py"', plan.score] if plan.score else []),
        source.unit(f"{plan.kernel}.cu", skip=seen),
    ]
    return "\n".join(parts)


def key(text: str, arch: str) -> str:
    """The digest of everything that decides the cubin."""
    version = _nvrtc().getVersion()
    whole = [str(SCHEMA), str(version), _compiler_build(version), arch, *OPTIONS, text]
    return hashlib.sha256("\0".join(whole).encode()).hexdigest()[:32]


def compile_text(text: str, name: str, arch: str) -> tuple[bytes, str]:
    """Compile a translation unit. Returns the cubin (PTX for a ``compute_`` architecture) and the
    compiler's log.

    Raises
    ------
    CompileError
        The compiler refused it.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={arch}", *OPTIONS))
        log = nvrtc.getProgramLog(program)
        if arch.startswith("compute_"):
            ptx = nvrtc.getPTX(program)  # str or bytes: CuPy changed its mind
            return (ptx if isinstance(ptx, bytes) else ptx.encode()) + PTX_END, log
        # CuPy drops the last byte, as if a cubin were text that ends in a zero: an ELF file lacks
        # it.
        return nvrtc.getCUBIN(program) + b"\0", log
    except nvrtc.NVRTCError as error:
        raise CompileError(f"{error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def _intact(path: Path) -> bool:
    """Whether a cached file is there and whole; the driver need not survive one that is cut off."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    if path.suffix == ".ptx":
        return data.endswith(PTX_END)
    if len(data) < 64 or data[:4] != b"\x7fELF":
        return False
    # ELF-64 keeps the places, entry sizes and counts of its program and section headers in its own
    # header; the compiler writes them last.
    program, section = struct.unpack_from("<2Q", data, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<4H", data, 54)
    return len(data) >= max(program + program_size * programs, section + section_size * sections)


def _own_folder() -> Path:
    """The cache folder, made if need be.

    Raises
    ------
    PermissionError
        It belongs to another user, who could have planted kernels in it.
    OSError
        It cannot be made.
    """
    folder = config.cache_dir()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    if hasattr(os, "geteuid"):  # not on Windows, where users have folders of their own
        owner = folder.stat().st_uid
        if owner not in (os.geteuid(), 0):
            raise PermissionError(
                f"CUFLASH_CACHE_DIR: the folder {folder} belongs to user {owner}, not to you (user "
                f"{os.geteuid()}); set CUFLASH_CACHE_DIR to a folder of your own"
            )
    return folder


def _unusable(folder: Path, error: OSError) -> OSError:
    return type(error)(
        f"compiled kernels cannot be kept in the folder {folder} ({error}); set CUFLASH_CACHE_DIR "
        "to a folder that you can write to"
    )


def _publish(path: Path, data: bytes) -> None:
    try:
        handle, temporary = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
    except OSError as error:
        raise _unusable(path.parent, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            # Else a machine that fails may leave the new name on blocks that were never written.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        # On Windows a file that another process has open cannot be replaced; it is the same file.
        if not _intact(path):
            raise _unusable(path.parent, error) from error


def _dump(text: str, name: str) -> str:
    """Where the text of a failed kernel is, in words: a full disk must not hide the error."""
    path = config.dump_dir() or config.cache_dir()
    path /= f"failed-{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.cu"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        return f"The whole source could not be written ({error}); set CUFLASH_DUMP_DIR to a folder"
    return f"The whole source is in {path}"


def _first_errors(said: str) -> str:
    lines = [line for line in said.splitlines() if "error" in line][:8]
    return "\n".join(lines) if lines else said.strip()


def _file_name(plan: Plan, text: str, arch: str) -> str:
    suffix = "ptx" if arch.startswith("compute_") else "cubin"
    return f"{plan.kernel}-{key(text, arch)}.{suffix}"


def is_built(plan: Plan, arch: str) -> bool:
    """Whether the cache has a plan for an architecture; nothing is made or changed."""
    return _intact(config.cache_dir() / _file_name(plan, translation_unit(plan), arch))


def build(plan: Plan, arch: str, *, force: bool = False) -> Build:
    """The cubin of a plan, from the cache or compiled now.

    Parameters
    ----------
    plan : Plan
    arch : str
        As :func:`architecture` names it.
    force : bool
        Whether to compile even if the cache has it.

    Raises
    ------
    CompileError
        NVRTC refused the source.
    OSError
        The cache folder cannot be used.
    """
    text = translation_unit(plan)
    path = _own_folder() / _file_name(plan, text, arch)
    if not force and _intact(path):
        return Build(path, "", True)
    try:
        binary, log = compile_text(text, plan.kernel, arch)
    except CompileError as error:
        raise CompileError(
            f"{plan} did not compile for {arch}:\n{_first_errors(str(error))}\n"
            f"{_dump(text, plan.kernel)}"
        ) from error
    _publish(path, binary)
    return Build(path, log, False)


_kernels: dict[tuple[Plan, int], object] = {}
_lock = threading.Lock()


def _load(plan: Plan, path: Path):
    import cupy

    raw = cupy.RawModule(path=str(path)).get_function(plan.kernel)
    raw.compile()
    if plan.smem_bytes > 48 * 1024:
        raw.max_dynamic_shared_size_bytes = plan.smem_bytes
    return Kernel(plan, raw.kernel)


class _Thread(threading.local):
    def __init__(self):
        self.devices = set()  # whose contexts are known to be there


_thread = _Thread()


class Kernel:
    """A loaded kernel of a plan.

    The driver is called directly: CuPy's own call sorts out its arguments anew each time, which
    took 7 us of a call's 24.
    """

    def __init__(self, plan: Plan, function):
        import cupy
        from cupy_backends.cuda.api import driver

        self.function = function  # which keeps the module loaded
        self._entry = function.ptr
        self._threads, self._smem = plan.threads, plan.smem_bytes
        self._launch = driver.launchKernel
        self._stream = cupy.cuda.get_current_stream
        self._make_context = cupy.cuda.runtime.memGetInfo

    def __call__(self, device_id: int, blocks: int, arguments: int) -> None:
        """Enqueue it on the current stream of the current device, which is ``device_id``.

        ``arguments`` is the address of the list of its arguments.
        """
        if device_id not in _thread.devices:
            # The runtime makes a thread's context at its first call, the driver does not.
            self._make_context()
            _thread.devices.add(device_id)
        self._launch(
            self._entry, blocks, 1, 1, self._threads, 1, 1, self._smem, self._stream().ptr,
            arguments, 0,
        )  # fmt: skip


def kernel(plan: Plan, device_id: int) -> Kernel:
    """The kernel of a plan on a device, which must be the current one.

    Raises
    ------
    CompileError, OSError
        As :func:`build`.
    """
    found = _kernels.get((plan, device_id))
    if found is not None:
        return found
    with _lock:
        if (plan, device_id) not in _kernels:
            import cupy

            capability = int(cupy.cuda.Device(device_id).compute_capability)
            arch = architecture(capability // 10, capability % 10)
            built = build(plan, arch)
            try:
                function = _load(plan, built.path)
            except Exception:
                if not built.cached:
                    raise
                # The file was damaged.
                function = _load(plan, build(plan, arch, force=True).path)
            _kernels[plan, device_id] = function
        return _kernels[plan, device_id]


def attributes(kernel: Kernel) -> dict[str, int]:
    """Registers a thread and bytes of local memory of a loaded kernel."""
    from cupy_backends.cuda.api import driver

    entry = kernel.function.ptr
    return {
        "registers": driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, entry),
        "local_bytes": driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, entry),
    }
