"""Tables that travel by rows, trained on a stream: each touch counts once, also if a process is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.patience import patience, until
from support.training.spark_jobs import once_at_step, step_callback_layer, total

from distkeras import KerasStreamModel, Trainer, Versions
from distkeras.keras_model.stored_rows import listed_files, load_rows
from distkeras.layers import WideEmbedding
from distkeras.ps.errors import ConfigurationError, LocalProtocolError
from distkeras.ps.rules import make
from distkeras.ps.world.files import LocalFiles
from distkeras.training.stream import StreamTraining

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(240)]

ROWS = 60
on_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="the call that kills a worker is TensorFlow's"
)


def arrive(spark: SparkSession, folder: Path, files: Sequence[Sequence[int]]) -> DataFrame:
    """Write a file for each micro-batch, with a row for each id, and return them as a stream."""
    schema = "id bigint, label float"
    for ids in files:
        rows = [(int(row), 0.0) for row in ids]
        spark.createDataFrame(rows, schema).coalesce(1).write.mode("append").parquet(str(folder))
    return spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(folder))


def counting(table: keras.layers.Layer, *hooks: keras.layers.Layer) -> keras.Model:
    """Return a model whose table subtracts 1 from a row for each id."""
    ids = keras.Input((1,), dtype="int64", name="id")
    hidden = table(ids)
    for hook in hooks:
        hidden = hook(hidden)
    model = keras.Model(ids, keras.layers.Reshape((1,), name="count")(hidden))
    model.compile(keras.optimizers.SGD(1.0), total)
    return model


def train(
    model: keras.Model, stream: DataFrame, checkpoint: Path, window: int = 2, **options: Any
) -> tuple[Trainer, StreamTraining]:
    given: dict[str, Any] = {"num_workers": 2, "batch_size": 4, "features_col": "id"}
    publish = options.pop("publish", None)
    trainer = Trainer(model, make("downpour", window=window), **(given | options))
    return trainer, trainer.train_stream(stream, checkpoint=checkpoint, trigger={"availableNow": True}, publish=publish)


def wide(folder: Path, **lives: Any) -> WideEmbedding:
    return WideEmbedding(ROWS, 1, str(folder), scale=0.0, name="table", **lives)


def counts_of(layer: WideEmbedding) -> dict[int, float]:
    """Return what was subtracted from each row that the trained layer has."""
    assert layer.saved_rows is not None
    blocks = load_rows(layer.saved_rows, layer.table())
    return {int(row): -float(value) for ids, rows in blocks for row, value in zip(ids, rows[:, 0], strict=True)}


DRAWN = [np.random.default_rng(number).integers(0, ROWS, 30).tolist() for number in range(4)]
TOUCHES = np.bincount(np.concatenate(DRAWN), minlength=ROWS)


@pytest.mark.slow
@on_tensorflow
def test_a_table_by_rows_counts_each_touch_once(spark: SparkSession, tmp_path: Path) -> None:
    kill = once_at_step(tmp_path / "killed", 3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    table = keras.layers.Embedding(ROWS, 1, embeddings_initializer="zeros", name="table")
    model = counting(table, step_callback_layer(kill))
    stream = arrive(spark, tmp_path / "in", DRAWN)
    trainer, training = train(model, stream, tmp_path / "checkpoint", tables=["table"], publish=tmp_path / "versions")
    assert training.awaitTermination(patience(120))
    assert (tmp_path / "killed").exists()
    np.testing.assert_array_equal(-training.model().get_layer("table").get_weights()[0].ravel(), TOUCHES)
    assert any("by rows: 'table'" in row["text"] for row in trainer.events.collect())
    scoring = KerasStreamModel(tmp_path / "versions", custom_objects={"total": total})
    assert scoring.published == [1, 2, 3]
    for number in scoring.published:
        rows = -scoring.at(number).keras_model.get_layer("table").get_weights()[0].ravel()
        np.testing.assert_array_equal(rows, np.bincount(np.concatenate(DRAWN[: number + 1]), minlength=ROWS))


@pytest.mark.slow
def test_a_wide_table_counts_across_streams_and_restarts_of_the_server(spark: SparkSession, tmp_path: Path) -> None:
    stream = arrive(spark, tmp_path / "in", DRAWN[:2])
    trainer, training = train(counting(wide(tmp_path / "rows")), stream, tmp_path / "checkpoint")
    with pytest.raises(ConfigurationError, match=r"`model` must not be called while a stream is active"):
        training.model()
    until(lambda: training.lastProgress is not None, 90)
    os.kill(training._process.pid, signal.SIGKILL)  # noqa: SLF001 - a fault
    assert training.awaitTermination(patience(120))
    first = counts_of(trainer.model.get_layer("table"))
    assert first == {row: count for row, count in enumerate(np.bincount(DRAWN[0] + DRAWN[1])) if count}
    arrive(spark, tmp_path / "in", DRAWN[2:])
    trainer, training = train(counting(wide(tmp_path / "rows")), stream, tmp_path / "checkpoint")
    assert training.awaitTermination(patience(120))
    assert counts_of(trainer.model.get_layer("table")) == {row: n for row, n in enumerate(TOUCHES) if n}
    assert counts_of(training.model().get_layer("table")) == counts_of(trainer.model.get_layer("table"))


@pytest.mark.slow
@on_tensorflow
def test_rows_are_admitted_by_their_third_touch(spark: SparkSession, tmp_path: Path) -> None:
    """Each row of the stream is a commit, so that the counts do not depend on the order of the workers."""
    kill = once_at_step(tmp_path / "killed", 5, lambda: os.kill(os.getpid(), signal.SIGKILL))
    model = counting(wide(tmp_path / "rows", admit_after=3), step_callback_layer(kill))
    stream = arrive(spark, tmp_path / "in", DRAWN)
    trainer, training = train(model, stream, tmp_path / "checkpoint", window=1, batch_size=1)
    assert training.awaitTermination(patience(120))
    assert (tmp_path / "killed").exists()
    expected = {row: float(count - 2) for row, count in enumerate(TOUCHES) if count >= 3}
    assert counts_of(trainer.model.get_layer("table")) == expected
    (text,) = [row["text"] for row in trainer.events.collect() if row["kind"] == "rows"]
    kept = len(expected)
    assert text == f"rows of 'table': {kept} are kept; {kept} were admitted, 0 have expired, 0 were removed"


@pytest.mark.slow
def test_rows_expire_that_no_commit_touches(spark: SparkSession, tmp_path: Path) -> None:
    """Micro-batches of ten commits: two without a row are more than 19 commits between its touches."""
    files = [[1, 2, 3, *[50] * 7], [2, *[51] * 9], [2, *[52] * 9], [1, 2, *[53] * 8]]
    model = counting(wide(tmp_path / "rows", expire_after_commits=20))
    stream = arrive(spark, tmp_path / "in", files)
    trainer, training = train(model, stream, tmp_path / "checkpoint", window=1, batch_size=1)
    assert training.awaitTermination(patience(120))
    # Row 1 had expired when it came again; rows that did not come in the last two micro-batches have.
    assert counts_of(trainer.model.get_layer("table")) == {1: 1.0, 2: 4.0, 52: 9.0, 53: 8.0}


@pytest.mark.slow
def test_rows_are_removed_by_key(spark: SparkSession, tmp_path: Path) -> None:
    stream = arrive(spark, tmp_path / "in", [[1, 2, 3, 3], [4] * 4])
    trainer = Trainer(
        counting(wide(tmp_path / "rows", admit_after=1, expire_after_seconds=3600.0)),
        make("downpour", window=1),
        num_workers=1,
        batch_size=1,
        features_col="id",
    )
    training = trainer.train_stream(stream, checkpoint=tmp_path / "checkpoint")
    until(lambda: training.lastProgress is not None and training.lastProgress.batch == 1, 90)
    wrong: list[Any] = [[ROWS], [-1], [3.7], ["5"], [True], [2**70], [[1]]]
    for ids in wrong:
        with pytest.raises(ConfigurationError, match=r"`ids` must be integers from 0 to 59"):
            training.remove_rows("table", ids)
    with pytest.raises(ConfigurationError, match=r"one of \['table'\]"):
        training.remove_rows("other", [1])
    training.remove_rows("table", [3, 1, 17])
    os.kill(training._process.pid, signal.SIGKILL)  # noqa: SLF001 - a fault; the removal was saved
    arrive(spark, tmp_path / "in", [[1, 5]])
    until(lambda: training.lastProgress is not None and training.lastProgress.batch == 2, 90)
    training.stop()
    assert counts_of(trainer.model.get_layer("table")) == {1: 1.0, 2: 1.0, 4: 4.0, 5: 1.0}
    with pytest.raises(LocalProtocolError, match="a stream that has ended"):
        training.remove_rows("table", [1])
    (text,) = [row["text"] for row in trainer.events.collect() if row["kind"] == "rows"]
    assert text == "rows of 'table': 4 are kept; 6 were admitted, 0 have expired, 2 were removed"


def score(spark: SparkSession, scoring: KerasStreamModel, folder: Path, ids: Sequence[int]) -> dict[int, float]:
    """Return what a scoring stream predicts for ids, by the versions that are there."""
    arrive(spark, folder / "in", [ids])
    arriving = spark.readStream.schema("id bigint, label float").parquet(str(folder / "in"))
    writer = scoring.transform(arriving).writeStream.option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start(str(folder / "out"))
    assert query.awaitTermination(int(patience(120)))
    rows = spark.read.parquet(str(folder / "out")).collect()
    newest = max(row["version"] for row in rows)
    return {row["id"]: -row["prediction"] for row in rows if row["version"] == newest}


@pytest.mark.slow
def test_versions_have_the_changes_of_rows(spark: SparkSession, tmp_path: Path) -> None:
    """Each version is that of all rows, and its files are those of the rows that have changed."""
    files = [range(8, 50), [1, 2], [2, 3], [3, 51]]
    versions, made = tmp_path / "versions", tmp_path / "rows"
    options: dict[str, Any] = {"window": 1, "batch_size": 1, "publish": Versions(str(versions), keep=9)}
    folder, checkpoint = tmp_path / "in", tmp_path / "checkpoint"
    stream = arrive(spark, folder, files[:1])
    _, training = train(counting(wide(made, expire_after_commits=44)), stream, checkpoint, **options)
    assert training.awaitTermination(patience(120))
    scoring = KerasStreamModel(versions, features_col="id", custom_objects={"total": total})
    assert score(spark, scoring, tmp_path / "scored", [1, 8, 9]) == {1: 0.0, 8: 1.0, 9: 1.0}
    arrive(spark, folder, files[1:])
    trainer, training = train(counting(wide(made, expire_after_commits=44)), stream, checkpoint, **options)
    assert training.awaitTermination(patience(120))
    # By commits: 42, 44, 46, 48. At 48, a row has expired whose last touch was one of the first four.
    expected = {number: np.bincount(np.concatenate(files[: number + 1]), minlength=ROWS) for number in range(4)}
    for number in scoring.published:
        model = scoring.at(number).keras_model
        found = -np.ravel(model.predict(np.arange(ROWS)[:, None], verbose=0))
        alive = counts_of(model.get_layer("table"))
        assert alive == {row: found[row] for row in alive}
        np.testing.assert_array_equal(found[list(alive)], expected[number][list(alive)])
        assert len(alive) == np.count_nonzero(expected[number]) - {0: 0, 1: 0, 2: 2, 3: 4}[number]
    assert alive == counts_of(trainer.model.get_layer("table"))
    now = score(spark, scoring, tmp_path / "scored", [1, 2, 3, 51])
    assert now == {1: 1.0, 2: 2.0, 3: 2.0, 51: 1.0}
    layer = scoring.at(3).keras_model.get_layer("table")
    entries = listed_files(layer.saved_rows, layer.table())
    assert [entry["rows"] for entry in entries] == [42, 2, 2, 2, 2, 2]


@pytest.mark.slow
def test_a_scoring_process_reads_only_the_changes(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = tmp_path / "versions"
    options: dict[str, Any] = {"window": 1, "batch_size": 1, "publish": versions}
    stream = arrive(spark, tmp_path / "in", [[*range(40)]])
    _, training = train(counting(wide(tmp_path / "rows")), stream, tmp_path / "checkpoint", **options)
    assert training.awaitTermination(patience(120))
    layer = KerasStreamModel(versions, custom_objects={"total": total}).keras_model.get_layer("table")
    np.testing.assert_array_equal(layer.open_rows().take(np.array([7, 8, 50])).ravel(), [-1, -1, 0])
    arrive(spark, tmp_path / "in", [[7, 50]])
    _, training = train(counting(wide(tmp_path / "rows")), stream, tmp_path / "checkpoint", **options)
    assert training.awaitTermination(patience(120))
    newer = KerasStreamModel(versions, custom_objects={"total": total}).keras_model.get_layer("table")
    read = []
    real = LocalFiles.read
    monkeypatch.setattr(LocalFiles, "read", lambda self, name: read.append(name) or real(self, name))
    layer.rows, layer.rows_checksum = newer.saved_rows
    np.testing.assert_array_equal(layer.open_rows().take(np.array([7, 8, 50])).ravel(), [-2, -1, -1])
    assert len([name for name in read if name.endswith(".parquet")]) == 1


@pytest.mark.slow
def test_versions_have_the_variables_in_the_order_of_the_model(spark: SparkSession, tmp_path: Path) -> None:
    """Workers have the dense variables first, and then the tables."""
    keras.utils.set_random_seed(2)
    ids = keras.Input((1,), dtype="int64", name="id")
    hidden = keras.layers.Flatten()(keras.layers.Embedding(ROWS, 3, name="table")(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.BatchNormalization()(hidden)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    stream, versions = arrive(spark, tmp_path / "in", DRAWN[:1]), tmp_path / "versions"
    trainer, training = train(model, stream, tmp_path / "checkpoint", tables=["table"], publish=versions)
    assert training.awaitTermination(patience(120))
    for published, trained in zip(
        KerasStreamModel(versions).keras_model.get_weights(), training.model().get_weights(), strict=True
    ):
        np.testing.assert_array_equal(published, trained)
    assert any("by rows: 'table'" in row["text"] for row in trainer.events.collect())
