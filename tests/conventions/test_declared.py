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
from support.sources import PACKAGE, ROOT, name_of, nodes_of, sources, tree_of

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
        for node in nodes_of(tree_of(path)):
            if isinstance(node, ast.Import):
                yield from ((alias.name.split(".")[0], f"{name}:{node.lineno}") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                yield node.module.split(".")[0], f"{name}:{node.lineno}"


@pytest.mark.parametrize(
    ("folders", "extras"),
    [
        (PACKAGE, ("plots", "tls", "jobs", "completion", "mlflow", "jax", "torch")),
        (("benchmarks", "docs/docsite", "notebooks", "scripts"), ("tests", "study")),
        (("tests",), ("tests", "openapi", "torch")),
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


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def test_the_lock_has_what_the_tests_need() -> None:
    """Each package has hashes, each pin is in the declared range, and no registry is named."""
    text = (ROOT / "scripts" / "lock-tests.txt").read_text()
    assert "://" not in text
    assert "file:" not in text
    pins = re.findall(r"^([\w.-]+)==([\w.]+)(?: ; .*)? \\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)
    assert len(pins) == len(re.findall(r"^\w", text, re.MULTILINE))
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["tests"]]
    for line in lines:
        name, more, bounds = present(re.match(r"([\w-]+)(?:\[([\w,]+)\])?(.*)", line)).groups()
        if name == "distkeras":
            lines += [line for extra in more.split(",") for line in project["optional-dependencies"][extra]]
            continue
        found = [numbers(version) for pinned, version in pins if pinned == name]
        assert found, f"{name} is not in scripts/lock-tests.txt"
        for kind, bound in re.findall(r"(>=|<)([\d.]+)", bounds):
            assert all((pin >= numbers(bound)) == (kind == ">=") for pin in found), f"{line}: {found} is locked"


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
