"""Tests that every imported library is declared, and that names in the documentation exist."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.present import present
from support.sources import PACKAGE, ROOT, name_of, sources, tree_of

TESTS = ROOT / "tests"
#: Distributions whose module has another name.
MODULES = {
    "mkdocs-material": "material",
    "mlflow-skinny": "mlflow",
    "pillow": "PIL",
    "pytest-xdist": "xdist",
    "scikit-learn": "sklearn",
}
#: Modules that a reader may have: the fuzzer says how to install one, and the benchmark makes an environment for it.
OPTIONAL = {"atheris", "elephas"}


def declared(*extras: str) -> set[str]:
    """Return the top-level modules of the distributions that pyproject.toml names, including those of ``extras``."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules: set[str] = set()
    pending = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    while pending:
        name, _, more = present(re.match(r"([\w.-]+)(\[([\w,]+)\])?", pending.pop())).groups()
        if name == "distkeras":
            pending += [line for extra in more.split(",") for line in project["optional-dependencies"][extra]]
        modules.add(MODULES.get(name, name.replace("-", "_")))
    return modules


def imported(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the top-level names that ``folder`` imports, at any depth of the code, with their places."""
    for path in sources(folder):
        name = name_of(path)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                yield from ((alias.name.split(".")[0], f"{name}:{node.lineno}") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                yield node.module.split(".")[0], f"{name}:{node.lineno}"


@pytest.mark.parametrize(
    ("folders", "extras"),
    [
        (PACKAGE, ("plots", "tls", "jobs", "completion", "mlflow", "jax")),
        (("benchmarks", "docs/docsite", "notebooks", "scripts"), ("tests", "study")),
        (("tests",), ("tests", "openapi")),
    ],
    ids=["package", "scripts", "tests"],
)
def test_every_import_is_declared(folders: tuple[str, ...], extras: tuple[str, ...]) -> None:
    own = {
        path.stem for top in ("benchmarks", "docs", "notebooks", "scripts", "tests") for path in (ROOT / top).iterdir()
    } | {"distkeras"}
    known = set(sys.stdlib_module_names) | own | OPTIONAL | declared(*extras)
    strangers = [f"{where}: {name}" for folder in folders for name, where in imported(folder) if name not in known]
    assert not strangers, "\n".join(strangers)


#: Names between backticks in Markdown: a dotted name of the package, or a path of the repository.
NAME = re.compile(r"`(distkeras(?:\.\w+)+)(?:\(.*?\))?`")
PATH = re.compile(r"`((?:distkeras|ps|transformers|scripts|tests|benchmarks|docs|notebooks)/[\w./-]*)`")


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def exists(name: str) -> bool:
    """Return whether ``name`` is a module, or an attribute of one, at any depth."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:depth]))
        except ModuleNotFoundError:
            continue
        for part in parts[depth:]:
            if not hasattr(found, part):
                return part in getattr(found, "__annotations__", {})
            found = getattr(found, part)
        return True
    return False


@pytest.mark.parametrize(
    "document",
    [path for path in documents() if path.name != "CHANGELOG.md"],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_the_names_in_the_documentation_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    gone = [name for name in NAME.findall(text) if not exists(name)]
    # Tests are also named by paths within their folder.
    gone += [path for path in PATH.findall(text) if not (ROOT / path).exists() and not (TESTS / f"{path}.py").exists()]
    assert not gone, "\n".join(gone)
