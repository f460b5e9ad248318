"""Settings from the environment; no other module reads environment variables.

================== ==============================================================================
CUFLASH_CACHE_DIR  folder of the compiled kernels; default: the user's cache folder
CUFLASH_NUM_THREADS threads of the NumPy path; default: the processors this process may use
CUFLASH_DUMP_DIR   folder for the text of a kernel that failed to compile; default: the cache
================== ==============================================================================

Each function reads its variable anew: a change takes effect at the next call.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """``CUFLASH_CACHE_DIR``, or ``cuflash`` in the platform's cache folder; not created here."""
    chosen = os.environ.get("CUFLASH_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        base = Path(local) if local else Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        # The XDG rule: a relative path in the variable is to be ignored.
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "cuflash"


def num_threads() -> int:
    """``CUFLASH_NUM_THREADS``, or as many as there are processors."""
    text = os.environ.get("CUFLASH_NUM_THREADS", "").strip()
    if text:
        try:
            count = int(text)
        except ValueError:
            count = 0
        if count < 1:
            raise ValueError(
                f"CUFLASH_NUM_THREADS={text!r}: it must be a whole number of at least 1"
            )
        return count
    return processors()


def processors() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # containers and batch systems grant fewer than exist
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def dump_dir() -> Path | None:
    """``CUFLASH_DUMP_DIR``; None when it is not set."""
    chosen = os.environ.get("CUFLASH_DUMP_DIR")
    return Path(chosen).expanduser().absolute() if chosen else None
