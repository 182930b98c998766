"""Environments: combinations of interpreters, libraries and backends, and how they are installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Seconds that an installation may take.
INSTALLING = 3600


@dataclass(frozen=True)
class Environment:
    """One row of the matrix.

    Args:
        python: version of the interpreter, such as "3.11".
        backend: backend of Keras.
        oldest: whether each library has the lowest version that `pyproject.toml` allows, instead of the newest.
        pins: requirements in addition to those of `pyproject.toml`.
        nightly: whether Keras is its latest nightly build, which may be newer than any release.
    """

    python: str
    backend: str
    oldest: bool = False
    pins: tuple[str, ...] = ()
    nightly: bool = False

    @property
    def name(self) -> str:
        """Return a unique name that is valid for a folder."""
        libraries = "oldest" if self.oldest else "nightly" if self.nightly else "newest"
        return "-".join((self.python, self.backend, libraries, *(re.sub("==|[.][*]", "", pin) for pin in self.pins)))


#: Each Python, each backend, and the oldest and newest Spark occur at least once; one row has the oldest of
#: everything, and one the nightly Keras. Other libraries are the newest of the day. To declare a row for another
#: version of a library, add `Environment("3.13", "tensorflow", pins=("pandas==2.*",))`; for another Python, name it
#: here and in the classifiers of `pyproject.toml`. Then run it with `--only`; `--json` keeps its figures.
ENVIRONMENTS = (
    Environment("3.11", "tensorflow", oldest=True),
    Environment("3.11", "torch"),
    Environment("3.12", "jax", pins=("pyspark==4.0.*",)),
    Environment("3.13", "tensorflow"),
    Environment("3.13", "tensorflow", nightly=True),
)


class Unavailable(Exception):
    """The error that an environment cannot be made on this machine, and why."""


def metadata() -> dict[str, Any]:
    """Return the table `project` of `pyproject.toml`."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def lowest(requirements: Iterable[str]) -> list[str]:
    """Return requirements that pin each of ``requirements`` to its lowest version.

    Raises:
        ValueError: If a requirement has no lowest version.
    """
    pins = []
    for requirement in requirements:
        match = re.match(r"([\w.-]+)>=([\w.]+)", requirement)
        if match is None:
            raise ValueError(f"a requirement must have a lowest version. Received: {requirement!r}")
        pins.append(f"{match[1]}=={match[2]}")
    return pins


def make(environment: Environment, folder: Path) -> Path:
    """Install this package, the backend and the tests' libraries into ``folder``, and return its interpreter.

    Libraries that are in ``folder`` already are kept if their versions match.

    Raises:
        Unavailable: If there is no such interpreter, or an installation fails.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        _run(_maker(environment.python, folder))
    project = metadata()
    extras = project["optional-dependencies"]
    pins = list(environment.pins)
    if environment.oldest:
        of_backend = extras.get(environment.backend, ())
        pins += lowest([*project["dependencies"], *extras["plots"], *extras["tls"], *of_backend])
    chosen = ",".join(sorted({"plots", "tests", environment.backend} & set(extras)))
    # Otherwise, setuptools would pack modules that were deleted since.
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    pip = (str(python), "-m", "pip", "--quiet", "--disable-pip-version-check")
    _run([*pip, "install", f"{ROOT}[{chosen}]", *pins])
    if environment.nightly:  # both distributions have the folder `keras`
        _run([*pip, "uninstall", "--yes", "keras"])
        _run([*pip, "install", "--pre", "--force-reinstall", "--no-deps", "keras-nightly"])
    return python


def _maker(version: str, folder: Path) -> list[str]:
    """Return the command that makes a virtual environment: uv, which fetches interpreters, or a Python on the path."""
    if shutil.which("uv"):
        return ["uv", "venv", "--quiet", "--seed", "--python", version, str(folder)]
    for name in (f"python{version}", "python3", sys.executable):
        if _is_python(name, version):
            return [name, "-m", "venv", str(folder)]
    raise Unavailable(f"Python {version} must be on the path, or uv, which fetches it")


def _is_python(program: str, version: str) -> bool:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([program, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return False
    return done.stdout.strip() == version


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALLING,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"`{' '.join(command)}` took longer than {INSTALLING} s") from None
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}` failed:\n{done.stdout}")
