"""The public names of ``distkeras``."""

from __future__ import annotations

import ast
import pkgutil
import tomllib
from pathlib import Path

import pytest

import distkeras
from distkeras.analysis.keras_gradient import KerasGradient
from distkeras.ps.simulation.simulate import simulate
from distkeras.trainer import Trainer


@pytest.mark.parametrize("name", distkeras.__all__)
def test_every_public_name_loads(name: str) -> None:
    assert getattr(distkeras, name) is not None
    assert name in dir(distkeras)


def test_a_public_name_is_the_object_of_its_module() -> None:
    assert distkeras.Trainer is Trainer
    assert distkeras.simulate is simulate
    assert distkeras.KerasGradient is KerasGradient
    assert distkeras.rules.__name__ == "distkeras.ps.rules"
    assert distkeras.schedules.Constant(0.5)(7) == 0.5


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(distkeras.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    imported = {
        alias.asname: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert {"__version__", *imported} == set(distkeras.__all__)
    for name, (module, attribute) in imported.items():
        assert getattr(distkeras, name) is pkgutil.resolve_name(f"{module}.{attribute}"), name


def test_all_files_have_the_same_version() -> None:
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert distkeras.__version__ == project["version"]
    assert f"## [{distkeras.__version__}] - 20" in (root / "CHANGELOG.md").read_text(encoding="utf-8")
