"""`python -m bench`: a table and a JSON file a run, both kept in bench/results/."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from pathlib import Path

from cuflash import config, jit, prebuild
from cuflash.cli_common import load_cupy

from .cases import SETS
from .machine import clocks, describe
from .peers import OURS, PEERS, Skip, arrays, kernels
from .timing import cpu_times, gpu_times, host_times

_RESULTS = Path(__file__).parent / "results"


def main(argv=None):
    args = _parser().parse_args(argv)
    cupy, reason = load_cupy()
    wanted = list(SETS) if args.set == "all" else [args.set]
    cases = [case for name in wanted for case in SETS[name] if re.search(args.only, case.name)]
    runnable = [case for case in cases if case.home == "cpu" or cupy is not None]
    if len(runnable) < len(cases):
        print(f"{len(cases) - len(runnable)} GPU cases left out: {reason}", file=sys.stderr)
    if not runnable:
        print("no case to run", file=sys.stderr)
        return 1
    machine = describe(cupy if any(case.home == "gpu" for case in runnable) else None)
    if cupy is not None:
        build([case for case in runnable if case.home == "gpu"], cupy)
    rows = []
    for number, case in enumerate(runnable, 1):
        print(f"[{number}/{len(runnable)}] {case.name}", file=sys.stderr, flush=True)
        rows.append(measure(case, args.peers, cupy, args.rounds))
        machine["nvidia_smi_after"] = clocks()
        record = {"set": args.set, "machine": machine, "rows": rows}
        written = write(record)  # after every case: who stops a long set keeps what it measured
    print(json.dumps(record, indent=1) if args.json else render(rows))
    print(f"wrote {written}.json and .md", file=sys.stderr)
    return 0


def build(cases, cupy):
    """Build cuflash's kernels that the cache lacks, several at once, before the clock starts."""
    plans = {}
    for case in cases:
        # A case that cannot run says why when its turn comes.
        with contextlib.suppress(NotImplementedError, cupy.cuda.memory.OutOfMemoryError):
            plans.update(dict.fromkeys(kernels(case, *arrays(case, cupy))))
    arch = jit.architecture(*divmod(int(cupy.cuda.Device().compute_capability), 10))
    missing = [plan for plan in plans if not jit.is_built(plan, arch)]
    for number, _ in enumerate(prebuild.build_all(missing, arch, config.processors()), 1):
        print(f"\rbuilt {number} of {len(missing)} kernels", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def write(record):
    """The record as JSON and as a table in bench/results/. Returns their path without a suffix."""
    _RESULTS.mkdir(exist_ok=True)
    stem = f"{record['machine']['date'][:19].replace(':', '')}-{record['set']}"
    whole = json.dumps(record, indent=1) + "\n"
    (_RESULTS / f"{stem}.json").write_text(whole, encoding="utf-8")
    (_RESULTS / f"{stem}.md").write_text(render(record["rows"]) + "\n", encoding="utf-8")
    return _RESULTS / stem


def _parser():
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--set", choices=[*SETS, "all"], default="all")
    parser.add_argument(
        "--only",
        default="",
        metavar="REGEX",
        help="cases whose name matches, e.g. 'bfloat16.*d128'",
    )
    text = f"only these of {', '.join(name for name in _names() if name not in OURS)}"
    parser.add_argument("--peers", nargs="+", choices=_names(), metavar="PEER", help=text)
    parser.add_argument(
        "--rounds", type=int, default=5, help="timings a contender; the median counts (5)"
    )
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    return parser


def _names():
    return [*PEERS["gpu"], *(name for name in PEERS["cpu"] if name not in PEERS["gpu"])]


def measure(case, chosen, cupy, rounds):
    """One row: seconds of the contenders that run the case, the reasons of those that do not."""
    inputs = arrays(case, cupy)
    calls, skipped = {}, {}
    for name, prepare in PEERS[case.home].items():
        if chosen and name not in (*chosen, *OURS):
            continue
        try:
            calls[name] = prepare(case, *inputs)
        except (Skip, NotImplementedError) as error:
            skipped[name] = str(error)
        except Exception as error:  # out of memory above all; the run goes on without this one
            skipped[name] = f"{type(error).__name__}: {str(error)[:100]}"
    if case.home == "cpu":
        seconds, extra = cpu_times(calls, rounds), None
    else:
        clock = host_times if case.host else gpu_times
        seconds, extra = clock(calls, cupy, rounds), extra_bytes(calls.get("cuflash"), cupy)
    return {
        "case": case.name,
        "unit": case.unit,
        "flop": case.flop,
        "seconds": seconds,
        "skipped": skipped,
        "extra_bytes": extra,
    }


def extra_bytes(call, cupy):
    """What CuPy's pool grows by during one call, outputs that the call allocates included."""
    if call is None:
        return None
    pool = cupy.get_default_memory_pool()
    cupy.cuda.runtime.deviceSynchronize()
    pool.free_all_blocks()
    before = pool.total_bytes()
    call()
    cupy.cuda.runtime.deviceSynchronize()
    return pool.total_bytes() - before


def render(rows):
    """A Markdown table: every contender's figure, and how many times as fast cuflash is."""
    names = [name for name in _names() if any(name in row["seconds"] for row in rows)]
    ours = [name for name in names if name in OURS]
    others = [name for name in names if name not in OURS]
    head = ["case", "unit", *ours, *others, *(f"/ {name}" for name in others), "extra MiB"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        figures = [_figure(row, row["seconds"].get(name)) for name in names]
        ratios = [_ratio(row["seconds"], name) for name in others]
        extra = "-" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**20:.1f}"
        lines.append([row["case"], row["unit"], *figures, *ratios, extra])
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    legend = (
        "`/ peer`: the peer's time over cuflash's, above 1 when cuflash is faster; in brackets for "
        "deterministic=False. us: host time a call."
    )
    reasons = {(name, reason) for row in rows for name, reason in row["skipped"].items()}
    left_out = "\n".join(f"- {name} left out: {reason}" for name, reason in sorted(reasons))
    return f"{text}\n\n{legend}\n\n{left_out}"


def _ratio(seconds, peer):
    """How many times as fast as ``peer`` the default is, then deterministic=False."""
    if peer not in seconds:
        return "-"
    default, other = (
        f"{seconds[peer] / seconds[name]:.2f}" if name in seconds else "" for name in OURS
    )
    return (default or "-") + (f" ({other})" if other else "")


def _figure(row, seconds):
    if seconds is None:
        return "-"
    if row["unit"] == "us":
        return f"{seconds * 1e6:.1f}"
    return f"{row['flop'] / seconds / {'TFLOP/s': 1e12, 'GFLOP/s': 1e9}[row['unit']]:.3g}"


if __name__ == "__main__":
    sys.exit(main())
