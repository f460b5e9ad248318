"""``python -m cuflash info`` and ``compile``: what is there, and kernels built ahead of time."""

from __future__ import annotations

import platform
import time

import numpy as np

import cuflash
from cuflash import config

from .cli_common import UsageError, first_line, gpu_name, human, load_cupy


def info(args):
    """The command; always succeeds, since what is missing is part of what it tells."""
    del args
    cupy, reason = load_cupy()
    print(f"cuflash   {cuflash.__version__}")
    print(f"Python    {platform.python_version()} on {platform.platform()}")
    print(f"NumPy     {np.__version__}")
    for label, module in (("ml_dtypes", "ml_dtypes"), ("CuPy", "cupy")):
        print(f"{label:<9} {_version(module)}")
    print(f"NVRTC     {_nvrtc()}")
    if cupy is None:
        print(f"devices   none: {reason}; calls on NumPy arrays run on the CPU")
    else:
        for number in range(cupy.cuda.runtime.getDeviceCount()):
            props = cupy.cuda.runtime.getDeviceProperties(number)
            capability = f"{props['major']}.{props['minor']}"
            print(
                f"device {number}  {gpu_name(cupy, number)}, compute capability {capability}, "
                f"{human(props['totalGlobalMem'])}"
            )
    folder = config.cache_dir()
    kernels = [path for suffix in ("cubin", "ptx") for path in folder.rglob(f"*.{suffix}")]
    size = human(sum(file.stat().st_size for file in kernels))
    print(f"cache     {folder}: {len(kernels)} kernels, {size}")


def _version(module):
    try:
        return getattr(__import__(module), "__version__", "of unknown version")
    except ImportError:
        return "not installed"
    except Exception as error:
        return f"installed, but does not load: {first_line(error)}"


def _nvrtc():
    try:
        from cupy.cuda import nvrtc

        return "{}.{}".format(*nvrtc.getVersion())
    except ImportError:
        return "not available without CuPy"
    except Exception as error:
        return f"does not load: {first_line(error)}"


def compile(args):
    """The command. ``args``: arch, dtype, head_dim, head_dim_v, no_backward, jobs."""
    from .ahead import compile_ahead

    count, start = 0, time.perf_counter()

    def report(record):
        nonlocal count
        count += 1
        print(f"[{time.perf_counter() - start:6.1f} s] {record}", flush=True)

    try:
        compile_ahead(
            args.arch,
            dtypes=tuple(args.dtype),
            head_dims=tuple(args.head_dim),
            head_dims_v=tuple(args.head_dim_v) if args.head_dim_v else None,
            causal=(False, True),
            backward=not args.no_backward,
            progress=report,
            jobs=args.jobs or config.processors(),
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None
    print(f"{count} kernels in {config.cache_dir()}, {time.perf_counter() - start:.1f} s")
