from __future__ import annotations

import ast
import importlib
import importlib.util
import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from support.patience import patience

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

#: Bytes of all outputs of one notebook, pictures included: what a reader would load and a repository keep.
LARGEST = 300_000


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs"), f"strip the outputs of {path.name}"
        assert cell.get("execution_count") is None, f"strip the execution counts of {path.name}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_takes_from_the_package_what_is_there(path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.ImportFrom)]
    taken = [(node.module, alias.name) for node in nodes for alias in node.names if "distkeras" in str(node.module)]
    assert taken
    for module, name in taken:
        assert hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=int(patience(240)), kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()  # raises with the cell's traceback
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert len(json.dumps(outputs)) < LARGEST
