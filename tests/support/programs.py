"""Programs of the tests, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.patience import patience

TESTS = Path(__file__).parents[1]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a program that may import `support`, and whose Spark tasks run on this Python."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYSPARK_PYTHON": sys.executable} | more


def output_of(*arguments: object, seconds: float = 60, cwd: Path | None = None, **more: str) -> str:
    """Run Python with these arguments, which must succeed; return its output.

    Args:
        seconds: its limit on the reference machine.
        more: variables of the environment.
    """
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, env=environment(**more), cwd=cwd, capture_output=True, text=True, timeout=patience(seconds)
    )
    assert done.returncode == 0, without_frames_of_java(done.stderr)
    return done.stdout


def spark_submit(folder: Path, script: Path, *arguments: str, conf: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script by spark-submit in ``folder``, on two local workers."""
    import pyspark

    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    options = ["--master", "local[2,4]", "--conf", "spark.ui.enabled=false", *(("--conf", conf) if conf else ())]
    return subprocess.run(
        [submit, *options, script, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=patience(240),
    )


def without_frames_of_java(text: str) -> str:
    """Return the end of what a program with a Java virtual machine has printed."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*at |\d\d/.* (WARN|ERROR) ", line)]
    return "\n".join(lines[-80:])
