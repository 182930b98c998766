"""A run of the core tests in one environment, and its counts."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from matrix.environments import ROOT, Environment, Unavailable, make

#: The core: server, data plane, models, jobs, results, transformers, and all kinds of models trained on Spark. It
#: excludes faults, rules on Spark, programs, site and packaging, which are slow and hardly depend on versions.
CORE = (
    "tests/ps",
    "tests/data",
    "tests/keras_model",
    "tests/analysis/test_keras_gradient.py",
    "tests/test_private_keras.py",
    "tests/test_results.py",
    "tests/transformers",
    "tests/training/test_models.py",
    "tests/conventions/test_import.py",
)
#: With the nightly Keras, only what a newer Keras may break first.
NIGHTLY = ("tests/test_private_keras.py",)
#: Warnings of old libraries about new ones; with the newest versions, the whole suite treats them as errors.
FOREIGN = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")
#: Seconds that the tests of an environment may take.
TESTING = 3600
#: Libraries whose versions are recorded in a row.
LIBRARIES = ("pyspark", "keras", "keras-nightly", "tensorflow", "jax", "torch", "numpy", "pandas", "pyarrow")


@dataclass(frozen=True)
class Row:
    """The result of one environment.

    Args:
        environment: name of the environment.
        python: version of the interpreter, with its patch level.
        versions: versions of those `LIBRARIES` that are installed.
        backend: backend of Keras.
        passed, failed, skipped: numbers of tests; an error counts as a failure.
        seconds: duration of the tests, without the installation.
        trouble: reason why there is no result; empty if there is one.
    """

    environment: str
    backend: str
    python: str = ""
    versions: dict[str, str] | None = None
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    trouble: str = ""

    @property
    def good(self) -> bool:
        """Return whether tests were run and all passed."""
        return not self.trouble and self.failed == 0 and self.passed > 0


def row(environment: Environment, folder: Path) -> Row:
    """Make ``environment`` in ``folder`` and run its tests there; their output goes to standard output."""
    try:
        python = make(environment, folder)
    except Unavailable as error:
        return Row(environment.name, environment.backend, trouble=str(error))
    return tested(environment, python, NIGHTLY if environment.nightly else CORE)


def tested(environment: Environment, python: Path, core: Sequence[str]) -> Row:
    """Run the tests ``core`` with the interpreter ``python``, and return the counts."""
    versions = _versions(python)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="distkeras-matrix-") as directory:
        report = Path(directory) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"]
        command += [*(f"-Wignore::{kind}" for kind in FOREIGN), *core]
        try:
            done = subprocess.run(command, cwd=ROOT, env=_environ(environment), timeout=TESTING, check=False)
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = -1
        passed, failed, skipped = _counts(report)
    return Row(
        environment.name,
        environment.backend,
        versions.pop("python"),
        versions,
        passed,
        failed,
        skipped,
        round(time.monotonic() - began),
        "" if status == 0 or failed else f"pytest ended with status {status}",
    )


def _environ(environment: Environment) -> dict[str, str]:
    """Return an environment in which a process imports the installed package, in every folder."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return inherited | {"KERAS_BACKEND": environment.backend, "PYTHONSAFEPATH": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}


def _counts(report: Path) -> tuple[int, int, int]:
    if not report.exists():
        return 0, 0, 0
    suite = next(ElementTree.parse(report).iter("testsuite"))
    count, failures, errors, skipped = (int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped"))
    return count - failures - errors - skipped, failures + errors, skipped


def _versions(python: Path) -> dict[str, str]:
    program = (
        "import importlib.metadata as m, json, platform, sys\n"
        "there = {d.name.lower(): d.version for d in m.distributions()}\n"
        "found = {name: there[name] for name in sys.argv[1:] if name in there}\n"
        "print(json.dumps({'python': platform.python_version(), **found}))"
    )
    done = subprocess.run([python, "-c", program, *LIBRARIES], capture_output=True, text=True, timeout=60, check=True)
    versions: dict[str, str] = json.loads(done.stdout)
    return versions
