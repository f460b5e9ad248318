"""Text to cubin to kernel: NVRTC, a content-addressed cache of cubins, CuPy modules.

A cubin's name is the digest of everything that went into it, so an edited header, another compiler or another option is
another file and nothing is ever stale. Files are published by an atomic rename: a process that is killed leaves at most
a temporary file behind, and of several that build the same kernel at once the last one wins with the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from . import config, params, source
from .plan import Plan

SCHEMA = 1
OPTIONS = ("-std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v")


class CompileError(RuntimeError):
    """A kernel did not compile; the text has the plan, the compiler's first errors and where the source was dumped."""


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
            "compiling kernels needs CuPy: install cuflash with the extra for your CUDA version, cuda12 or cuda13"
        ) from error
    except Exception as error:  # CuPy loads the library on the first call and raises what the loader said
        raise RuntimeError(
            "compiling kernels needs NVRTC, which was not found; CuPy's own extra brings it: install cuflash with "
            f"the extra cuda12 or cuda13 (the loader said: {error})") from error
    return nvrtc


@lru_cache(maxsize=None)
def architecture(major: int, minor: int) -> str:
    """The compiler's name for a device: exact where NVRTC knows it, else PTX of the newest one that it does know."""
    known = _nvrtc().getSupportedArchs()
    capability = 10 * major + minor
    if capability == 90:
        return "sm_90a"
    if capability in known:
        return f"sm_{capability}"
    older = [arch for arch in known if arch <= capability]
    if not older:
        raise RuntimeError(f"the GPU has compute capability {major}.{minor}; cuflash needs 7.5 or later")
    return f"compute_{max(older)}"


def translation_unit(plan: Plan) -> str:
    """What NVRTC compiles: the types, this plan's constants and parameters, then the kernel with its includes."""
    body = source.unit(f"{plan.kernel}.cu", skip=("types.cuh",))
    return "\n".join([
        source.unit("types.cuh"), '#line 1 "params.py"', params.text(plan.params), '#line 1 "plan.py"', plan.text(),
        f"static_assert(sizeof(Params) == {params.layout(plan.params).size}, \"params.py packs this struct\");", body,
    ])


def key(text: str, arch: str) -> str:
    """The digest of everything that decides the cubin."""
    whole = "\0".join([str(SCHEMA), str(_nvrtc().getVersion()), arch, *OPTIONS, text])
    return hashlib.sha256(whole.encode()).hexdigest()[:32]


def compile_text(text: str, name: str, arch: str) -> tuple[bytes, str]:
    """Compile a translation unit. Returns the cubin (PTX for a ``compute_`` architecture) and the compiler's log."""
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, f"{name}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={arch}", *OPTIONS))
        log = nvrtc.getProgramLog(program)
        if arch.startswith("compute_"):
            return nvrtc.getPTX(program).encode(), log
        # CuPy drops the last byte, as if a cubin were text that ends in a zero: an ELF file lacks it.
        return nvrtc.getCUBIN(program) + b"\0", log
    except nvrtc.NVRTCError as error:
        raise CompileError(f"{error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def _publish(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=path.stem, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        try:
            os.unlink(temporary)
        except OSError:
            pass
        if not path.exists():  # on Windows a file that another process has open cannot be replaced: it is the same
            raise


def _dump(text: str, name: str) -> Path:
    where = config.dump_dir() or Path(tempfile.gettempdir())
    where.mkdir(parents=True, exist_ok=True)
    path = where / f"cuflash-{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.cu"
    path.write_text(text, encoding="utf-8")
    return path


def build(plan: Plan, arch: str, *, force: bool = False) -> Build:
    """The cubin of a plan, from the cache or compiled now.

    Raises
    ------
    CompileError
        NVRTC refused the source.
    """
    text = translation_unit(plan)
    suffix = "ptx" if arch.startswith("compute_") else "cubin"
    path = config.cache_dir() / f"{plan.kernel}-{key(text, arch)}.{suffix}"
    if path.is_file() and path.stat().st_size > 0 and not force:
        return Build(path, "", True)
    try:
        binary, log = compile_text(text, plan.kernel, arch)
    except CompileError as error:
        lines = [line for line in str(error).splitlines() if "error" in line][:8]
        raise CompileError(
            f"{plan} did not compile for {arch}:\n" + "\n".join(lines)
            + f"\nThe whole source is in {_dump(text, plan.kernel)}") from error
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
    return raw.kernel


def kernel(plan: Plan, device_id: int):
    """The launchable function of a plan on a device, which must be the current one.

    Call it as ``function(grid, block, arguments, shared_memory)``: it runs on the current stream.
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
                function = _load(plan, build(plan, arch, force=True).path)  # the file was damaged
            _kernels[plan, device_id] = function
        return _kernels[plan, device_id]


def attributes(function) -> dict[str, int]:
    """Registers a thread and bytes of local memory of a loaded kernel."""
    from cupy_backends.cuda.api import driver

    return {
        "registers": driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function.ptr),
        "local_bytes": driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function.ptr),
    }
