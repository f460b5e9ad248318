"""What a run's figures depend on: versions, device, clocks, date, and what a plain matrix product
reaches there.
"""

from __future__ import annotations

import datetime
import importlib
import platform
import shutil
import subprocess

import numpy as np

from .timing import gpu_times

_QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu"


def describe(cupy):
    """A dict for the JSON file. ``cupy`` is None where there is no GPU."""
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {
            name: _version(name) for name in ("cuflash", "numpy", "cupy", "torch", "flash_attn")
        },
    }
    if cupy is not None:
        number = cupy.cuda.runtime.getDevice()
        props = cupy.cuda.runtime.getDeviceProperties(number)
        facts["device"] = props["name"].decode()
        facts["compute_capability"] = f"{props['major']}.{props['minor']}"
        facts["cuda_driver"] = cupy.cuda.runtime.driverGetVersion()
        facts["nvrtc"] = "{}.{}".format(*cupy.cuda.nvrtc.getVersion())
        facts["gemm_fp16_tflops"] = round(gemm_tflops(cupy), 1)
    facts["nvidia_smi"] = clocks()
    return facts


def _version(name):
    try:
        return getattr(importlib.import_module(name), "__version__", "unknown")
    except Exception:  # a peer that does not import is reported by its Skip
        return None


def clocks():
    """What nvidia-smi says of the device now; None where there is no such program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    answer = subprocess.run(
        [program, f"--query-gpu={_QUERY}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    lines = answer.stdout.splitlines()
    return dict(zip(_QUERY.split(","), (x.strip() for x in lines[0].split(",")))) if lines else None


def gemm_tflops(cupy, size=8192):
    """The ceiling of the run: one 16-bit product of square matrices through cuBLAS."""
    x = (
        cupy.random.default_rng(0)
        .standard_normal((size, size), dtype=np.float32)
        .astype(np.float16)
    )
    out = cupy.empty_like(x)
    return (
        2 * size**3 / gpu_times({"gemm": lambda: cupy.matmul(x, x, out=out)}, cupy)["gemm"] / 1e12
    )
