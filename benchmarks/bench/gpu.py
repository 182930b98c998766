"""The section "gpu": worker loops, exchanges and jobs on one GPU, in processes, without Spark.

It is measured only on request. It covers the backends that are installed, or the one that ``KERAS_BACKEND`` names.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from bench.gpu_process import (
    EXECUTIONS,
    RULE,
    BackendProcess,
    Workload,
    copy_rate,
    distances,
    fastest_fit,
    initial_weights,
    keras_rate,
    replica_rate,
    train_in_job,
)
from bench.measure import Case, Factory
from distkeras.ps.rules import make
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.results import JobRecords

SECTION = "gpu"
BACKENDS = ("tensorflow", "jax", "torch")
WORKLOADS = (Workload("S", 32, 1000), Workload("M", 128, 500), Workload("C", 128, 500))
WINDOWS = (1, 10, 100)
#: The window of cases that have one only.
WINDOW = 10


def cases(quick: bool) -> list[Factory]:
    """Return all cases of the section."""
    chosen = os.environ.get("KERAS_BACKEND")
    backends = [name for name in BACKENDS if importlib.util.find_spec(name)] if chosen is None else [chosen]
    share = 4 if quick else 1
    workloads = [replace(workload, steps=workload.steps // share) for workload in WORKLOADS]
    return [partial(kind, backend, workloads) for backend in backends for kind in (_steps, _precision, _jobs)]


def card() -> str:
    """Return the name of this machine's first GPU, as its driver has it; empty if there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


@dataclass(frozen=True)
class _Device:
    """The processes of one backend on one card."""

    backend: str
    card: str
    processes: list[BackendProcess]

    @property
    def process(self) -> BackendProcess:
        """The process of cases that need one only."""
        return self.processes[0]

    def case(self, name: str, note: str, **options: object) -> Case:
        """Return a case of steps a second; the card precedes its note."""
        # A mapping of mixed values, each of which is of the type of its field.
        settings = {"section": SECTION, "unit": "steps/s", "limit": None, **options}
        return Case(name=f"{self.backend}, {name}", note=f"{self.card}; {note}", **settings)  # type: ignore[arg-type]  # as above


@contextmanager
def _device(backend: str, processes: int = 1) -> Iterator[_Device]:
    name = card()
    if not name:
        raise RuntimeError("the section `gpu` needs a GPU. Received: none that nvidia-smi lists")
    with ExitStack() as stack:
        yield _Device(backend, name, [stack.enter_context(BackendProcess(backend)) for _ in range(processes)])


def _title(workload: Workload) -> str:
    return f"{workload.model}, batches of {workload.batch}"


@contextmanager
def _steps(backend: str, workloads: list[Workload]) -> Iterator[list[Case]]:
    """Yield the cases of the replica's steps next to ``fit``, and of copies of its weights next to a step."""
    with _device(backend) as device:
        found, call = [], device.process.call
        for workload in workloads:
            choices = EXECUTIONS[workload.model] if backend != "torch" else (1,)
            best = call(fastest_fit, workload, choices)
            ours, plain = call(distances, workload, WINDOW)
            note = (
                f"naive: fit with steps_per_execution={best}, the best of {choices}; after {WINDOW} steps, a weight "
                f"differs from train_on_batch by at most {ours:.2g}, between two train_on_batch by {plain:.2g}"
            )
            for window in WINDOWS:
                rate = partial(call, replica_rate, workload, window)
                rate()
                naive = partial(call, keras_rate, workload, best)
                found.append(device.case(f"{_title(workload)}, windows of {window}", note, ours=rate, naive=naive))
            copies = partial(call, copy_rate, workload, workload.steps // 5)
            steps = partial(call, replica_rate, workload, WINDOW)
            text = "naive: steps/s, so that the ratio is the time of a step over that of the copies"
            title = f"{_title(workload)}, weights to the host and back"
            found.append(device.case(title, text, ours=copies, naive=steps, unit="copies/s"))
        yield found


@contextmanager
def _precision(backend: str, workloads: list[Workload]) -> Iterator[Case]:
    full = workloads[1]
    half = replace(full, policy="mixed_float16")
    with _device(backend) as device:
        ours, naive = (partial(device.process.call, replica_rate, each, WINDOW) for each in (half, full))
        ours(), naive()
        difference, plain = device.process.call(distances, half, WINDOW)
        note = f"naive: float32; the differences as above: {difference:.2g} and {plain:.2g}"
        yield device.case(f"{_title(full)}, mixed_float16", note, ours=ours, naive=naive)


@contextmanager
def _jobs(backend: str, workloads: list[Workload]) -> Iterator[list[Case]]:
    """Yield the cases of jobs with the project's server, of one and of two workers on the GPU."""
    with _device(backend, processes=2) as device:
        found = []
        for workload in workloads:
            for window in WINDOWS if workload is not workloads[-1] else (WINDOW,):
                one, two = (partial(_job, device.processes[:workers], workload, window) for workers in (1, 2))
                two()  # It compiles the steps of both.
                steps = partial(device.process.call, replica_rate, workload, window)
                steps()
                title = f"{_title(workload)}, windows of {window}, a job of"
                text = "limit: the worker's steps without exchanges"
                found.append(device.case(f"{title} one worker", text, ours=one, limit=steps))
                text = "naive: one worker; every mini-batch is counted once"
                found.append(device.case(f"{title} two workers", text, ours=two, naive=one))
        yield found


def _job(processes: list[BackendProcess], workload: Workload, window: int) -> float:
    """Train with a worker in each process; check the records, and return the steps a second of all workers."""
    center = processes[0].call(initial_weights, workload)
    with ServerProcess(ServerSettings(make(RULE, window=window), workers=len(processes))) as server:
        driver = DriverClient(server.address)
        driver.publish(center)
        for number, process in enumerate(processes):
            process.begin(train_in_job, workload, server.address, number, window)
        for process in processes:
            process.result()
        records = JobRecords.drain(driver)
        driver.close()
    records.check_exactly_once(dict.fromkeys(range(len(processes)), workload.steps), epochs=1)
    return _steady_rate(records)


def _steady_rate(records: JobRecords) -> float:
    """Return the steps a second from when each worker has ended a window to when the first one has ended its last."""
    commits = records.commits_array
    stamps = records.steps_array[np.cumsum(commits["steps"]) - 1, 0]
    of_workers = [stamps[commits["worker"] == worker] for worker in np.unique(commits["worker"])]
    begin, end = max(own.min() for own in of_workers), min(own.max() for own in of_workers)
    counted = commits["steps"][(stamps > begin) & (stamps <= end)].sum()
    return float(counted / (end - begin))
