"""`python -m bench.plot RESULT.json [-o PICTURE.svg]`: speed against sequence length."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from .peers import OURS

_NAME = re.compile(r"(\w+) (\w+) b\d+ h\d+ n(\d+) d(\d+) (\w+)")


def panels(rows):
    """{(way, dtype, head dim, mask): {contender: [(seqlen, speed), ...]}}, host cases left out."""
    found = {}
    for row in rows:
        if row["unit"] == "us":
            continue
        way, dtype, seqlen, head_dim, mask = _NAME.fullmatch(row["case"]).groups()
        lines = found.setdefault((way, dtype, int(head_dim), mask), {})
        for name, seconds in row["seconds"].items():
            factor = 1e12 if row["unit"] == "TFLOP/s" else 1e9
            lines.setdefault(name, []).append((int(seqlen), row["flop"] / seconds / factor))
    for lines in found.values():
        for points in lines.values():
            points.sort()
    return found


def draw(record, path):
    """One small plot a panel, cuflash's lines thick."""
    from matplotlib.figure import Figure

    found = panels(record["rows"])
    columns = min(4, len(found))
    lines = -(-len(found) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.8 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for axis, (key, contenders) in zip(axes, found.items()):
        for name, points in contenders.items():
            width = 2.5 if name in OURS else 1.0
            axis.plot(*zip(*points), marker="o", markersize=3, linewidth=width, label=name)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title("{} {} d{} {}".format(*key), fontsize=9)
    for axis in list(axes)[: lines * columns - len(found)]:
        axis.set_axis_off()
    unit = next(row["unit"] for row in record["rows"] if row["unit"] != "us")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    device = record["machine"].get("device", record["machine"]["system"])
    figure.suptitle(f"{device}: {unit} against sequence length", fontsize=10)
    figure.savefig(path)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="(beside the result, .svg)")
    args = parser.parse_args(argv)
    record = json.loads(args.result.read_text(encoding="utf-8"))
    if not panels(record["rows"]):
        parser.error(f"{args.result}: it has no speeds, only host times")
    draw(record, args.output or args.result.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
