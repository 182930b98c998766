from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
from pathlib import Path

import nbformat
import pytest
from docsite.notebooks import SHOWN
from execute_notebooks import DIGEST, NOTEBOOKS, ROOT, digest_of, execute
from support.patience import patience
from support.present import present

#: Bytes of all outputs of one notebook, pictures included, which a reader loads and a repository stores.
LARGEST = 600_000


def test_each_notebook_has_a_page_and_a_link() -> None:
    assert NOTEBOOKS
    assert {path.stem for path in NOTEBOOKS} == set(SHOWN)
    linked = re.findall(r"\]\(notebooks/(\w+)\.ipynb\)", (ROOT / "README.md").read_text())
    assert sorted(linked) == sorted(SHOWN)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """Return what the cells that load and transform data print, which is the same in every run."""
    return [
        output.text
        for cell in code_cells(notebook)
        if "printSchema" in cell.source or ".show(" in cell.source
        for output in cell.outputs
        if output.output_type == "stream"
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_outputs_of_a_notebook_match_its_code(path: Path) -> None:
    """The outputs come from one run of the present code, from the first cell to the last."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    stale = "run `python notebooks/execute_notebooks.py`"
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), stale
    assert notebook.metadata.get(DIGEST) == digest_of(notebook), stale
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    assert printed(notebook)
    assert len(json.dumps(outputs)) < LARGEST


def test_a_digest_depends_on_the_code_alone() -> None:
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    before = digest_of(notebook)
    code_cells(notebook)[0].outputs = []
    notebook.cells[0].source += "?"
    assert digest_of(notebook) == before
    code_cells(notebook)[-1].source += "#"
    assert digest_of(notebook) != before


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_names_that_a_notebook_imports_exist(path: Path) -> None:
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    nodes = [node for cell in cells for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.ImportFrom)]
    imported = [(node.module, alias.name) for node in nodes for alias in node.names if "distkeras" in str(node.module)]
    assert imported
    for module, name in imported:
        assert hasattr(importlib.import_module(present(module)), name) or importlib.util.find_spec(f"{module}.{name}")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    again = execute(path, tmp_path, patience(240))  # A failure raises an error with the cell's traceback.
    assert printed(again) == printed(nbformat.read(path, as_version=4))
    assert not [output for cell in code_cells(again) for output in cell.outputs if output.output_type == "error"]
