"""Goodput: the share of throughput that remains while workers and servers are killed, suspended and disconnected.

Ours trains M with two workers, AGN and a checkpoint; the reference is the same job without faults. Plain Keras trains M
in one process that restarts from its last checkpoint. Each figure is one run of some minutes (`goodput_job`): faults
are rare events, and short rounds would contain none.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from bench.measure import Case, Factory
from bench.start import run_program, write_data

SECTION = "goodput"
#: Faults an hour and group of workers.
RATES = (60, 125)
SECONDS, QUICK_SECONDS = 240, 45
#: Published shares: 82 % at a failure a minute (torchft), 85 to 88 % at 69 to 85 an hour; samples were not counted.
TARGET = 0.85
_PROGRAM = Path(__file__).with_name("goodput_job.py")
_SEED = 1
#: The PYTHONPATH of the separate program, which imports `bench`, and the project if it is not installed.
_PATHS = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(_goodput, QUICK_SECONDS if quick else SECONDS)]


@contextmanager
def _goodput(seconds: int) -> Iterator[list[Case]]:
    with tempfile.TemporaryDirectory(prefix="distkeras-bench-") as name:
        write_data(Path(name))

        @cache
        def result(kind: str, faults: int) -> dict[str, Any]:
            return run(kind, Path(name), seconds, faults)

        def rate(kind: str, faults: int) -> float:
            return float(result(kind, faults)["rate"])

        case = partial(Case, SECTION, unit="samples/s", limit=partial(rate, "ours", 0), target_limit=TARGET, once=True)
        setting = "M, 2 workers, AGN, window 3, batches of 128"
        yield [
            case(
                name=f"{faults} faults an hour, {setting}",
                ours=partial(rate, "ours", faults),
                note=partial(_note, result, faults),
            )
            for faults in RATES
        ]


def _note(result: Any, faults: int) -> str:
    ours, keras = result("ours", faults), result("keras", faults)
    share = keras["rate"] / result("keras", 0)["rate"]
    return (
        f"limit: the same job undisturbed; {ours['struck']} faults struck, mini-batches lost {ours['lost']}, "
        f"doubled {ours['doubled']}; from a kill to the successor's first step {ours['successor median']:.1f} s "
        f"(at most {ours['successor max']:.1f} s); plain Keras with a checkpoint every 200 steps keeps {share:.2f}, "
        f"trains {keras['again']} samples again, {keras['struck']} kills, {keras['torn']} of them tear its checkpoint, "
        f"{keras['successor median']:.1f} s (at most {keras['successor max']:.1f} s)"
    )


def run(kind: str, folder: Path, seconds: float, faults: int) -> dict[str, Any]:
    """Run one training under faults, and return its figures."""
    command: list[str | Path] = [sys.executable, _PROGRAM, kind, folder, str(seconds), str(faults), str(_SEED)]
    environment = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(_PATHS)}
    results = run_program(command, environment, seconds + 600)
    if results.get("lost") or results.get("doubled"):
        raise RuntimeError(f"every mini-batch must count once. Received: {results}")
    return results
