"""Homes (the array libraries of this machine), Hypothesis profiles, and the record of a GPU run."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings

sys.path.insert(0, str(Path(__file__).resolve().parent))

import compiling  # noqa: E402  (beside this file)
import record  # noqa: E402

# JAX would take three quarters of the GPU's memory at its first use, which the other libraries and
# the tests with large arrays need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_addoption(parser):
    parser.addoption(
        "--gate",
        choices=compiling.EXTENTS,
        default="sample",
        help="kernels that the compile gates build: a sample of their lists (minutes), the lists "
        "(about ten minutes on two cores), or the whole product of test_compile.py besides (hours)",
    )
    parser.addoption(
        "--gpu-only",
        action="store_true",
        help="skip what a machine without a GPU runs just as well",
    )


# Modules that never touch a device: the compiler, launches on a stand-in, NumPy.
HOST_MODULES = {
    f"test_{name}.py"
    for name in (
        "ahead", "block_lists", "compile", "compile_maps", "compile_packed", "cpu", "cpu_tiles",
        "import", "intervals", "kernel_dropout", "kernel_mask_bits", "kernel_spans", "kernel_sums",
        "launch", "launch_mask_bits", "launch_packed", "launch_scores", "launch_sm90",
        "launch_spans", "package", "plan", "plans_of", "prebuild", "problem", "reference",
        "sanitize_cases", "score", "score_rows", "score_text", "source", "squares",
    )
}  # fmt: skip


def pytest_collection_modifyitems(config, items):
    if CUPY is None or not config.getoption("--gpu-only"):
        return
    for item in items:
        home = getattr(item, "callspec", None) and item.callspec.params.get("home")
        on_host = home is not None and not home.is_gpu
        gate = "gate" in getattr(item, "fixturenames", ())
        if on_host or gate or item.path.name in HOST_MODULES:
            item.add_marker(pytest.mark.skip(reason="a machine without a GPU runs it"))


UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def np_dtype(name):
    """The NumPy dtype of that name; bfloat16 comes from ml_dtypes."""
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


class Home:
    """An array library the tests run on. Data travels as unsigned integers, so no bit is lost on
    the way.
    """

    def __init__(self, name, xp, strides):
        self.name, self.xp, self.as_strided = name, xp, strides.as_strided
        self.is_gpu = name != "numpy"

    def __repr__(self):
        return self.name

    def to_home(self, array):
        """A C-contiguous copy of a NumPy array."""
        array = np.array(array, order="C", copy=True)
        if not self.is_gpu:
            return array
        return self.xp.asarray(array.view(UINT[array.dtype.itemsize])).view(array.dtype)

    def asnumpy(self, array):
        """A NumPy copy of an array of this home."""
        if not isinstance(array, self.xp.ndarray):
            raise TypeError(f"expected a {self.name} array, got {type(array).__name__}")
        if not self.is_gpu:
            return array.copy()
        return self.xp.asnumpy(array.view(UINT[array.dtype.itemsize])).view(array.dtype)

    def synchronize(self):
        if self.is_gpu:
            self.xp.cuda.get_current_stream().synchronize()

    @property
    def backend(self):
        """The internal module that does the work for this home."""
        from importlib import import_module

        return import_module("cuflash.launch" if self.is_gpu else "cuflash.cpu")


def _gpu_home():
    """CuPy on a usable device (sm_75 or later), or None and the reason."""
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() == 0:
            return None, "no CUDA device"
        if int(cupy.cuda.Device().compute_capability) < 75:
            return None, "the CUDA device is below sm_75"
        cupy.zeros(1).sum().item()
    except Exception as error:  # no CuPy, no driver, a broken install: all mean "not here"
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return Home("cupy", cupy, cupy.lib.stride_tricks), None


NUMPY = Home("numpy", np, np.lib.stride_tricks)
CUPY, NO_GPU = _gpu_home()
HOMES = [NUMPY] if CUPY is None else [NUMPY, CUPY]

_COMMON = dict(
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("ci", max_examples=60, **_COMMON)
# Not shrunk: each attempt might build kernels.
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
settings.register_profile("gpu", max_examples=80, phases=_PHASES, **_COMMON)
settings.register_profile("soak", max_examples=1000, **{**_COMMON, "derandomize": False})
settings.load_profile("ci" if CUPY is None else "gpu")


@pytest.fixture(scope="session", params=HOMES, ids=repr)
def home(request):
    """Each array home of this machine in turn."""
    return request.param


@pytest.fixture(scope="session")
def nvrtc():
    """CuPy's wrapper of the compiler; the test is skipped where there is none."""
    from cuflash import jit

    try:
        return jit._nvrtc()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"needs NVRTC ({error})")


@pytest.fixture(scope="session")
def gate(nvrtc, request):
    """Builds kernels and tells what the compiler said."""
    gate = compiling.Gate(request.config.getoption("--gate"))
    yield gate
    gate.close()


@pytest.fixture(scope="session")
def gpu():
    """The CuPy home; the test is skipped where there is none."""
    if CUPY is None:
        pytest.skip(f"needs a GPU ({NO_GPU})")
    return CUPY


class _Session:
    """What record.py needs to know about a run on a GPU."""

    def __init__(self):
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.deselected = 0
        self.chosen = []  # single tests named on the command line
        self.modules = set()
        self.files = record.watched_files()
        self.started = datetime.datetime.now(datetime.timezone.utc)

    def facts(self, status):
        from cupy.cuda import nvrtc

        xp = CUPY.xp
        runtime = xp.cuda.runtime
        finished = datetime.datetime.now(datetime.timezone.utc)
        return {
            "exit_status": int(status),
            "counts": self.counts,
            "deselected": self.deselected,
            "chosen": self.chosen,
            "modules": sorted(self.modules),
            "files": self.files,
            "device": runtime.getDeviceProperties(xp.cuda.Device().id)["name"].decode(),
            "compute_capability": xp.cuda.Device().compute_capability,
            "device_count": runtime.getDeviceCount(),
            "driver": runtime.driverGetVersion(),
            "cuda_runtime": runtime.runtimeGetVersion(),
            "nvrtc": list(nvrtc.getVersion()),
            "cupy": xp.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "date": self.started.date().isoformat(),
            "seconds": round((finished - self.started).total_seconds()),
        }


_SESSION = _Session()


def pytest_deselected(items):
    _SESSION.deselected += len(items)


def pytest_collectreport(report):
    if (
        report.nodeid.endswith(".py") and not report.failed
    ):  # a module that skips itself was run as well
        _SESSION.modules.add(Path(report.nodeid).name)


def pytest_runtest_logreport(report):
    # With pytest-xdist the workers collect, and the controller sees their tests' reports only.
    _SESSION.modules.add(Path(report.nodeid.split("::")[0]).name)
    if report.failed:
        _SESSION.counts["failed"] += 1
    elif report.skipped:
        _SESSION.counts["skipped"] += 1
    elif report.when == "call":
        _SESSION.counts["passed"] += 1


def pytest_sessionfinish(session, exitstatus):
    if hasattr(session.config, "workerinput"):  # a worker of pytest-xdist: the controller reports
        return
    if CUPY is not None and not session.config.option.collectonly:
        _SESSION.chosen = [argument for argument in session.config.args if "::" in argument]
        record.SESSION.parent.mkdir(exist_ok=True)
        record.SESSION.write_text(json.dumps(_SESSION.facts(exitstatus), indent=1) + "\n")
