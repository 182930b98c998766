"""Plants faults in a copy of the sources, one at a time, and runs the tests that are to find them.

    python tests/mutants                    # all, some minutes
    python tests/mutants --only lease       # those with the word in their name or file

A fault that no test finds is a missing test, or no fault: then it says why (`equivalent`). Exit status 1 where one
survives, or does not apply to the sources any more.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from mutants.catalog import MUTANTS
from mutants.mutant import Mutant
from mutants.workspace import PYTEST, Workspace

ROOT = Path(__file__).resolve().parents[2]
#: Verdicts that are as they should be.
GOOD = ("caught", "equivalent")


def main(argv: list[str] | None = None, mutants: Sequence[Mutant] = MUTANTS, command: tuple[str, ...] = PYTEST) -> int:
    """Runs what the command line asks for, with faults and a command for tests; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python tests/mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="faults with TEXT in their name or file")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds for the tests of one")
    options = parser.parse_args(argv)
    chosen = [mutant for mutant in mutants if options.only in f"{mutant.name} {mutant.file}"]
    workspaces: SimpleQueue[Workspace] = SimpleQueue()
    made = [Workspace(ROOT, options.limit, command) for _ in range(options.jobs)]
    for workspace in made:
        workspaces.put(workspace)

    def tried(mutant: Mutant) -> str:
        workspace = workspaces.get()
        try:
            return workspace.verdict(mutant)
        finally:
            workspaces.put(workspace)

    verdicts = Counter[str]()
    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            for mutant, verdict in zip(chosen, pool.map(tried, chosen), strict=True):
                verdicts[verdict] += 1
                sys.stdout.write(f"{verdict:14} {mutant.file}: {mutant.name}\n")
                if verdict not in GOOD:
                    sys.stdout.write(f"{'':14} {mutant.why}\n")
                sys.stdout.flush()
    finally:
        for workspace in made:
            workspace.close()
    sys.stdout.write(", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items())) + "\n")
    return 0 if set(verdicts) <= set(GOOD) else 1
