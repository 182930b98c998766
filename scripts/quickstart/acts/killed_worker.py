"""Act 2: the process of a worker is killed while it trains; the ledger is exact afterwards."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distkeras import Callback, CallbackContext
from distkeras.data.datasets import write_parquet
from quickstart import pictures
from quickstart.machine import WORKERS
from quickstart.stage import ActResult, Stage, steps_of

if TYPE_CHECKING:
    import keras
    import pandas as pd
    import psutil

BATCH_SIZE = 32
LEARNING_RATE = 0.05


@dataclass(frozen=True)
class LedgerCount:
    """How often the mini-batches of a job were counted, according to its ledger, and the rows of all of them.

    Missing are those that are not there, although a later one of the same partition is, in this epoch or another.
    """

    counted: int
    twice: int
    missing: int
    rows: int
    rows_due: int

    @property
    def exact(self) -> bool:
        """Return whether each mini-batch was counted once."""
        return not self.twice and not self.missing and self.rows == self.rows_due

    def __str__(self) -> str:
        return (
            f"{self.counted:,} mini-batches counted once, {self.twice} twice, {self.missing} missing "
            f"({self.rows:,} of {self.rows_due:,} rows)"
        )


def count(ledger: pd.DataFrame, samples: int, rows: int, epochs: int) -> LedgerCount:
    """Take each range of mini-batches in `Trainer.ledger` apart, and count; ``samples`` are rows in its history."""
    times = Counter(
        (int(row.worker), int(row.epoch), batch)
        for row in ledger[ledger["applied"]].itertuples()
        for batch in range(row.first_batch, row.last_batch + 1)
    )
    last: dict[int, int] = {}
    for worker, _, batch in times:
        last[worker] = max(batch, last.get(worker, 0))
    due = sum(batch + 1 for batch in last.values()) * epochs
    twice = sum(number > 1 for number in times.values())
    return LedgerCount(len(times) - twice, twice, due - len(times), samples, rows * epochs)


def killed_worker(stage: Stage) -> ActResult:
    """Train with two workers, kill the process of one with SIGKILL, and count the mini-batches."""
    size, images = stage.size, stage.images
    x, y = images.x[: size.killed_rows], images.y[: size.killed_rows]
    trainer = stage.trainer(build(), BATCH_SIZE, size.killed_epochs)
    killer = Killer(size.kill_at)
    folder = write_parquet(stage.out / "data" / "killed", x, y, files=WORKERS)
    trainer.train(stage.spark.read.parquet(folder), callbacks=[killer])
    stage.trainers.append(trainer)

    ledger, steps = trainer.ledger.toPandas(), steps_of(trainer)
    found = count(ledger, int(steps["samples"].sum()), len(x), size.killed_epochs)
    commits = trainer.commits.selectExpr("worker", "attempt", "double(timestamp) AS at").toPandas()
    resumed = resumed_after(commits, killer.at)
    picture = pictures.killed_worker(commits, steps, killer.at, stage.picture("2-killed-worker"))
    return ActResult(
        title="A worker killed in the middle",
        line=f"SIGKILL at commit {killer.clock:,} of {len(commits):,}; "
        + (f"Spark's next attempt went on after {resumed:.1f} s; " if resumed is not None else "")
        + str(found),
        picture=picture,
        alt="The commits of both partitions over time, with the attempt that made them, and the training loss",
        notes=[
            "The process of a worker was killed by the operating system. Spark ran its task again, and the new attempt "
            "asked the server where the old one had stopped. The figures come from trainer.ledger, which has the "
            "mini-batches of each commit, and from trainer.history, which has their rows.",
            "The notebook kills a whole executor and the parameter server in the same way.",
        ],
        read="notebooks/losing_executors.ipynb",
        figures={**vars(found), "killed_at_commit": killer.clock, "commits": len(commits), "resumed_seconds": resumed},
        problems=_problems(found, resumed),
    )


def build() -> keras.Model:
    """Return the compiled model: 784-512-512-10, with a step that takes a while."""
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(512, activation="relu") for _ in range(2)]
    model = keras.Sequential(
        [keras.Input((784,)), *layers, keras.layers.Dense(10, activation="softmax")], name="act_2_killed_worker"
    )
    model.compile(keras.optimizers.SGD(LEARNING_RATE), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Killer(Callback):
    """Kills the process of one worker after so many ``commits``.

    Then ``clock`` is the number of commits at that time, and ``at`` that time, in seconds since the epoch.
    """

    def __init__(self, commits: int) -> None:
        super().__init__(every_commits=1)
        self._commits = commits
        self.clock, self.at = 0, math.nan

    def on_center(self, context: CallbackContext) -> None:
        """Kill one worker, once there are enough commits."""
        if not self.clock and context.clock >= self._commits:
            for process in itertools.islice(workers_of_server(), 1):
                process.kill()
                self.clock, self.at = context.clock, time.time()


def workers_of_server() -> Iterator[psutil.Process]:
    """Yield the processes below this one that are connected to its parameter server."""
    import psutil

    family = psutil.Process().children(recursive=True)
    ports = set()
    for process in family:
        with contextlib.suppress(psutil.Error):  # It has ended in the meantime.
            if any("distkeras.ps" in part for part in process.cmdline()):
                links = process.net_connections("tcp")
                ports |= {link.laddr.port for link in links if link.status == psutil.CONN_LISTEN}
    for process in family:
        with contextlib.suppress(psutil.Error):
            if any(link.raddr and link.raddr.port in ports for link in process.net_connections("tcp")):
                yield process


def resumed_after(commits: pd.DataFrame, killed: float) -> float | None:
    """Return the seconds from the kill to the first commit of an attempt that took a partition over; None for none."""
    first = commits.groupby(["worker", "attempt"])["at"].min()
    later = first[first > killed]
    return float(later.min() - killed) if len(later) else None


def _problems(found: LedgerCount, resumed: float | None) -> list[str]:
    problems = []
    if resumed is None:
        problems.append("a worker must be killed while it trains, and its partition taken over. Received: neither")
    if not found.exact:
        problems.append(f"each mini-batch must count once. Received: {found}")
    return problems
