"""Fixtures of the distributions that the tests install."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest
from support.installing import copy_sources, run


def has_modern_setuptools() -> bool:
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def distributions(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the sdist and with the wheel that was built from it."""
    out = tmp_path_factory.mktemp("distributions")
    # Without isolation, nothing is downloaded; an older setuptools cannot read the license field.
    isolation = ["--no-isolation"] if has_modern_setuptools() else []
    run(sys.executable, "-m", "build", *isolation, "--outdir", out, sources, cwd=out)
    return out


@pytest.fixture(scope="session")
def wheel(distributions: Path) -> Path:
    (built,) = distributions.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def sdist(distributions: Path) -> Path:
    (built,) = distributions.glob("*.tar.gz")
    return built
