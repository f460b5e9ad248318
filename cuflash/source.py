"""Finds the CUDA sources and closes over their quoted includes."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path, PurePosixPath

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def folder() -> Path:
    """The folder of the CUDA sources: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "kernels_cu", package.parent / "kernels_cu"):
        if (candidate / "types.cuh").is_file():
            return candidate
    raise FileNotFoundError(
        f"cuflash's CUDA sources are missing: no kernels_cu/types.cuh in {package} or beside it; "
        "reinstall cuflash"
    )


def _resolve(includer: str, name: str) -> str:
    parts: list[str] = []
    for part in (PurePosixPath(includer).parent / name).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def closure(name: str, read) -> dict[str, str]:
    """``name`` and every file it includes, directly or not, as {path relative to the sources:
    text}.
    """
    files: dict[str, str] = {}
    waiting = [name]
    while waiting:
        path = waiting.pop()
        if path in files:
            continue
        files[path] = read(path)
        waiting.extend(_resolve(path, include) for include in _INCLUDE.findall(files[path]))
    return dict(sorted(files.items()))


def flatten(name: str, files: dict[str, str], skip: tuple[str, ...] = ()) -> str:
    """One translation unit: each include replaced by its file, once; ``#line`` keeps errors at the
    real place.
    """
    done = set(skip)

    def expand(path: str) -> str:
        done.add(path)
        out = [f'#line 1 "{path}"']
        for number, line in enumerate(files[path].splitlines(), 1):
            match = _INCLUDE.match(line)
            if match is None:
                out.append("" if line.strip() == "#pragma once" else line)
                continue
            target = _resolve(path, match.group(1))
            if target not in done:
                out.append(expand(target))
            out.append(f'#line {number + 1} "{path}"')
        return "\n".join(out)

    return expand(name) + "\n"


@lru_cache(maxsize=None)
def included(name: str, before: tuple[str, ...] = ()) -> tuple[str, ...]:
    """``before`` and the files that the text of ``name`` has: what is skipped after it."""
    root = folder()
    files = closure(name, lambda path: (root / path).read_text(encoding="utf-8"))
    return tuple(sorted({*before, *files}))


@lru_cache(maxsize=None)
def unit(name: str, skip: tuple[str, ...] = ()) -> str:
    """The text of ``name`` with its includes in place, but for those in ``skip``, which stand in
    front of it already.
    """
    root = folder()
    files = closure(name, lambda path: (root / path).read_text(encoding="utf-8"))
    return flatten(name, files, skip)
