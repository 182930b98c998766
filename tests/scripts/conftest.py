"""Puts the folder of the benchmarks on the path, as running one of them does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="session")
def train() -> ModuleType:
    import distkeras.commands.train

    return distkeras.commands.train
