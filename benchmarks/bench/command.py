"""Compare the project with the limits of this machine, and with the plain way to do the same.

Only ratios are reported: absolute figures drift from run to run on a shared machine. The full run takes some tens of
minutes; nothing else should run at the same time.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.measure import QUICK_ROUNDS, ROUNDS, Row, measured
from bench.report import describe, load, machine, regressions, save, table

SECTIONS = (
    "ps",
    "step",
    "data",
    "predict",
    "groups",
    "train",
    "tables",
    "lengths",
    "lending",
    "start",
    "goodput",
    "link",
    "shards",
)
#: Sections that are measured only if they are named.
ON_REQUEST = ("gpu",)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sections, default = SECTIONS + ON_REQUEST, f"default: all but {', '.join(ON_REQUEST)}"
    parser.add_argument("--section", choices=sections, nargs="+", default=SECTIONS, help=default)
    parser.add_argument("--only", metavar="TEXT", default="", help="measure the cases whose name contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows and the machine there")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} short rounds instead of {ROUNDS}")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="list what became worse since; exit 1 if anything")
    parser.add_argument("--table", type=Path, metavar="JSON", help="run nothing; print the table of an earlier --json")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> Iterator[Row]:
    """Measure the cases that ``options`` select; report the progress on standard error."""
    for name in options.section:
        section = importlib.import_module(f"bench.{name}")
        for row in measured(section.cases(options.quick), QUICK_ROUNDS if options.quick else ROUNDS, options.only):
            sys.stderr.write(f"{row.section}: {row.case}\n")
            yield row


def main(argv: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    options = arguments(argv)
    if options.table:
        there, measured_rows = load(options.table)
        sys.stdout.write(f"{describe(there)}\n\n{table(measured_rows)}\n")
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    here = machine()
    rows: list[Row] = []
    for row in run(options):
        rows.append(replace(row, processor=here["cpu"]))
        if options.json:
            # The file is saved after each row, so that an interrupted run keeps its results.
            save(options.json, here, rows)
    sys.stdout.write(f"{describe(here)}\n\n{table(rows)}\n")
    if not options.compare:
        return 0
    worse = regressions(load(options.compare)[1], rows)
    sys.stdout.write("\n".join(["", "worse than before:" if worse else "nothing is worse than before", *worse]) + "\n")
    return 1 if worse else 0
