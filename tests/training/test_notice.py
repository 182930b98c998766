"""Notice of an end, on Spark: a worker commits all that it has trained, and a server saves all commits."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import keras
import pytest
from pyspark.sql import SparkSession
from support.training.spark_jobs import (
    counting_model,
    counting_rows,
    counts,
    once_at_step,
    servers,
    step_callback_layer,
    total,
    wait_at_step,
)

from distkeras import Executors, Trainer
from distkeras.callbacks import Callback, CallbackContext
from distkeras.ps.checkpoint.checkpointer import Checkpoint
from distkeras.ps.rules import make

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(120)]

ROWS, EPOCHS = 40, 10


def trainer_of(model: keras.Model, rule: str = "downpour") -> Trainer:
    return Trainer(
        model,
        make(rule, window=4),
        worker_optimizer=keras.optimizers.SGD(1.0, momentum=0.5),
        loss=total,
        num_workers=2,
        batch_size=1,
        num_epoch=EPOCHS,
        executors=Executors(lends=False),
    )


def counted(folder: Path, strike: Callable[[int], None]) -> Callable[[int], None]:
    """Return an action for each step: count it, and strike."""

    def action(step: int) -> None:
        with (folder / f"steps {os.getpid()}").open("ab") as stream:
            stream.write(b"1")
        strike(step)

    return action


def steps_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("steps *"))


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.slow)])
def test_a_worker_trains_nothing_twice(spark: SparkSession, tmp_path: Path, name: str) -> None:
    """It ends at the end of its window, and the next attempt has its optimizer's state of the same commit."""

    def strike() -> None:
        (tmp_path / "struck").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.Signals[name])
        os.kill(os.getpid(), signal.SIGHUP)  # Spark's daemon sends it twice

    hook = step_callback_layer(counted(tmp_path, once_at_step(tmp_path / "struck", 13, strike)))
    trainer = trainer_of(counting_model(ROWS, hook))
    trainer.train(counting_rows(spark, ROWS))
    struck = (tmp_path / "struck").read_text()
    assert (tmp_path / f"steps {struck}").stat().st_size == 16  # the fourth window
    assert steps_in(tmp_path) == ROWS * EPOCHS
    texts = {row["kind"]: row["text"] for row in trainer.events.collect()}
    assert re.search("received SIG(TERM|HUP); all that it has trained is committed", texts["node"])
    found = re.search(
        r"continues after commit (\d+) with the optimizer of attempt \d+ after commit (\d+)", texts["optimizer"]
    )
    assert found is not None
    assert found[1] == found[2]


class EndsServer(Callback):
    """Sends SIGTERM to the server after some commits, and then lets the workers go on."""

    def __init__(self, clock: int, sent: Path) -> None:
        super().__init__(every_seconds=0.05)
        self._clock, self._sent, self.at = clock, sent, -1

    def on_center(self, context: CallbackContext) -> None:
        """Send it once."""
        if self.at < 0 and context.clock >= self._clock:
            self.at = context.clock
            os.kill(servers()[-1], signal.SIGTERM)
            self._sent.touch()


@pytest.mark.slow
def test_a_server_saves_all_commits(spark: SparkSession, tmp_path: Path) -> None:
    ends = EndsServer(10, tmp_path / "sent")
    trainer = trainer_of(counting_model(ROWS, step_callback_layer(wait_at_step(40, tmp_path / "sent"))))
    checkpoint = Checkpoint(str(tmp_path / "center"), 10**6)
    model = trainer.train(counting_rows(spark, ROWS), callbacks=[ends], checkpoint=checkpoint)
    assert len(counts(model)) == ROWS
    restarts = [row["text"] for row in trainer.events.collect() if row["kind"] == "restart"]
    found = re.search(r"commit (\d+)", restarts[0])
    assert found is not None, restarts
    assert int(found[1]) >= ends.at >= 10
