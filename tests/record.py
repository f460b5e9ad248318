"""The record of the last GPU run: which kernel and launch sources it verified, and where.

On a machine with a GPU `python -m pytest` leaves .pytest_cache/gpu_session.json behind. Then

    python tests/record.py --write                turns that green session into gpu_record.json;
                                                  a suite run in parts: --session FILE FILE ...
    python tests/record.py --unverified GLOB WHY  lists files that changed since, with the reason

test_record.py compares the record with the tree, so no kernel changes without a GPU run unnoticed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
SESSION = ROOT / ".pytest_cache" / "gpu_session.json"

# What only a GPU can verify: every kernel source and the host code that launches it.
WATCHED = (
    "kernels_cu/**/*.cu",
    "kernels_cu/**/*.cuh",
    "cuflash/launch*.py",
    "cuflash/params*.py",
    "cuflash/plan*.py",
    "cuflash/wgmma*.py",
    "cuflash/tensormap*.py",
    "cuflash/jit*.py",
    "cuflash/source*.py",
    "cuflash/families/*.py",
)

# What sessions of one record have in common.
SAME = (
    "files", "device", "compute_capability", "device_count", "driver", "cuda_runtime", "nvrtc",
    "cupy", "numpy", "python",
)  # fmt: skip


def watched_files(root=ROOT):
    """{path relative to root: sha256 of its text}; line ends are normalised, so a checkout's
    setting is no change.
    """
    paths = {path for pattern in WATCHED for path in root.glob(pattern)}
    return {
        path.relative_to(root)
        .as_posix(): hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n"))
        .hexdigest()
        for path in sorted(paths)
    }


def load(path=RECORD):
    """The record, or an empty one where none was written yet."""
    if not path.exists():
        return {"files": {}, "unverified": {}, "run": {}}
    return json.loads(path.read_text())


def save(record, path):
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def differences(record, files):
    """Every way in which the tree departs from the record, a line each; empty when all is well."""
    problems = []
    unverified = record["unverified"]
    for path, digest in files.items():
        if path in unverified:
            continue
        if path not in record["files"]:
            problems.append(f"{path}: never run on a GPU")
        elif record["files"][path] != digest:
            problems.append(f"{path}: changed since its last GPU run")
    problems += [
        f"{path}: recorded, but no longer there"
        for path in sorted({*record["files"], *unverified} - set(files))
    ]
    problems += [
        f"{path}: unverified without a reason" for path, why in unverified.items() if not why
    ]
    return problems


def merged(sessions):
    """One session of several that ran different modules of the same tree on the same machine."""
    first, *others = sessions
    together = {key: value for key, value in first.items() if key not in ("seconds", "date")}
    together["counts"] = dict(first["counts"])
    together["modules"], together["chosen"] = list(first["modules"]), list(first["chosen"])
    for other in others:
        apart = [key for key in SAME if first.get(key) != other.get(key)]
        if apart:
            raise ValueError(f"the sessions differ in {', '.join(apart)}")
        for outcome, count in other["counts"].items():
            together["counts"][outcome] += count
        together["exit_status"] = together["exit_status"] or other["exit_status"]
        together["deselected"] += other["deselected"]
        together["modules"] += other["modules"]
        together["chosen"] += other["chosen"]
    together["date"] = max(session["date"] for session in sessions)
    together["seconds"] = sum(session.get("seconds", 0) for session in sessions)
    return together


def from_session(session, files, modules):
    """The record of a session, or ValueError with every reason why it proves nothing."""
    counts = session["counts"]
    reasons = []
    if session["exit_status"] != 0 or counts["failed"]:
        reasons.append(f"the session failed (status {session['exit_status']}, {counts})")
    if not counts["passed"]:
        reasons.append("no test passed")
    if session["deselected"]:
        reasons.append(f"{session['deselected']} tests were deselected")
    if session["chosen"]:
        reasons.append(f"it ran single tests: {', '.join(session['chosen'])}")
    missing = sorted(set(modules) - set(session["modules"]))
    if missing:
        reasons.append(f"it did not run {', '.join(missing)}")
    changed = [
        path
        for path in sorted({*files, *session["files"]})
        if files.get(path) != session["files"].get(path)
    ]
    if changed:
        reasons.append(f"changed since the session: {', '.join(changed)}")
    if reasons:
        raise ValueError("; ".join(reasons))
    run = {
        key: value
        for key, value in session.items()
        if key not in ("files", "modules", "exit_status", "deselected", "chosen")
    }
    return {"files": files, "unverified": {}, "run": run}


def write(session_paths, record_path):
    for path in session_paths:
        if not path.exists():
            return f"no session of a machine with a GPU: {path.name} is missing"
    modules = [path.name for path in (ROOT / "tests").glob("test_*.py")]
    try:
        session = merged([json.loads(path.read_text()) for path in session_paths])
        record = from_session(session, watched_files(), modules)
    except ValueError as error:
        return f"not recorded: {error}"
    save(record, record_path)
    print(f"{record_path.name}: {len(record['files'])} files, {record['run']['counts']}")
    return None


def mark_unverified(pattern, reason, record_path):
    """List every changed or new file that matches; a file that still has its verified text is left
    alone.
    """
    record, files = load(record_path), watched_files()
    matching = [path for path in files if fnmatch(path, pattern)]
    if not matching:
        return f"no watched file matches {pattern!r}"
    if not reason.strip():
        return "a reason is required"
    for path in matching:
        if record["files"].get(path) != files[path]:
            record["unverified"][path] = reason
    for section in ("files", "unverified"):  # forget what was deleted
        record[section] = {path: value for path, value in record[section].items() if path in files}
    save(record, record_path)
    print(f"{record_path.name}: {len(record['unverified'])} unverified")
    return None


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="record the last GPU session")
    action.add_argument("--unverified", nargs=2, metavar=("GLOB", "REASON"))
    parser.add_argument("--session", type=Path, nargs="+", default=[SESSION])
    parser.add_argument("--record", type=Path, default=RECORD)
    chosen = parser.parse_args(arguments)
    if chosen.write:
        problem = write(chosen.session, chosen.record)
    else:
        problem = mark_unverified(*chosen.unverified, chosen.record)
    if problem:
        print(problem, file=sys.stderr)
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main())
