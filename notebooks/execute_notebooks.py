"""Executes the notebooks and keeps their outputs in them, with a digest of the code that made them."""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

#: Of a notebook's metadata: the digest of the code that its outputs are of.
DIGEST = "executed_sources"


def digest_of(notebook: nbformat.NotebookNode) -> str:
    """SHA-256 of the sources of the code cells, in their order."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(sources).encode()).hexdigest()


def execute(path: Path, folder: Path, timeout: float) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in ``folder``; what the cells wrote to stderr is left out.

    Args:
        path: of the notebook.
        folder: where its kernel runs.
        timeout: of one cell, and of the kernel's start, in seconds.

    Raises:
        CellExecutionError: a cell failed, with its traceback.
    """
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]  # it has no types
    resources = {"metadata": {"path": folder}}
    client = NotebookClient(
        notebook, timeout=int(timeout), startup_timeout=int(timeout), kernel_name="python3", resources=resources
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when each began and ended
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}  # without the version of this Python
    notebook.metadata[DIGEST] = digest_of(notebook)
    return notebook


def main(argv: list[str] | None = None) -> int:
    """Executes what the command line names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="execute_notebooks.py", description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=NOTEBOOKS, metavar="PATH", help="default: all")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of a cell; default: 600")
    options = parser.parse_args(argv)
    for path in options.paths:
        with tempfile.TemporaryDirectory(prefix="distkeras-notebook-") as folder:
            notebook = execute(path, Path(folder), options.timeout)
        nbformat.write(notebook, path)  # type: ignore[no-untyped-call]  # it has no types
        sys.stderr.write(f"executed {path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
