"""Versions: a stream publishes its center after micro-batches, each version once and with the right weights."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.patience import patience
from support.training.small_jobs import counter, sgd
from support.training.spark_jobs import counting_model, counts, total
from support.training.streams import arrive, arriving, forget_last_commit

from distkeras import KerasStreamModel, Trainer, Versions
from distkeras.ps.checkpoint.versions import VersionFolder
from distkeras.ps.errors import ConfigurationError, DifferentJobError, DistkerasError, LedgerError, SnapshotError
from distkeras.ps.rules import make
from distkeras.results import JobRecords

pytestmark = pytest.mark.usefixtures("nothing_left")

#: Rows of a micro-batch, and rows in total.
EACH, ROWS = 6, 24


def arrive_files(folder: Path, *numbers: int) -> None:
    for number in numbers:
        arrive(folder, number, range(number * EACH, (number + 1) * EACH), ROWS)


def train(trainer: Trainer, stream: DataFrame, checkpoint: Path, publish: Path | Versions) -> None:
    training = trainer.train_stream(stream, checkpoint=checkpoint, trigger={"availableNow": True}, publish=publish)
    assert training.awaitTermination(patience(120))


def files(folder: Path) -> dict[str, int]:
    """Return the time at which each version was written, by name."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("version-*.dks")}


@pytest.mark.slow
def test_each_version_is_published_once_with_the_right_weights(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, checkpoint, versions = (tmp_path / name for name in ("in", "checkpoint", "versions"))
    arrive_files(folder, 0, 1)
    stream = arriving(spark, folder)

    class FullDiskError(SnapshotError):
        pass

    publish = VersionFolder.publish

    def fail_once(self: VersionFolder, stream: str, number: int, *weights: object) -> object:
        if number == 1:
            monkeypatch.setattr(VersionFolder, "publish", publish)
            raise FullDiskError("the disk is full")
        return publish(self, stream, number, *weights)  # type: ignore[arg-type]  # the weights are the two vectors

    def unlike(*arguments: object) -> None:
        raise LedgerError("a mini-batch counts twice")

    # What the ledger does not confirm is not published.
    with monkeypatch.context() as patch:
        patch.setattr(JobRecords, "check_exactly_once", unlike)
        with pytest.raises(LedgerError, match="counts twice"):
            train(counter(rows=ROWS, num_epoch=1), stream, checkpoint, versions)
        assert files(versions) == {}

    # Publishing fails after the snapshot that covers the second micro-batch.
    monkeypatch.setattr(VersionFolder, "publish", fail_once)
    with pytest.raises(DistkerasError, match="the disk is full"):
        train(counter(rows=ROWS, num_epoch=1), stream, checkpoint, versions)
    assert len(files(versions)) == 1
    train(counter(rows=ROWS, num_epoch=1), stream, checkpoint, versions)
    model = KerasStreamModel(versions, custom_objects={"total": total})
    assert model.published == [0, 1]
    for number in (0, 1):
        trained = EACH * (number + 1)
        assert counts(model.at(number).keras_model) == [1.0] * trained + [0.0] * (ROWS - trained)

    # The driver dies before Spark records the micro-batch as done: the version exists and is not written again.
    before = files(versions)
    forget_last_commit(checkpoint)
    arrive_files(folder, 2)
    train(counter(rows=ROWS, num_epoch=1), stream, checkpoint, versions)
    assert before.items() < files(versions).items()
    assert sum(counts(model.at(2).keras_model)) == 3 * EACH
    assert counts(model.at().keras_model) == counts(model.at(2).keras_model)

    # Versions of another model are refused before any work.
    layers = counting_model(ROWS, keras.layers.Identity())
    with pytest.raises(DifferentJobError, match=r"must be .*, as in the job that .*versions' holds"):
        Trainer(layers, "downpour", worker_optimizer=sgd(), loss=total, num_workers=2).train_stream(
            stream, checkpoint=tmp_path / "other", publish=versions
        )
    assert not (tmp_path / "other").exists()
    with pytest.raises(ConfigurationError, match="`publish` must be a directory"):
        counter(rows=ROWS).train_stream(stream, checkpoint=checkpoint, publish=3)  # type: ignore[arg-type]  # that is tested


@pytest.mark.slow
def test_a_version_contains_buffered_commits_and_the_last_one_is_published(spark: SparkSession, tmp_path: Path) -> None:
    folder, checkpoint, versions = (tmp_path / name for name in ("in", "checkpoint", "versions"))
    arrive_files(folder, 0, 1, 2, 3)
    stream = arriving(spark, folder)

    def trainer() -> Trainer:
        return counter(make("fedbuff", window=1, buffer=5), rows=ROWS, num_epoch=1, batch_size=2)

    train(trainer(), stream, checkpoint, Versions(str(versions), every=2))
    model = KerasStreamModel(versions, custom_objects={"total": total})
    assert model.published == [0, 2, 3]
    before = files(versions)
    forget_last_commit(checkpoint)
    train(trainer(), stream, checkpoint, Versions(str(versions), every=2))  # other weights would be an error
    assert files(versions) == before
    other = counter(rows=ROWS, num_epoch=1).train_stream(
        stream, checkpoint=tmp_path / "other", trigger={"availableNow": True}, publish=versions
    )
    with pytest.raises(DifferentJobError, match="with version 0 of another stream"):
        other.awaitTermination(patience(120))
