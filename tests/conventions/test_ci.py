"""Tests that the checks before a commit are those that CI runs before the long tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pre_commit_runs_what_ci_runs() -> None:
    hooks = re.findall(r"^ +entry: \.venv/bin/(.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    program = (ROOT / "scripts" / "test.sh").read_text()
    checks = re.findall(r'^"\$venv/bin/((?:ruff|mypy).*?)"( [^&]*?)?(?: \.)?(?: &)?$', program, re.MULTILINE)
    assert checks
    assert [f"{name}{options}" for name, options in checks] == [hook for hook in hooks if "pytest" not in hook]
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text()
