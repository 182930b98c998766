"""Tests of the modules that an import loads, each in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import patience
from support.programs import output_of

ROOT = Path(__file__).parents[2]
HEAVY = ("pyspark", "keras", "tensorflow", "jax", "torch", "pandas", "pyarrow", "matplotlib")


def loaded(statement: str) -> set[str]:
    """Return those modules of `HEAVY` that are loaded after ``statement``."""
    code = f"import json, sys\n{statement}\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    return set(json.loads(output_of("-c", code)))


@pytest.mark.parametrize(
    "statement",
    [
        "import distkeras",
        "import distkeras; dir(distkeras); distkeras.__version__",
        "import distkeras.ps",
        "import distkeras.ps.server.server, distkeras.ps.transport.worker_client, distkeras.ps.__main__",
        "from distkeras.ps import rules; rules.all_rules()",
    ],
)
def test_the_parameter_server_needs_neither_spark_nor_keras(statement: str) -> None:
    assert loaded(statement) == set()


def test_a_task_loads_keras_only_after_its_backend_is_chosen() -> None:
    found = loaded("import distkeras.training.task, distkeras.keras_model.recipe, distkeras.data.source")
    assert not found & {"keras", "tensorflow", "jax", "torch"}


def test_transformers_load_spark_and_no_keras() -> None:
    found = loaded("import distkeras.transformers")
    assert "pyspark" in found
    assert not found & {"keras", "tensorflow", "jax", "torch"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    import distkeras

    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = distkeras.Nothing
    assert set(dir(distkeras)) == set(distkeras.__all__)


@pytest.mark.parametrize("name", ["ps", "transformers"])
def test_the_mounted_folders_do_not_import_under_their_bare_names(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {name}"],
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 1
    assert f"this folder imports as 'distkeras.{name}'. Received: import of '{name}'" in done.stderr
