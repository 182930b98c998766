"""Test the papers' claims at small scale, in the simulator, and write a report with pictures.

There are two sets of criteria: the first ones, and revised ones for claims that the first ones cannot decide. The
report in DIR shows all claims with figures in DIR. A scale gives the same figures each time. An interrupted run
continues.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reproduction.claims import SCALES, Criteria, Scale
from reproduction.cost import measure
from reproduction.daso import CLAIM as DASO
from reproduction.elastic import EFFICIENCY, ELASTIC
from reproduction.momentum import CLAIM as MOMENTUM
from reproduction.ordered import DELAY_COMPENSATION, ORDERED
from reproduction.recent.communication import COMMUNICATION
from reproduction.recent.many_workers import MANY_WORKERS
from reproduction.recent.slow_worker import SLOW_WORKER
from reproduction.report import FILES, Findings, Part, report, verdict
from reproduction.revised import compensation, daso, dynsgd, efficiency, elastic, momentum, ordered, throughput
from reproduction.running import run_all
from reproduction.staleness import CLAIM as STALENESS
from reproduction.throughput import CLAIM as THROUGHPUT
from reproduction.windows import DOWNPOUR_AGN_ADAG, DYNSGD

CLAIMS = (
    STALENESS,
    DOWNPOUR_AGN_ADAG,
    DYNSGD,
    ELASTIC,
    EFFICIENCY,
    MOMENTUM,
    DELAY_COMPENSATION,
    ORDERED,
    THROUGHPUT,
    DASO,
    COMMUNICATION,
    SLOW_WORKER,
    MANY_WORKERS,
)
#: The claims in the order in which they are run: those that the first criteria decide least come first.
REVISED = {
    MOMENTUM.name: momentum.REVISED,
    ORDERED.name: ordered.REVISED,
    DELAY_COMPENSATION.name: compensation.REVISED,
    ELASTIC.name: elastic.REVISED,
    THROUGHPUT.name: throughput.REVISED,
    DASO.name: daso.REVISED,
    EFFICIENCY.name: efficiency.REVISED,
    DYNSGD.name: dynsgd.REVISED,
}
SETS: dict[str, dict[str, Criteria]] = {"first": {claim.name: claim.first for claim in CLAIMS}, "revised": REVISED}
REPORT, COST = "README.md", "cost.json"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/reproduction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    scales = "tiny: a smoke test, its figures mean nothing; quick: minutes; middle: half an hour; full: hours"
    parser.add_argument("--scale", choices=SCALES, default="quick", help=f"{scales} (default: %(default)s)")
    parser.add_argument("--criteria", nargs="+", choices=SETS, default=list(SETS), metavar="SET", help="first, revised")
    names = [claim.name for claim in CLAIMS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CLAIM", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=Path("reproduction"), metavar="DIR", help="default: %(default)s")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--redraw", action="store_true", help="run nothing; write the report from DIR's files")
    what.add_argument("--cost", action="store_true", help="measure on a part how long the first criteria would take")
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


def run(kind: str, scale: Scale, names: Sequence[str], out: Path, processes: int) -> None:
    """Compute the figures of one set of criteria, and write them claim by claim."""
    path, unfinished = out / FILES[kind], out / f"{kind}-{scale.name}.unfinished"
    results = load(path)
    if results.get("scale") != scale.name:
        results = {"scale": scale.name, "seconds": {}}
    for name in (name for name in SETS[kind] if name in names):
        done = run_all(SETS[kind][name].jobs(scale), processes, unfinished)
        results[name] = {job: result for job, (result, _) in done.items()}
        results["seconds"][name] = round(sum(seconds for _, seconds in done.values()))
        save(results, path)
    unfinished.unlink(missing_ok=True)


def findings(names: Sequence[str], out: Path) -> Findings:
    """Return the report's sections from the files of results."""
    files = {kind: load(out / name) for kind, name in FILES.items()}
    sections = {
        kind: {
            name: criteria.section(files[kind][name], SCALES[files[kind]["scale"]], out)
            for name, criteria in SETS[kind].items()
            if name in files[kind] and name in names
        }
        for kind in SETS
    }
    parts = [
        Part(claim, sections["first"].get(claim.name), sections["revised"].get(claim.name), claim.name in REVISED)
        for claim in CLAIMS
        if claim.name in names
    ]
    scales = {kind: SCALES[one["scale"]] for kind, one in files.items() if one}
    seconds = {kind: one["seconds"] for kind, one in files.items() if one.get("seconds")}
    return Findings(parts, scales, seconds, load(out / COST))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    options = arguments(argv)
    scale, out = SCALES[options.scale], options.out
    out.mkdir(parents=True, exist_ok=True)
    if options.cost:
        save(
            measure({claim.name: claim.first.jobs for claim in CLAIMS if claim.name in options.only}, scale), out / COST
        )
    elif not options.redraw:
        for kind in options.criteria:
            run(kind, scale, options.only, out, options.processes)
    all_findings = findings(options.only, out)
    chosen = "" if len(options.only) == len(CLAIMS) else " --only " + " ".join(options.only)
    (out / REPORT).write_text(report(all_findings, chosen), encoding="utf-8")
    for part in all_findings.parts:
        for kind, section in {"first": part.first, "revised": part.revised}.items():
            if section is not None:
                print(f"{part.claim.name}, {kind} criteria: {verdict(section)}")
    print(f"report: {out / REPORT}")
    return 0
