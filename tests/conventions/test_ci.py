"""Tests that the checks before a commit are those that CI runs before the long tests, and of the latest subjects."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.patience import patience

ROOT = Path(__file__).parents[2]
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text()


def test_pre_commit_runs_what_ci_runs() -> None:
    hooks = re.findall(r"^ +entry: \.venv/bin/(.*)$", HOOKS, re.MULTILINE)
    program = (ROOT / "scripts" / "test.sh").read_text()
    checks = re.findall(r'^"\$venv/bin/((?:ruff|mypy).*?)"( [^&]*?)?(?: \.)?(?: &)?$', program, re.MULTILINE)
    assert checks
    assert [f"{name}{options}" for name, options in checks] == [hook for hook in hooks if "pytest" not in hook]
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text()


def test_the_subjects_of_the_latest_commits_have_at_most_72_characters() -> None:
    pattern = re.search(r"entry: '(.*)'\n +language: pygrep", HOOKS)
    assert pattern is not None
    long = re.compile(pattern[1])
    assert long.search("a" * 73)
    assert not long.search("a" * 72 + "\n\n" + "b" * 100)
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("these sources have no commits, or nothing reads them")
    command = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT), "log", "--format=%s", "--max-count=20"]
    subjects = subprocess.run(
        command, capture_output=True, text=True, timeout=patience(60), check=True
    ).stdout.splitlines()
    assert [subject for subject in subjects if long.search(subject)] == []
