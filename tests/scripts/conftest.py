"""Fixtures of the scripts; the folder of the benchmarks is put on the path, as when one of them is run."""

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
