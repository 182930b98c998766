"""A copy of the repository in which faults are planted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from mutants.catalog import Mutant

#: The folders and files that tests without Spark read.
_FOLDERS = ("benchmarks", "distkeras", "docs", "notebooks", "ps", "scripts", "tests", "transformers")
_FILES = ("pyproject.toml", "setup.py", "README.md")
#: Arguments of Python, before the tests of a fault.
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=thorough")
#: Arguments after tests one of which the catalog names by itself: it may be slow.
SLOW_TOO = ("-m", "")


class Workspace:
    """Runs tests against one planted fault at a time.

    Args:
        root: folder of the repository, which is not changed.
        limit: seconds that the tests of one fault may take; a fault that makes them hang counts as found.
        command: arguments of Python that run tests.
    """

    def __init__(self, root: Path, limit: float, command: tuple[str, ...] = PYTEST) -> None:
        self._limit = limit
        self._command = command
        self._folder = tempfile.TemporaryDirectory(prefix="distkeras-mutants-")
        self._copy = Path(self._folder.name)
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
        for name in _FOLDERS:
            shutil.copytree(root / name, self._copy / name, symlinks=True, ignore=ignored)
        for name in _FILES:
            shutil.copy(root / name, self._copy / name)
        #: Whether a fault's tests pass without it.
        self._sound: dict[tuple[str, ...], bool] = {}

    def close(self) -> None:
        """Remove the copy."""
        self._folder.cleanup()

    def verdict(self, mutant: Mutant) -> str:
        """Return the verdict on a planted fault; "tests fail" if its tests fail without it, too."""
        try:
            text = mutant.applied(self._copy)
        except ValueError:
            return "does not apply"
        if mutant.tests not in self._sound:
            self._sound[mutant.tests] = self._tests_pass(mutant.tests)
        if not self._sound[mutant.tests]:
            return "tests fail"
        path = self._copy / mutant.file
        before = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        try:
            survived = self._tests_pass(mutant.tests)
        finally:
            path.write_text(before, encoding="utf-8")
        if survived:
            return "equivalent" if mutant.equivalent else "survived"
        return "not equivalent" if mutant.equivalent else "caught"

    def _tests_pass(self, tests: tuple[str, ...]) -> bool:
        # Without compiled files: Python would use the old one for a source of equal length, changed in the same second.
        environment = os.environ | {
            "PYTHONPATH": str(self._copy),
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        process = subprocess.Popen(
            [sys.executable, *self._command, *tests, *(SLOW_TOO if any("::" in test for test in tests) else ())],
            cwd=self._copy,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(self._limit) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
