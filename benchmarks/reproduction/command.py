"""Test the papers' claims at small scale, in the simulator, and write a report with pictures.

The report in DIR shows all claims with figures in DIR. A scale gives the same figures each time. An interrupted run
continues.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reproduction import communication, many_workers, momentum, ordered, slow_worker, throughput, windows
from reproduction.claims import SCALES, Scale
from reproduction.report import FIGURES, Findings, Part, report, verdict
from reproduction.running import run_all

MODULES = (windows, momentum, ordered, throughput, communication, slow_worker, many_workers)
CLAIMS = {module.CLAIM.name: module.CLAIM for module in MODULES}
REPORT = "README.md"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/reproduction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    scales = "report: forty minutes of one core; tiny: a smoke test, its figures mean nothing"
    parser.add_argument("--scale", choices=SCALES, default="report", help=f"{scales} (default: %(default)s)")
    names = list(CLAIMS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CLAIM", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=Path("reproduction"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--redraw", action="store_true", help="run nothing; write the report from DIR's files")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="default: %(default)s")
    return parser.parse_args(argv)


def load(path: Path) -> dict[str, Any]:
    """Return the results in a file; empty if there is none."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def save(results: Mapping[str, Any], path: Path) -> None:
    """Write the results, one line for each claim."""
    lines = [f"{json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in results.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def run(scale: Scale, names: Sequence[str], out: Path, processes: int) -> None:
    """Compute the figures, and write them claim by claim."""
    path, unfinished = out / FIGURES, out / f"{scale.name}.unfinished"
    results = load(path)
    if results.get("scale") != scale.name:
        results = {"scale": scale.name, "seconds": {}}
    for name in names:
        done = run_all(CLAIMS[name].jobs(scale), processes, unfinished)
        results[name] = {job: result for job, (result, _) in done.items()}
        results["seconds"][name] = round(sum(seconds for _, seconds in done.values()))
        save(results, path)
    unfinished.unlink(missing_ok=True)


def findings(names: Sequence[str], out: Path) -> Findings:
    """Return the report's sections from the file of results."""
    results = load(out / FIGURES)
    scale = SCALES[results["scale"]]
    parts = [
        Part(claim, claim.section(results[name], scale, out))
        for name, claim in CLAIMS.items()
        if name in results and name in names
    ]
    return Findings(parts, scale, results["seconds"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    options = arguments(argv)
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    if not options.redraw:
        run(SCALES[options.scale], options.only, out, options.processes)
    found = findings(options.only, out)
    chosen = "" if len(options.only) == len(CLAIMS) else " --only " + " ".join(options.only)
    (out / REPORT).write_text(report(found, chosen), encoding="utf-8")
    for part in found.parts:
        print(f"{part.claim.name}: {verdict(part.section)}")
    print(f"report: {out / REPORT}")
    return 0
