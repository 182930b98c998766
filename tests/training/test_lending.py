"""Work that moves, on Spark: a worker without work trains a part of a larger partition, and each row counts once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from support.training.small_jobs import counter, sgd
from support.training.spark_jobs import counting_model, counting_rows, counts, servers, step_callback_layer, total

from distkeras import Trainer
from distkeras.callbacks import Callback, CallbackContext
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import make

pytestmark = pytest.mark.usefixtures("nothing_left")

ROWS = 340
#: The share of rows in the first partition.
LONG = 320
#: Epochs of the first try; a fast machine needs more until a loan is worth it.
EPOCHS, MOST_EPOCHS = 12, 800


@pytest.fixture(scope="module")
def uneven(spark: SparkSession) -> DataFrame:
    """Two partitions, one with nearly all rows."""
    rows = counting_rows(spark, ROWS)
    number = F.array_position("features", F.lit(1.0).cast("float"))
    return rows.repartitionByRange(2, F.when(number <= LONG, 0).otherwise(1)).cache()


def trainer_of(epochs: int, **options: Any) -> Trainer:
    options = {"batch_size": 1, "num_epoch": epochs, "partitioned_already": True} | options
    return counter(make("downpour", window=2), rows=ROWS, **options)


def trained_by(trainer: Trainer) -> np.ndarray:
    commits = trainer.ledger.toArrow()
    return np.stack([commits["worker"].to_numpy(), commits["trained_by"].to_numpy()])


@pytest.mark.slow
def test_a_worker_without_work_trains_rows_of_another_one(uneven: DataFrame) -> None:
    epochs, lent = EPOCHS, 0
    while not lent:
        assert epochs <= MOST_EPOCHS
        trainer = trainer_of(epochs)
        assert counts(trainer.train(uneven)) == [epochs] * ROWS
        worker, holder = trained_by(trainer)
        lent = int((worker != holder).sum())
        epochs *= 4
    assert {*zip(worker.tolist(), holder.tolist(), strict=True)} >= {(0, 0), (0, 1), (1, 1)}
    texts = [row["text"] for row in trainer.events.collect() if row["kind"] == "lent"]
    assert texts
    assert "worker 1 trains mini-batches of partition 0" in texts[0]


@pytest.mark.slow
def test_a_job_may_forbid_it(uneven: DataFrame) -> None:
    trainer = trainer_of(EPOCHS, lends=False)
    assert counts(trainer.train(uneven)) == [EPOCHS] * ROWS
    worker, holder = trained_by(trainer)
    np.testing.assert_array_equal(worker, holder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "easgd"}, "`lends` must be False with rule 'easgd'"),
        ({"rule": "dana_slim"}, "`lends` must be False with rule 'dana_slim'"),
        ({"staleness_bound": 2}, "`staleness_bound` must be None with lending"),
        ({"relays": "host"}, "`relays` must be None with lending"),
        ({"tls": True}, "`tls` must be False with lending"),
    ],
)
def test_what_excludes_it_is_named_before_work(ones: DataFrame, options: dict[str, Any], message: str) -> None:
    rule = options.pop("rule", "downpour")
    with pytest.raises(ConfigurationError, match=message):
        counter(rule, lends=True, **options).train(ones)


@pytest.mark.slow
def test_a_helper_without_rows_takes_a_free_slot(uneven: DataFrame) -> None:
    """The session has more slots than the job has workers."""
    epochs, helped = EPOCHS, False
    while not helped:
        assert epochs <= MOST_EPOCHS
        trainer = trainer_of(epochs, helpers=1, workers=1)
        assert counts(trainer.train(uneven.coalesce(1))) == [epochs] * ROWS
        _, holder = trained_by(trainer)
        helped = 1 in holder
        epochs *= 4


class KillsOneProcess(Callback):
    """Lets the worker of a partition, or the server, be killed once mini-batches were lent."""

    def __init__(self, folder: Path, partition: int | None) -> None:
        super().__init__(every_seconds=0.2)
        self._folder, self._partition = folder, partition
        self.struck = False

    def on_center(self, context: CallbackContext) -> None:
        """Strike once."""
        if context.status.lent and not self.struck:
            self.struck = True
            if self._partition is None:
                os.kill(servers()[-1], signal.SIGKILL)
            else:
                (self._folder / f"due {self._partition}").touch()


def dies_when_due(folder: str) -> Callable[[int], None]:
    """Return an action of a worker's steps: it kills its process, once, if that is due."""

    def action(step: int) -> None:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        due = Path(folder) / f"due {context.partitionId()}"
        try:
            due.rename(due.with_name("dead"))
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    return action


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, None], ids=["owner", "helper", "server"])
def test_each_row_counts_once_when_a_process_dies_during_a_loan(
    uneven: DataFrame, tmp_path: Path, victim: int | None
) -> None:
    epochs, struck = EPOCHS, False
    while not struck:
        assert epochs <= MOST_EPOCHS
        kills = KillsOneProcess(tmp_path, victim)
        model = counting_model(ROWS, step_callback_layer(dies_when_due(str(tmp_path))))
        trainer = Trainer(
            model,
            make("downpour", window=2),
            worker_optimizer=sgd(),
            loss=total,
            num_workers=2,
            batch_size=1,
            num_epoch=epochs,
            partitioned_already=True,
        )
        checkpoint = str(tmp_path / f"center {epochs}") if victim is None else None
        assert counts(trainer.train(uneven, callbacks=[kills], checkpoint=checkpoint)) == [epochs] * ROWS
        kinds = {row["kind"] for row in trainer.events.collect()}
        struck = (tmp_path / "dead").exists() or (victim is None and "restart" in kinds)
        epochs *= 4
    worker, holder = trained_by(trainer)
    assert (worker != holder).any()
