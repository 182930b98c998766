"""One training under faults: ``python goodput_job.py KIND FOLDER SECONDS FAULTS_AN_HOUR SEED``; prints JSON.

KIND is "ours" or "keras". FOLDER has the data from `bench.start.write_data`. Faults are a Poisson process, whose times
and kinds depend on the seed; both kinds of training have the same times. SECONDS count from the first step.

* ours: two workers and the server's process, with a checkpoint. Of ten faults, five kill a Python worker (SIGKILL), two
  suspend one for `SUSPENDED` seconds, two close a worker's connection to the server, one kills the server.
* keras: ``keras.Model.fit`` in one process, which every fault kills and a supervisor restarts. It continues from its
  last checkpoint, which `keras.callbacks.BackupAndRestore` writes every `SAVED_STEPS` steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.whole_job import BATCH, RATES, SESSION, WINDOWS, WORKERS, arrays, build, python_workers, settings

MODEL, RULE = "M", "agn"
#: Seconds for which a worker is suspended: longer than its lease.
SUSPENDED = 15.0
#: Steps between two checkpoints of plain Keras: some ten seconds.
SAVED_STEPS = 200
#: Attempts that Spark makes of a task: every fault may take one.
ATTEMPTS = 10_000
KINDS = ["kill"] * 5 + ["suspend"] * 2 + ["cut off"] * 2 + ["kill server"]
_FOREVER = 1_000_000


def faults(seconds: float, an_hour: float, seed: int) -> Iterator[tuple[float, str]]:
    """Yield the time of each fault, in seconds from the first step, and its kind."""
    draw, now = random.Random(seed), 0.0
    while an_hour > 0 and (now := now + draw.expovariate(an_hour / 3600)) < seconds:
        yield now, draw.choice(KINDS)


def ours(folder: Path, seconds: float, planned: list[tuple[float, str]], seed: int) -> dict[str, Any]:
    """Train under faults until the time is over; return the figures."""
    from distkeras import Callback, Checkpoint, Trainer, rules
    from distkeras.spark import session

    rows = session(f"local[{WORKERS},{ATTEMPTS}]", config=SESSION).read.parquet(str(folder / "rows"))
    began, struck = threading.Event(), []

    class Begin(Callback):
        def on_center(self, context: Any) -> None:
            if not began.is_set():
                began.set()
            elif time.time() - started[0] >= seconds:
                context.stop("the time is spent")

    started: list[float] = []

    def strike() -> None:
        began.wait()
        started.append(time.time())
        draw = random.Random(seed)
        for when, kind in planned:
            time.sleep(max(0.0, started[0] + when - time.time()))
            if inject(kind, draw):
                struck.append((time.time(), kind))

    threading.Thread(target=strike, daemon=True).start()
    with tempfile.TemporaryDirectory() as saved:
        trainer = Trainer(build(MODEL, RATES[RULE]), rules.make(RULE, window=WINDOWS[RULE]), **settings(10_000))
        trainer.train(rows, callbacks=[Begin(every_seconds=0.5)], checkpoint=Checkpoint(saved, every=100))
    ledger = [row.asDict() for row in trainer.ledger.orderBy("clock").collect()]
    history = trainer.history.selectExpr("worker", "iteration", "double(timestamp) at", "samples").collect()
    return figures(ledger, [row.asDict() for row in history], struck)


def inject(kind: str, draw: random.Random) -> bool:
    """Inject one fault; return whether there was a target."""
    servers = server_processes()
    workers = [pid for pid in python_workers() if pid not in servers]
    targets = servers if kind == "kill server" else workers
    if not targets:
        return False
    target = draw.choice(sorted(targets))
    with contextlib.suppress(ProcessLookupError):  # The process has just ended.
        if kind == "suspend":
            os.kill(target, signal.SIGSTOP)
            threading.Timer(SUSPENDED, wake, (target,)).start()
        elif kind == "cut off":
            return any([cut(port) for port in ports_of(target, servers)])
        else:
            os.kill(target, signal.SIGKILL)
        return True
    return False


def server_processes() -> list[int]:
    """Return the pids of the parameter servers below this process."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # The process has just ended.
            if any("distkeras.ps" in word for word in process.cmdline()):
                found.append(process.pid)
    return found


def wake(pid: int) -> None:
    """Resume a suspended process, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def ports_of(worker: int, servers: list[int]) -> list[int]:
    """Return the worker's own ports of its connections to a server."""
    import psutil

    listening = {
        link.laddr.port
        for server in servers
        for link in psutil.Process(server).net_connections("tcp")
        if link.status == psutil.CONN_LISTEN
    }
    connections = psutil.Process(worker).net_connections("tcp")
    return [link.laddr.port for link in connections if link.raddr and link.raddr.port in listening]


