"""Whole jobs, from a program's first line to its last: ours, plain Keras', and elephas' in an environment of its own.

A job is a program in a fresh process (`bench.whole_job`); the figure is jobs an hour of its whole time, so that
imports, session and start count. The note has the accuracy that each had in the end, on rows that it had not seen.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from bench.measure import Case, Factory
from bench.workload import PATIENCE, WORKERS

SECTION = "start"
RULES, EPOCHS = ("downpour", "agn"), {"S": 3, "M": 2}

#: What the peer is measured with, and the interpreter of an environment that has it already; else one is made.
PEER, PEER_PYTHON = ("elephas==7.3.0", "setuptools"), "DISTKERAS_BENCH_ELEPHAS"
_PROGRAM = Path(__file__).with_name("whole_job.py")
_HOUR = 3600.0


def cases(quick: bool) -> list[Factory]:
    """All cases of the section."""
    return [partial(_whole_jobs, ("S",) if quick else ("S", "M"))]


@contextmanager
def _whole_jobs(models: tuple[str, ...]) -> Iterator[list[Case]]:
    with tempfile.TemporaryDirectory(prefix="distkeras-bench-") as name:
        folder = Path(name)
        write_data(folder)
        programs = Programs(folder, {"elephas": peer_python(folder / "elephas")})
        yield [case for model in models for rule in RULES for case in programs.cases(model, EPOCHS[model], rule)]


def write_data(folder: Path) -> None:
    """Fashion-MNIST as float32 in [0, 1]: arrays, and Parquet in as many files as there are workers."""
    from distkeras.data.datasets import fashion_mnist, write_parquet

    for suffix, (x, y) in zip(("", "_test"), fashion_mnist(), strict=True):
        np.save(folder / f"x{suffix}.npy", (x.reshape(len(x), -1) / np.float32(255)).astype(np.float32))
        np.save(folder / f"y{suffix}.npy", y.astype(np.int32))
    write_parquet(folder / "rows", np.load(folder / "x.npy"), np.load(folder / "y.npy"), files=WORKERS)


def peer_python(folder: Path) -> str:
    """The interpreter of an environment with elephas, which is made in ``folder`` if `PEER_PYTHON` names none."""
    if found := os.environ.get(PEER_PYTHON):
        return found
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=PATIENCE)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PEER], check=True, timeout=10 * PATIENCE)
    return python


@dataclass
class Programs:
    """Runs `whole_job` and keeps what each kind of job has said.

    Args:
        folder: of the data.
        pythons: interpreters of the kinds that have another one.
    """

    folder: Path
    pythons: Mapping[str, str]
    said: dict[tuple[str, str, str], list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))

    def run(self, kind: str, model: str, epochs: int, rule: str) -> dict[str, float]:
        """What one job took, in seconds, and its accuracy.

        Raises:
            RuntimeError: it failed; with what it wrote last.
        """
        python = self.pythons.get(kind, sys.executable)
        done = subprocess.run(
            [python, _PROGRAM, kind, self.folder, model, str(epochs), rule],
            env=os.environ | {"PYSPARK_PYTHON": python},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{kind} must end with 0. Received: {done.returncode}\n{done.stderr[-2000:]}")
        took: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        self.said[kind, model, rule].append(took)
        return took

    def cases(self, model: str, epochs: int, rule: str) -> list[Case]:
        """Whole jobs in fresh sessions, and the same once more in one that is warm."""
        job = f"{model}, {epochs} epochs, {rule.upper()}, window 10, batches of 128"

        def rate(kind: str) -> float:
            return _HOUR / self.run(kind, model, epochs, rule)["program"]

        def first_step() -> float:
            return 1 / self.run("warm", model, epochs, rule)["first step"]

        def fresh(kind: str, target: float) -> Case:
            return Case(
                SECTION,
                f"{job}, {'a session' if kind == 'plain' else 'a session of `distkeras.spark`'}",
                "jobs/h",
                partial(rate, kind),
                partial(rate, "keras"),
                partial(rate, "elephas"),
                target_naive=target,
                note=lambda: (
                    f"limit: plain Keras; naive: elephas; {self._medians((kind, 'keras', 'elephas'), model, rule)}"
                ),
            )

        warm = Case(
            SECTION,
            f"first step of {job}, the fifth in a session",
            "1/s",
            first_step,
            lambda: 1.0,
            target_limit=1.0,
            note="limit: a second",
        )
        return [fresh("plain", 1.0), fresh("ready", 1.25), warm]

    def _medians(self, kinds: tuple[str, ...], model: str, rule: str) -> str:
        def median(kind: str, what: str) -> float:
            return statistics.median(took[what] for took in self.said[kind, model, rule])

        accuracies = ", ".join(f"{median(kind, 'accuracy'):.3f}" for kind in kinds)
        calls = ", ".join(f"{median(kind, 'call') / median('keras', 'call'):.1f}" for kind in kinds)
        return f"accuracies (ours, limit, naive) {accuracies}; from the call alone, in times of plain Keras' {calls}"
