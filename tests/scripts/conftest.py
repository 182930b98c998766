"""The scripts, as modules: they are no package, and are run by their path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def quickstart() -> ModuleType:
    return _module("quickstart")


@pytest.fixture(scope="session")
def train() -> ModuleType:
    return _module("train")


@pytest.fixture(scope="session")
def reproduce() -> ModuleType:
    sys.path.append(str(SCRIPTS))  # as a script's own folder is on its path: `reproduction` lies beside it
    return _module("reproduce")


@pytest.fixture(scope="session")
def bench() -> ModuleType:
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))  # the package of the same name lies beside the script
    return _module("bench")


@pytest.fixture(scope="session")
def fuzz() -> ModuleType:
    return _module("fuzz")


@pytest.fixture(scope="session")
def chaos() -> ModuleType:
    if str(SCRIPTS) not in sys.path:
        sys.path.append(str(SCRIPTS))
    return _module("chaos")
