"""Measure workers, windows and learning rates in the simulator, and draw the figures of the page "Tuning"."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from reproduction.running import run_all

from tuning import cases, figures

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "tuning"
RESULTS = "results.json"


def measure(chosen: Sequence[cases.Case], processes: int, folder: Path) -> dict[str, dict[str, float]]:
    """Run ``chosen`` and return each result by the name of its case; an interrupted run continues."""
    unfinished = folder / "unfinished"
    done = run_all({case.name: partial(cases.run, case) for case in chosen}, processes, unfinished)
    unfinished.unlink()
    return {name: result for name, (result, _) in done.items()}


def save(results: dict[str, dict[str, float]], path: Path) -> None:
    """Write one line for each run."""
    lines = [f"{json.dumps(name)}: {json.dumps(result)}" for name, result in results.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line requests, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python benchmarks/tuning", description=__doc__)
    parser.add_argument("--redraw", action="store_true", help="only draw the figures again, from the kept results")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="default: docs/tuning")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="default: %(default)s")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / RESULTS
    if not options.redraw:
        chosen = [*cases.of_workers(), *cases.of_windows()]
        save(measure(list(dict.fromkeys(chosen)), options.processes, options.out), path)
    for draw in figures.FIGURES:
        print(draw(json.loads(path.read_text()), options.out))
    return 0
