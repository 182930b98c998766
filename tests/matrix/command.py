"""Run the core tests with each Python, Spark and Keras backend that `pyproject.toml` names, and print one table.

    python tests/matrix                 # all; the first run installs some GiB for each environment
    python tests/matrix --only jax      # the environments whose name contains "jax"

Interpreters come from the path, or uv fetches them if it is installed; Spark needs Java 17 or newer. Environments
are kept in `.venv-matrix/` for the next run. The status is 1 if a test failed or an environment could not be made.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from matrix.environments import ENVIRONMENTS, ROOT
from matrix.suite import Row, row

HEAD = ("Python", "backend", "PySpark", "Keras", "numpy, pandas, pyarrow", "passed", "failed", "skipped", "seconds")


def main(argv: list[str] | None = None) -> int:
    """Run the environments that the command line selects, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python tests/matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="the environments whose name contains TEXT")
    parser.add_argument("--fresh", action="store_true", help="make environments again, with what is newest today")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-matrix", help="of the environments (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there; those of other names stay")
    options = parser.parse_args(argv)
    chosen = [environment for environment in ENVIRONMENTS if options.only in environment.name]
    if not chosen:
        parser.error(f"--only must be part of one of {[one.name for one in ENVIRONMENTS]}. Received: {options.only}")
    rows = []
    for environment in chosen:
        sys.stderr.write(f"{environment.name}\n")
        folder = options.folder / environment.name
        if options.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        rows.append(row(environment, folder))
        if options.json:
            save(options.json, rows)
    sys.stdout.write(f"{table(rows)}\n")
    for one in rows:
        if one.trouble:
            sys.stderr.write(f"{one.environment}: {one.trouble}\n")
    return 0 if all(one.good for one in rows) else 1


def save(path: Path, rows: Sequence[Row]) -> None:
    """Write ``rows`` as JSON, in the order of `ENVIRONMENTS`, and keep the present rows of other environments."""
    kept = {one.environment: one for one in load(path)} if path.exists() else {}
    kept |= {one.environment: one for one in rows}
    ordered = [asdict(kept[one.name]) for one in ENVIRONMENTS if one.name in kept]
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def load(path: Path) -> list[Row]:
    """Return the rows that `save` wrote."""
    return [Row(**one) for one in json.loads(path.read_text())]


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with one line for each environment."""
    lines = [HEAD, *map(_cells, rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(HEAD))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(texts)


def _cells(row: Row) -> tuple[str, ...]:
    if row.trouble:
        return row.environment, row.backend, *["–"] * (len(HEAD) - 2)
    versions = row.versions or {}
    arrays = " ".join(versions.get(name, "–") for name in ("numpy", "pandas", "pyarrow"))
    return (
        row.python,
        f"{row.backend} {versions.get(row.backend, '')}".strip(),
        versions.get("pyspark", "–"),
        versions.get("keras", versions.get("keras-nightly", "–")),
        arrays,
        *(f"{figure:g}" for figure in (row.passed, row.failed, row.skipped, row.seconds)),
    )
