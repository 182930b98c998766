"""Runs the papers' claims again at small scale, in the simulator, and writes a report with pictures.

--quick takes some minutes on two cores; without it, longer runs over more seeds and workers take about five times as
long. The same mode gives the same figures each time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from reproduction.claims import SCALES, Job, Results
from reproduction.daso import CLAIM as DASO
from reproduction.elastic import EFFICIENCY, ELASTIC
from reproduction.momentum import CLAIM as MOMENTUM
from reproduction.ordered import DELAY_COMPENSATION, ORDERED
from reproduction.report import report, verdict
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
)
#: Two processes share two cores, and sums are added up in one order.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
REPORT, RESULTS = "README.md", "results.json"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python scripts/reproduction", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_const", const="quick", dest="mode", help="3 seeds, short runs")
    mode.add_argument(
        "--tiny", action="store_const", const="tiny", dest="mode", help="a smoke test; figures mean nothing"
    )
    names = [claim.name for claim in CLAIMS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CLAIM", help=", ".join(names))
    parser.add_argument("--out", type=Path, default=Path("reproduction"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--redraw", action="store_true", help="run nothing; write the report from DIR's results.json")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.set_defaults(mode="full")
    return parser.parse_args(argv)


def run_all(jobs: dict[str, Job], processes: int) -> dict[str, Any]:
    """Every job's result, in the order of the jobs."""
    started, done = time.monotonic(), {}
    os.environ.update(dict.fromkeys(THREADS, "1"))  # not forked: the processes load numpy after this
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        names: dict[Future[Any], str] = {pool.submit(job): name for name, job in jobs.items()}
        for number, future in enumerate(as_completed(names), 1):
            done[names[future]] = future.result()
            if number % 20 == 0 or number == len(names):
                print(f"{number} of {len(names)} jobs, {time.monotonic() - started:.0f} s", flush=True)
    return {name: done[name] for name in jobs}


def save(results: Mapping[str, Results], path: Path) -> None:
    """One line a claim."""
    lines = [f"{json.dumps(name)}: {json.dumps(value, sort_keys=True)}" for name, value in results.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = arguments(argv)
    scale, out = SCALES[options.mode], options.out
    claims = [claim for claim in CLAIMS if claim.name in options.only]
    out.mkdir(parents=True, exist_ok=True)
    if not options.redraw:
        jobs = {f"{claim.name}:{name}": job for claim in claims for name, job in claim.jobs(scale).items()}
        results: dict[str, dict[str, Any]] = {claim.name: {} for claim in claims}
        for name, value in run_all(jobs, options.processes).items():
            owner, _, job = name.partition(":")
            results[owner][job] = value
        save(results, out / RESULTS)
    # The report is made of what is in the file, so that it can be made again.
    results = json.loads((out / RESULTS).read_text())
    sections = [(claim, claim.section(results[claim.name], scale, out)) for claim in claims]
    mode = "" if scale.name == "full" else f" --{scale.name}"
    chosen = "" if len(claims) == len(CLAIMS) else " --only " + " ".join(claim.name for claim in claims)
    command = f"python scripts/reproduction{mode}{chosen}"
    (out / REPORT).write_text(report(sections, scale, command), encoding="utf-8")
    for claim, section in sections:
        print(f"{claim.name}: {verdict(section)}")
    print(f"report: {out / REPORT}")
    return 0
