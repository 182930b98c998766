"""Type checkers know the keywords and attributes of estimator, model and trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import patience

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("users_program.py")


@pytest.mark.slow
def test_pyright_finds_the_errors_that_mypy_finds(tmp_path: Path) -> None:
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard", "enableTypeIgnoreComments": False}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"include": [str(PROGRAM)], **settings}))
    command = ["basedpyright", "--project", str(tmp_path), "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=patience(120))
    found = [report["range"]["start"]["line"] for report in json.loads(done.stdout)["generalDiagnostics"]]
    lines = PROGRAM.read_text().splitlines()
    assert found == [number for number, line in enumerate(lines) if "# type: ignore" in line]
