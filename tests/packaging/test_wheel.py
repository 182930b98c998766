"""Tests of the contents of the wheel."""

from __future__ import annotations

import importlib.metadata
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_contains_all_modules(names: list[str]) -> None:
    for target in ("distkeras", "distkeras/ps", "distkeras/transformers"):
        folder = ROOT / target.removeprefix("distkeras/")
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).parts
            if target == "distkeras" and parts[0] in ("ps", "transformers"):
                continue  # These are the links of a checkout.
            assert "/".join([target, *parts]) in names
    assert "distkeras/ps/rules/gradient.py" in names
    assert "distkeras/py.typed" in names


def test_the_wheel_contains_the_page_s_files(names: list[str]) -> None:
    static = ROOT / "distkeras" / "dashboard" / "static"
    wanted = {f"distkeras/dashboard/static/{path.name}" for path in static.iterdir()}
    assert wanted <= set(names)
    assert "distkeras/dashboard/static/uPlot.LICENSE" in wanted


def test_the_wheel_contains_the_license(names: list[str]) -> None:
    assert [name for name in names if name.endswith("LICENSE")]


def test_the_wheel_contains_nothing_else(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    assert tops == {"distkeras", next(name for name in tops if name.endswith(".dist-info"))}
    assert len(names) == len(set(names))
    assert not [name for name in names if "test" in name or "__pycache__" in name or name.endswith(".pyc")]


def test_the_wheel_has_complete_metadata(wheel: Path) -> None:
    (found,) = importlib.metadata.distributions(path=[str(wheel)])
    assert found.metadata["Name"] == "distkeras"
    assert found.metadata["License-Expression"] == "Apache-2.0"
    required = " ".join(found.requires or ())
    for name in ("keras", "numpy", "pyarrow", "pyspark"):
        assert name in required
