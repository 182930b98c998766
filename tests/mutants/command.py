"""Plant faults in a copy of the sources, one at a time, and run the tests that should find them.

    python tests/mutants                    # all, some minutes
    python tests/mutants --only lease       # those with this word in their name or file

A fault that no test finds shows that a test is missing, or that it changes no behavior; then its `equivalent` says why.
The exit status is 1 if a fault survives, or no longer applies to the sources.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from mutants.catalog import MUTANTS, Mutant
from mutants.workspace import PYTEST, Workspace

ROOT = Path(__file__).resolve().parents[2]
#: The expected verdicts.
GOOD = ("caught", "equivalent")


def main(argv: list[str] | None = None, mutants: Sequence[Mutant] = MUTANTS, command: tuple[str, ...] = PYTEST) -> int:
    """Run the tests for the chosen ``mutants`` with ``command``; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python tests/mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="faults with TEXT in their name or file")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300.0, metavar="S", help="seconds for the tests of one fault")
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
