"""What the commands share: devices, progress, sizes, and the two kinds of failure."""

from __future__ import annotations

import sys
import time

import numpy as np

_INSUFFICIENT_DRIVER = 35  # also CUDA's answer where there is no driver at all
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class UsageError(Exception):
    """The command line or a file it names is wrong: exit status 2."""


class Failure(Exception):
    """The command was understood but could not be done, or a check failed: exit status 1."""


def load_cupy():
    """(cupy, "") when a CUDA device can be used, else (None, the reason in words)."""
    try:
        import cupy
    except ImportError:
        return None, "CuPy is not installed (extras cuda12 and cuda13 bring it)"
    except Exception as error:  # a broken CUDA installation can raise anything while CuPy loads
        return None, f"CuPy does not load: {first_line(error)}"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        if getattr(error, "status", None) == _INSUFFICIENT_DRIVER:
            return None, "no NVIDIA driver, or one too old for CuPy's CUDA"
        return None, f"CUDA does not start: {first_line(error)}"
    return (cupy, "") if count else (None, "no CUDA device is present")


def first_line(error):
    """An exception's first line of text, or its type when it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class Device:
    """Where a command computes: ``kind`` "cpu" (NumPy; ``reason`` says why) or "cuda" (CuPy)."""

    def __init__(self, kind, cupy=None, reason=""):
        self.kind, self.cupy, self.reason = kind, cupy, reason

    @classmethod
    def pick(cls, wanted):
        """``wanted`` is "auto" (a GPU when there is one), "cpu" or "cuda"."""
        if wanted == "cpu":
            return cls("cpu", reason="asked for with --device cpu")
        cupy, reason = load_cupy()
        if cupy is not None:
            return cls("cuda", cupy)
        if wanted == "cuda":
            raise UsageError(
                f"--device cuda: {reason}; leave --device out to run on the NumPy path"
            )
        return cls("cpu", reason=reason)

    def __str__(self):
        if self.kind == "cpu":
            return f"CPU, NumPy path ({self.reason})"
        number = self.cupy.cuda.runtime.getDevice()
        return f"GPU {number}, {gpu_name(self.cupy, number)}"

    @property
    def capability(self):
        """10 * major + minor; of a GPU only."""
        return int(self.cupy.cuda.Device().compute_capability)

    def put(self, array):
        """``array`` on this device; on the CPU the same memory (a mapped file stays one)."""
        array = np.asarray(array)
        if self.kind == "cpu":
            return array
        # As integers of the same size, since bfloat16 is not NumPy's own.
        bits = array.view(_UNSIGNED[array.dtype.itemsize])
        return self.cupy.asarray(bits).view(array.dtype)

    def get(self, array):
        """``array`` as a NumPy array."""
        if self.kind == "cpu":
            return array
        bits = self.cupy.asnumpy(array.view(_UNSIGNED[array.dtype.itemsize]))
        return bits.view(array.dtype)

    def synchronize(self):
        if self.kind == "cuda":
            self.cupy.cuda.get_current_stream().synchronize()

    def free_bytes(self):
        """Device memory still free, CuPy's pool included; None on the CPU."""
        if self.kind == "cpu":
            return None
        pooled = self.cupy.get_default_memory_pool().free_bytes()
        return self.cupy.cuda.runtime.memGetInfo()[0] + pooled


def gpu_name(cupy, number):
    name = cupy.cuda.runtime.getDeviceProperties(number)["name"]
    return name.decode() if isinstance(name, bytes) else name


class Progress:
    """One rewritten line on a terminal, at most about twenty lines elsewhere; all on stderr."""

    def __init__(self, label, total):
        self.label, self.total, self.done = label, max(total, 1), 0
        self.terminal = sys.stderr.isatty()
        self.start = self.shown = time.perf_counter()
        self.next_share = 0.0

    def advance(self, note=""):
        """One more step is done."""
        self.done += 1
        share, now = self.done / self.total, time.perf_counter()
        last = self.done >= self.total
        wait, next_share = (0.1, 0.0) if self.terminal else (1.0, self.next_share)
        if not last and (share < next_share or now - self.shown <= wait):
            return
        spent = now - self.start
        tail = "" if last else f", {spent * (1 / share - 1):.0f} s left"
        text = f"{self.label}: {share:4.0%}, {spent:.1f} s{tail}{'  ' + note if note else ''}"
        if self.terminal:
            text = f"\r{text}\033[K"
        print(text, end="" if self.terminal and not last else "\n", file=sys.stderr, flush=True)
        self.shown, self.next_share = now, share + 0.05


def human(count):
    """A number of bytes for people: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
