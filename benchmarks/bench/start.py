"""Whole jobs, from a program's first line to its last: ours, plain Keras', and elephas' in a separate environment.

A job is a program in a fresh process (`bench.whole_job`). The figure is jobs an hour, by the time from the call that
trains to its return, in a new session: the start of workers, their imports and all first calls count. The note has the
time of the whole program, with imports and session, and the final accuracy of each on test rows.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.measure import Case, Factory, Run
from bench.processes import PATIENCE
from bench.whole_job import BATCH, EXECUTIONS, WINDOWS, WORKERS

SECTION = "start"
EPOCHS = {"S": 3, "M": 2}
#: The descriptions of the sessions in which jobs run, and the target of the speed, relative to the peer's.
SESSIONS = {"plain": ("a session", 1.0), "ready": ("a session of `distkeras.spark`", 1.25)}

#: The peer's packages, and the variable that names the interpreter of an environment with them; else one is created.
PEER, PEER_PYTHON = ("elephas==7.3.0", "setuptools"), "DISTKERAS_BENCH_ELEPHAS"
_PROGRAM = Path(__file__).with_name("whole_job.py")
_HOUR = 3600.0


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    return [partial(_whole_jobs, ("S",) if quick else ("S", "M"))]


@contextmanager
def _whole_jobs(models: tuple[str, ...]) -> Iterator[list[Case]]:
    with tempfile.TemporaryDirectory(prefix="distkeras-bench-") as name:
        folder = Path(name)
        write_data(folder)
        programs = Programs(folder, {"elephas": peer_python(folder / "elephas")})
        small = ("S", EPOCHS["S"], "downpour")
        found = [case for model in models for rule in WINDOWS for case in programs.jobs(model, EPOCHS[model], rule)]
        found += [programs.long_job(model, 6, "downpour") for model in models if model == "M"]
        found += [
            programs.first_step(f"{_job(*small)}, the fifth in a session", Program("warm", *small), 1.0),
            programs.many_fits(*small),
        ]
        yield found


def write_data(folder: Path) -> None:
    """Write Fashion-MNIST as float32 in [0, 1]: as arrays, and as Parquet with a file for each worker."""
    from distkeras.data.datasets import fashion_mnist, write_parquet

    for suffix, (x, y) in zip(("", "_test"), fashion_mnist(), strict=True):
        np.save(folder / f"x{suffix}.npy", (x.reshape(len(x), -1) / np.float32(255)).astype(np.float32))
        np.save(folder / f"y{suffix}.npy", y.astype(np.int32))
    write_parquet(folder / "rows", np.load(folder / "x.npy"), np.load(folder / "y.npy"), files=WORKERS)


def peer_python(folder: Path) -> str:
    """Return the interpreter of an environment with elephas: `PEER_PYTHON`, or one that is created in ``folder``."""
    if found := os.environ.get(PEER_PYTHON):
        return found
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=PATIENCE)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PEER], check=True, timeout=10 * PATIENCE)
    return python


def run_program(command: Sequence[str | Path], environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Run a program of this folder, and return what it prints as JSON in its last line."""
    env = os.environ | environment
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        raise RuntimeError(f"{command} must end with 0. Received: {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Program(NamedTuple):
    """A whole job: its kind, which is a key of `bench.whole_job.KINDS`, and the model, epochs and rule."""

    kind: str
    model: str
    epochs: int
    rule: str


class Programs:
    """Programs that run in turns, each once in every round, so that they are compared under the same conditions.

    ``pythons`` are the interpreters of kinds that do not use this one.
    """

    def __init__(self, folder: Path, pythons: Mapping[str, str]) -> None:
        self._folder, self._pythons = folder, pythons
        self._rounds: dict[tuple[Program, ...], list[dict[Program, dict[str, float]]]] = defaultdict(list)

    def result(self, together: tuple[Program, ...], program: Program, number: int) -> dict[str, float]:
        """Return the figures of ``program`` in round ``number`` of the programs ``together``."""
        rounds = self._rounds[together]
        while len(rounds) <= number:
            first = len(rounds) % len(together)
            rounds.append({each: self.run(each) for each in together[first:] + together[:first]})
        return rounds[number][program]

    def median(self, together: tuple[Program, ...], program: Program, what: str) -> float:
        """Return the median of a figure over all rounds."""
        return statistics.median(round[program][what] for round in self._rounds[together])

    def run(self, program: Program) -> dict[str, float]:
        """Run a program; return its times in seconds, and its accuracy."""
        python = next((self._pythons[peer] for peer in self._pythons if peer in program.kind), sys.executable)
        kind, *job = map(str, program)
        return run_program([python, _PROGRAM, kind, self._folder, *job], {"PYSPARK_PYTHON": python}, PATIENCE)

    def compared(self, name: str, together: tuple[Program, ...], target: float, kind: str) -> Case:
        """Return the case of jobs of ``kind`` and the peer's, in turns, and of plain Keras' if it is among them."""
        ours, naive = _one(together, kind), _one(together, "elephas")
        limit = _one(together, "keras") if any("keras" in program.kind for program in together) else None
        sides = {"ours": ours, "limit": limit, "naive": naive}
        present = {side: program for side, program in sides.items() if program is not None}

        def rate(program: Program) -> Run:
            numbers = itertools.count()
            return lambda: _HOUR / self.result(together, program, next(numbers))["call"]

        def each(what: str, digits: int, unit: float = 1.0) -> str:
            values = (self.median(together, program, what) / unit for program in present.values())
            return ", ".join(f"{value:.{digits}f}" for value in values)

        def note() -> str:
            text = f"naive: elephas; accuracies ({', '.join(present)}) {each('accuracy', 3)}"
            if limit is None:
                return text
            programs = each("program", 1, self.median(together, limit, "program"))
            best = f"limit: plain Keras with steps_per_execution={EXECUTIONS[together[0].model]}"
            return f"{best}; {text}; whole programs, in times of plain Keras' {programs}"

        rates = (rate(ours), None if limit is None else rate(limit), rate(naive))
        return Case(SECTION, name, "jobs/h", *rates, target_naive=target, note=note)

    def first_step(self, name: str, program: Program, seconds: float) -> Case:
        """Return the case of the time to a first step, with its target."""
        sides = (lambda: 1 / self.run(program)["first step"], lambda: 1 / seconds)
        return Case(SECTION, f"first step of {name}", "1/s", *sides, target_limit=1.0, note=f"limit: {seconds} s")

    def jobs(self, model: str, epochs: int, rule: str) -> list[Case]:
        """Return the cases of jobs in both kinds of sessions, compared with the same runs of the peers."""
        peers = tuple(Program(kind, model, epochs, "") for kind in ("keras", "elephas"))
        together = (*peers, *(Program(kind, model, epochs, rule) for kind in SESSIONS))
        job = _job(model, epochs, rule)
        return [self.compared(f"{job}, {text}", together, target, kind) for kind, (text, target) in SESSIONS.items()]

    def long_job(self, model: str, epochs: int, rule: str) -> Case:
        """Return the case of a long job, in which the start is a smaller part; compared only with the peer."""
        together = Program("elephas", model, epochs, ""), Program("plain", model, epochs, rule)
        return self.compared(f"{_job(model, epochs, rule)}, a session", together, 1 / 0.9, "plain")

    def many_fits(self, model: str, epochs: int, rule: str) -> Case:
        """Return the case of a cross-validation."""
        peers = tuple(Program(f"many of {peer}", model, epochs, "") for peer in ("keras", "elephas"))
        together = (*peers, Program("many", model, epochs, rule))
        return self.compared(f"cross-validation, 12 fits of {_job(model, epochs, rule)}", together, 1.0, "many")


def _one(programs: tuple[Program, ...], kind: str) -> Program:
    (found,) = (program for program in programs if program.kind.rpartition(" ")[2] == kind)
    return found


def _job(model: str, epochs: int, rule: str) -> str:
    return f"{model}, {epochs} epochs, {rule.upper()}, window {WINDOWS[rule]}, batches of {BATCH}"
