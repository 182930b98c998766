"""Builds of the project from a copy of its sources, and environments to install them into."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from support.patience import patience

ROOT = Path(__file__).parents[2]
PARTS = (
    "LICENSE", "README.md", "benchmarks", "distkeras", "docs", "notebooks", "ps", "pyproject.toml", "scripts",
    "setup.py", "tests", "transformers",
)  # fmt: skip


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command that must succeed; return its output."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=patience(1500),
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def copy_sources(folder: Path) -> Path:
    """Copy the sources, because a build leaves files among them."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".*")
    for part in PARTS:
        path = ROOT / part
        if path.is_dir():
            shutil.copytree(path, folder / part, symlinks=True, ignore=ignored)
        elif path.exists():
            shutil.copy(path, folder / part)
    return folder


def environment_without_it(folder: Path) -> Path:
    """Return the Python of a new environment that has every package of this one except distkeras."""
    home, others = folder / "venv", folder / "others"
    others.mkdir()
    for place in site.getsitepackages():
        for entry in Path(place).iterdir():
            if "distkeras" not in entry.name and entry.suffix != ".pth" and not (others / entry.name).exists():
                (others / entry.name).symlink_to(entry)
    venv.create(home)
    own = sysconfig.get_path("purelib", "venv", {"base": str(home)})
    (Path(own) / "others.pth").write_text(f"{others}\n")
    return home / "bin" / "python"


def install(python: Path, *what: object) -> None:
    """Install packages into the environment of ``python``, from local files only."""
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "--python", python, "install", *quiet, *what, cwd=python.parent, PYTHONPATH="")