def cut(port: int) -> bool:
    """Make the kernel destroy the connection of a port; return whether that succeeded."""
    command = ["ss", "-K", "sport", "=", f":{port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return f":{port}" in done.stdout


def figures(
    ledger: list[dict[str, Any]], history: list[dict[str, Any]], struck: list[tuple[float, str]]
) -> dict[str, Any]:
    """Return the figures from the ledger, in the order of the clock, and from the history."""
    times = {(row["worker"], row["iteration"]): row["at"] for row in history}
    lost, doubled, firsts = 0, 0, []
    for worker in {row["worker"] for row in ledger}:
        step, expected, attempt = 0, (0, 0), None
        for row in (row for row in ledger if row["worker"] == worker):
            if row["attempt"] != attempt:
                attempt = row["attempt"]
                firsts.append(times[worker, step])
            begins = (row["epoch"], row["first_batch"])
            lost += begins > expected and begins != (expected[0] + 1, 0)
            doubled += begins < expected
            expected = (row["epoch"], row["last_batch"] + 1)
            step += row["last_batch"] - row["first_batch"] + 1
    first, last = min(times.values()), max(times.values())
    kills = [when for when, kind in struck if kind == "kill"]
    waits = [min(after) - when for when in kills if (after := [at for at in firsts if at > when])]
    return {
        "rate": sum(row["samples"] for row in history) / (last - first),
        "struck": len(struck),
        "lost": lost,
        "doubled": doubled,
        "successors": waits,
    }


def keras(folder: Path, seconds: float, planned: list[tuple[float, str]]) -> dict[str, Any]:
    """Supervise `keras_child` until the time is over, and kill it at each fault; return the figures."""
    with tempfile.TemporaryDirectory() as saved:
        log = Path(saved) / "steps"
        log.touch()
        child, began, waits = start_child(folder, saved), None, []
        times, killed, torn, fresh = [when for when, _ in planned], None, 0, 0
        while began is None or time.time() - began < seconds:
            if child.poll() is not None:
                if len(times) == len(planned):
                    raise RuntimeError(f"plain Keras must train until it is killed. Received: exit {child.returncode}")
                # A kill during a save leaves a partial checkpoint, which Keras cannot load: training restarts.
                shutil.rmtree(Path(saved) / "backup")
                torn, fresh = torn + 1, len(log.read_text().splitlines())
                child = start_child(folder, saved)
            if began is None and log.stat().st_size:
                began = float(log.read_text().split()[0])
            if killed is not None and (later := steps_after(log, killed)) is not None:
                waits.append(later - killed)
                killed = None
            if began is not None and times and time.time() - began >= times[0]:
                times.pop(0)
                child.kill()
                child.wait()
                killed = time.time()
                child = start_child(folder, saved)
            time.sleep(0.05)
        child.kill()
        child.wait()
        lines = [line.split() for line in log.read_text().splitlines() if len(line.split()) == 2]
    steps = [int(step) for _, step in lines]
    ended = float(lines[-1][0])
    return {
        "rate": (max(steps[fresh:]) + 1) * BATCH / (ended - float(lines[0][0])),
        "torn": torn,
        "struck": len(planned) - len(times),
        "again": (len(steps) - len(set(steps))) * BATCH,
        "successors": waits,
    }


def steps_after(log: Path, moment: float) -> float | None:
    """Return the time of the first step after a moment; None if there is none."""
    at = float(log.read_text().splitlines()[-1].split()[0])
    return at if at > moment else None


def start_child(folder: Path, saved: str) -> subprocess.Popen[bytes]:
    """Start plain Keras, which continues from its checkpoint."""
    command = [sys.executable, __file__, "keras child", str(folder), saved, "0", "0"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def keras_child(folder: Path, saved: str) -> None:
    """Train forever, with a checkpoint every `SAVED_STEPS` steps; log the time of each step."""
    import keras as library

    x, y = arrays(folder)
    steps = -(-len(x) // BATCH)
    model = build(MODEL, RATES["keras"])

    class StepLogger(library.callbacks.Callback):  # type: ignore[misc]  # Keras' classes have no types
        def __init__(self) -> None:
            super().__init__()
            self.epoch = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            log.write(f"{time.time()} {self.epoch * steps + batch}\n")
            log.flush()

    with (Path(saved) / "steps").open("a") as log:
        # Keras restarts the epoch in which the checkpoint was written, with the weights of the checkpoint.
        backup = library.callbacks.BackupAndRestore(str(Path(saved) / "backup"), save_freq=SAVED_STEPS)
        model.fit(x, y, batch_size=BATCH, epochs=_FOREVER, verbose=0, callbacks=[backup, StepLogger()])


def main() -> None:
    """Train, and print the figures."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    kind, folder = sys.argv[1], Path(sys.argv[2])
    if kind == "keras child":
        keras_child(folder, sys.argv[3])
        return
    seconds, an_hour, seed = float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    planned = list(faults(seconds, an_hour, seed))
    results = ours(folder, seconds, planned, seed) if kind == "ours" else keras(folder, seconds, planned)
    results["successor median"] = statistics.median(results["successors"]) if results["successors"] else 0.0
    results["successor max"] = max(results["successors"], default=0.0)
    sys.stdout.write(f"\n{json.dumps(results)}\n")


if __name__ == "__main__":
    main()
