"""Spark jobs in which the state of a worker's optimizer outlives the worker."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import SparkSession
from support.training.spark_jobs import counting_model, counting_rows, step_callback_layer, total

from distkeras import Executors, Trainer
from distkeras.ps.rules import make

pytestmark = pytest.mark.timeout(120)


def recording(folder: Path) -> Callable[[int], None]:
    """Return an action for each step: record the optimizer's state, and kill the first worker that has sent one."""
    # ruff: noqa: SLF001 - workers receive the action by value, and it reads their private state

    def action(step: int) -> None:
        from distkeras.keras_model.replica import read_state

        keeper = running_keeper()
        state = read_state(keeper._replica.model.optimizer)
        assert state is not None
        with (folder / f"states-{os.getpid()}").open("ab") as stream:
            stream.write(state.content.tobytes())
        (folder / "size").write_text(str(state.content.nbytes))
        if keeper._interval._took:
            try:
                (folder / "killed").open("x").close()
            except FileExistsError:
                return
            (folder / "killed").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)

    def running_keeper() -> Any:
        """Return the keeper of the worker's loop, which is suspended during the step; look in all threads."""
        for innermost in sys._current_frames().values():
            frame: FrameType | None = innermost
            while frame is not None and not (frame.f_code.co_name == "work" and "keeper" in frame.f_locals):
                frame = frame.f_back
            if frame is not None:
                return frame.f_locals["keeper"]
        raise AssertionError("no loop runs")

    return action


def adam(model: keras.Model, **options: Any) -> Trainer:
    return Trainer(
        model,
        make("downpour", window=2),
        worker_optimizer=keras.optimizers.Adam(0.01),
        loss=total,
        num_workers=1,
        batch_size=2,
        num_epoch=40,
        **options,
    )


@pytest.mark.slow
def test_the_next_attempt_begins_with_the_optimizer_state_that_the_killed_worker_sent(
    spark: SparkSession, tmp_path: Path
) -> None:
    rows = 41
    trainer = adam(counting_model(rows, step_callback_layer(recording(tmp_path))))
    trainer.train(counting_rows(spark, rows))
    size = int((tmp_path / "size").read_text())
    killed = (tmp_path / "killed").read_text()
    first, second = b"", b""
    for path in tmp_path.glob("states-*"):
        if path.name == f"states-{killed}":
            first = path.read_bytes()
        else:
            second = path.read_bytes()
    had = [first[at : at + size] for at in range(0, len(first), size)]
    assert second[:size] in had[1:]  # the first state is a new optimizer's
    (event,) = trainer.events.where("kind = 'optimizer'").collect()
    numbers = re.match(
        r"attempt (\d+) continues after commit (\d+) with the optimizer of attempt (\d+) after commit (\d+)",
        event["text"],
    )
    assert numbers is not None
    successor, at, predecessor, after = map(int, numbers.groups())
    assert (event["source"], event["attempt"]) == ("server", successor)
    assert predecessor < successor
    assert 1 <= after <= at
    ledger = trainer.ledger.toPandas()
    taken = ledger[ledger.attempt == predecessor].sort_values("clock").head(after)
    steps = int((taken.last_batch - taken.first_batch + 1).sum())
    assert had.index(second[:size]) == steps  # the state at the start of the next step


@pytest.mark.slow
def test_keeping_optimizers_does_not_change_an_undisturbed_job(spark: SparkSession) -> None:
    weights = []
    for keep in (True, False):
        keras.utils.set_random_seed(0)
        trainer = adam(counting_model(21), executors=Executors(keep_optimizer=keep))
        weights.append(
            np.concatenate([value.ravel() for value in trainer.train(counting_rows(spark, 21)).get_weights()])
        )
        assert trainer.events.where("kind = 'optimizer'").count() == 0
    np.testing.assert_array_equal(weights[0], weights[1])
