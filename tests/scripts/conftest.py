"""Puts the scripts' folder on the path, as running one of them does: each is a package there, or a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

sys.path += [str(SCRIPTS), str(SCRIPTS.parent / "benchmarks")]


@pytest.fixture(scope="session")
def train() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scripts_train", SCRIPTS / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
