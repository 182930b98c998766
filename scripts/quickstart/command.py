"""A tour of distkeras in five acts, each of which prints one line, and a page with their pictures.

Writes to DIR: quickstart.html (the page), dashboard.html (the jobs), summary.json (the figures, and the machine),
pictures (PNG), data/ and scored/ (Parquet), and log.txt, which takes the messages of Spark and TensorFlow. Ends with
status 1 if something is not as promised: if a mini-batch is lost or counted twice, if two workers end more than 3
points below fit, if a table does not travel by rows, if a group has no model, or if a prediction differs.

With --rules, trains Fashion-MNIST under five update rules and with plain Keras instead. Writes to DIR: summary.json,
data/, models/, histories/, commits/, plots/ and log.txt. Ends with status 1 if a rule diverges or, without --quick,
ends more than 3 points below plain Keras.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="quickstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rules", action="store_true", help="compare five update rules with plain Keras instead")
    parser.add_argument("--quick", action="store_true", help="much less work, to see that it runs: figures mean little")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from distkeras.ps.errors import DistkerasError
    from quickstart.machine import log_to

    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        log_to(arguments.out / "log.txt")
        found = _compare(arguments) if arguments.rules else _tour(arguments)
    except (DistkerasError, OSError) as error:
        found = [f"{error}\nSee also {arguments.out / 'log.txt'}"]
    for problem in found:
        print(f"quickstart: {problem}", file=sys.stderr)
    return 1 if found else 0


def _tour(arguments: argparse.Namespace) -> list[str]:
    from quickstart.stage import FULL, QUICK
    from quickstart.tour import tour

    return tour(QUICK if arguments.quick else FULL, arguments.out)


def _compare(arguments: argparse.Namespace) -> list[str]:
    from quickstart.comparison.command import compare
    from quickstart.comparison.runs import FULL, QUICK, TOLERANCE

    size, tolerance = (QUICK, None) if arguments.quick else (FULL, TOLERANCE)
    return compare(size, arguments.out, tolerance=tolerance)
