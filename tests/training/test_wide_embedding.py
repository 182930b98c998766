"""Spark jobs with a table that no process holds completely: its numbers, its files and predictions from them."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import DataFrame, SparkSession
from support.training.spark_jobs import step_callback_layer, wait_at_step

from distkeras import EarlyStopping, KerasCallbacks, KerasEstimator, KerasModel, Network, Trainer
from distkeras.callbacks import Callback, CallbackContext, CenterWeights, TrainingSetup
from distkeras.keras_model.stored_rows import load_rows
from distkeras.layers import WideEmbedding, hashed_ids
from distkeras.ps.errors import BadValueError, ConfigurationError
from distkeras.ps.protocol.tables import initial_rows
from distkeras.ps.rules import make

pytestmark = [pytest.mark.usefixtures("nothing_left"), pytest.mark.timeout(240)]

ROWS, WIDTH = 50, 4


def scored(table: keras.Layer, *hooks: keras.Layer, optimizer: Any = None) -> keras.Model:
    """Return a model of a table that is looked up twice, an extra input, and a dense head."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    user, others = keras.Input((1,), dtype="int64", name="user"), keras.Input((2,), dtype="int64", name="others")
    extra = keras.Input((3,), name="extra")
    hidden = layers.Concatenate()([layers.Flatten()(table(user)), layers.Flatten()(table(others)), extra])
    for hook in hooks:
        hidden = hook(hidden)
    model = keras.Model([user, others, extra], layers.Dense(1)(layers.Dense(6, activation="tanh")(hidden)))
    model.compile(optimizer or keras.optimizers.Adagrad(0.1), "mse")
    return model


def ratings(spark: SparkSession, rows: int = ROWS, count: int = 70) -> DataFrame:
    draw = np.random.default_rng(5)
    data = [
        (
            int(draw.integers(rows)),
            draw.integers(0, rows, 2).tolist(),
            draw.normal(size=3).tolist(),
            float(draw.normal()),
        )
        for _ in range(count)
    ]
    return spark.createDataFrame(data, "user bigint, others array<bigint>, extra array<double>, label double")


def trainer(model: keras.Model, **options: Any) -> Trainer:
    features = ["user", "others", "extra"]
    defaults: dict[str, Any] = {"num_workers": 1, "batch_size": 8, "num_epoch": 2, "features_col": features}
    return Trainer(model, make("downpour", window=3), **(defaults | options))


def wide(folder: Path, rows: int = ROWS, **options: Any) -> WideEmbedding:
    return WideEmbedding(rows, WIDTH, str(folder), scale=0.5, seed=9, name="table", **options)


def trained_rows(layer: WideEmbedding) -> dict[int, np.ndarray]:
    """Return the rows in the folder of a trained model, by id."""
    assert layer.saved_rows is not None
    blocks = list(load_rows(layer.saved_rows, layer.table()))
    found = {int(row): vector for ids, vectors in blocks for row, vector in zip(ids, vectors, strict=True)}
    assert len(found) == sum(len(ids) for ids, _ in blocks)
    return found


def inputs_of(df: DataFrame) -> list[np.ndarray]:
    data = df.toPandas()
    return [data.user.to_numpy()[:, None], np.stack(data.others), np.stack(data.extra).astype(np.float32)]


def test_the_numbers_are_those_of_an_ordinary_table(spark: SparkSession, tmp_path: Path) -> None:
    df, layer = ratings(spark), wide(tmp_path)
    initial = initial_rows(layer.table(), np.arange(ROWS))
    table = keras.layers.Embedding(ROWS, WIDTH, name="table")
    dense = scored(table)
    table.set_weights([initial])
    expected = trainer(dense, tables=["table"])
    whole = expected.train(df)
    made = trainer(scored(layer))
    model = made.train(df)
    assert made.history.toPandas().loss.tolist() == expected.history.toPandas().loss.tolist()
    rows = trained_rows(model.get_layer("table"))
    expected_rows = whole.get_layer("table").get_weights()[0]
    assert set(rows) == {row for row in range(ROWS) if (expected_rows[row] != initial[row]).any()}
    for row, vector in rows.items():
        np.testing.assert_array_equal(vector, expected_rows[row])
    inputs = inputs_of(df)
    np.testing.assert_array_equal(model.predict_on_batch(inputs), whole.predict_on_batch(inputs))
    spark_rows = spark.read.parquet(model.get_layer("table").rows)
    assert spark_rows.dtypes == [("id", "bigint"), ("vector", "array<float>")]
    assert spark_rows.count() == len(rows)


@pytest.mark.slow
def test_training_continues_from_the_rows(spark: SparkSession, tmp_path: Path) -> None:
    """The optimizers' accumulators start from zero, as with an ordinary table."""
    df, layer = ratings(spark), wide(tmp_path)
    table = keras.layers.Embedding(ROWS, WIDTH, name="table")
    whole, model = scored(table), scored(layer)
    table.set_weights([initial_rows(layer.table(), np.arange(ROWS))])
    for _ in range(2):
        whole, model = trainer(whole, tables=["table"]).train(df), trainer(model).train(df)
    inputs = inputs_of(df)
    np.testing.assert_array_equal(model.predict_on_batch(inputs), whole.predict_on_batch(inputs))


class Held(EarlyStopping):
    """A callback that evaluates the center after two commits; the worker waits for that."""

    def __init__(self, df: DataFrame, evaluated: Path) -> None:
        super().__init__(df, every_commits=1)
        self.evaluated = evaluated

    def on_center(self, context: CallbackContext) -> None:
        super().on_center(context)
        if context.clock == 2:
            self.evaluated.touch()

    @property
    def losses(self) -> dict[float, float]:
        return {found["clock"]: found["loss"] for found in self.evaluations if found["clock"] >= 2}


class UsesMissingValues(Held):
    """A callback that uses the model and other rows at the end, which are not available."""

    def on_end(self, context: CallbackContext) -> None:
        super().on_end(context)
        with pytest.raises(ConfigurationError, match=r"`context\.model` and `context\.restore_model` must not be used"):
            context.model  # noqa: B018 - reading it raises
        assert self.validation_batch is not None
        arrays = self.validation_batch.x
        others = replace(self.validation_batch, x=(np.arange(len(arrays[0]))[:, None], *arrays[1:]))
        with pytest.raises(Exception, match=r"must be evaluated on rows that `TrainingSetup.read_rows` has returned"):
            context.evaluate(others)


@pytest.mark.slow
def test_a_center_is_evaluated_with_the_rows_of_its_clock(spark: SparkSession, tmp_path: Path) -> None:
    """The validation losses are those of an ordinary table, which the driver holds completely."""
    df, validation = ratings(spark), ratings(spark, count=9)
    table = keras.layers.Embedding(ROWS, WIDTH, name="table")
    dense = scored(table, step_callback_layer(wait_at_step(8, tmp_path / "dense")))
    table.set_weights([initial_rows(wide(tmp_path).table(), np.arange(ROWS))])
    expected, found = Held(validation, tmp_path / "dense"), UsesMissingValues(validation, tmp_path / "wide")
    trainer(dense, tables=["table"]).train(df, callbacks=[expected])
    hook = step_callback_layer(wait_at_step(8, tmp_path / "wide"))
    model = trainer(scored(wide(tmp_path), hook)).train(df, callbacks=[found])
    last = max(expected.losses)
    assert last > 2
    for clock in (2, last):
        assert found.losses[clock] == pytest.approx(expected.losses[clock], rel=1e-5)
    assert found.losses[2] != found.losses[last]
    # The returned model is not limited to the rows of an evaluation: it looks up any row.
    np.testing.assert_array_equal(model.get_layer("table")(np.arange(ROWS)).shape, (ROWS, WIDTH))


@pytest.mark.slow
def test_a_wide_table_trains_with_its_server_in_the_cluster(spark: SparkSession, tmp_path: Path) -> None:
    df, inputs = ratings(spark), inputs_of(ratings(spark))
    expected = trainer(scored(wide(tmp_path / "rows"))).train(df)
    made = trainer(scored(wide(tmp_path / "rows")), network=Network(server="cluster"))
    stopping = EarlyStopping(df, every_commits=2)
    model = made.train(df, checkpoint=tmp_path / "checkpoint", callbacks=[stopping])
    errors = model.predict_on_batch(inputs)[:, 0] - df.toPandas().label.to_numpy()
    assert stopping.evaluations[-1]["loss"] == pytest.approx(np.mean(errors**2), rel=1e-5)
    np.testing.assert_array_equal(model.predict_on_batch(inputs), expected.predict_on_batch(inputs))
    with pytest.raises(ConfigurationError, match="continues from trained rows"):
        trainer(model, network=Network(server="cluster")).train(df, checkpoint=tmp_path / "other")


@pytest.mark.slow
def test_an_estimator_trains_in_a_pipeline_that_hashes_strings(spark: SparkSession, tmp_path: Path) -> None:
    rows = 2**40
    names = spark.createDataFrame(
        [(f"user {number % 17}", float(number % 3), number >= 51) for number in range(60)],
        "name string, label double, held boolean",
    )
    df = names.withColumn("user", hashed_ids("name", rows))
    user = keras.Input((1,), dtype="int64")
    layer = WideEmbedding(rows, 1, str(tmp_path / "rows"), name="table")
    model = keras.Model(user, keras.layers.Flatten()(layer(user)))  # the model has no other weights
    estimator = KerasEstimator(
        model, make("downpour", window=2), worker_optimizer=keras.optimizers.SGD(0.1), loss="mse", features_col="user",
        label_col="label", num_workers=2, batch_size=8, num_epoch=2, validation_indicator_col="held",
    )  # fmt: skip
    fitted = Pipeline(stages=[estimator]).fit(df)
    trained: Any = fitted.stages[0]
    held_out = trained.evaluate(df.where("held"))["loss"]
    assert trained.summary.validation[-1]["loss"] == pytest.approx(held_out, rel=1e-5)
    fitted.write().overwrite().save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    stage = loaded.stages[0]
    assert isinstance(stage, KerasModel)
    assert len(trained_rows(stage.keras_model.get_layer("table"))) == 17
    with_its_rows = float(
        np.mean(
            (stage.keras_model.predict_on_batch(np.array(df.toPandas().user)) - df.toPandas().label.to_numpy()[:, None])
            ** 2
        )
    )
    assert stage.evaluate(df)["loss"] == pytest.approx(with_its_rows, rel=1e-5)
    other = df.limit(5).union(spark.createDataFrame([("x", 0.0, False, 5)], df.schema))
    predicted = loaded.transform(other).toPandas()
    expected = stage.keras_model.predict_on_batch(predicted.user.to_numpy()[:, None]).reshape(-1)
    np.testing.assert_array_equal(predicted.prediction.to_numpy().astype(np.float32), expected)
    with pytest.raises(Exception, match=r"ids of 'table' must be in \[0, .*Received: -3"):
        loaded.transform(spark.createDataFrame([("x", 0.0, False, -3)], df.schema)).collect()


def test_hashes_do_not_change(spark: SparkSession) -> None:
    df = spark.createDataFrame([("7", 7), ("user", 2**40), (None, None)], "text string, number bigint")
    texts = [row[0] for row in df.select(hashed_ids("text", 2**40)).collect()]
    numbers = [row[0] for row in df.select(hashed_ids(df.number, 2**40)).collect()]
    assert texts[0] == numbers[0]
    assert texts[2] is None is numbers[2]
    assert texts[:2] == [613285906913, 13176444250]


#: Bytes that a worker may use in addition to those after its first step; a row has `LONG` elements.
SPARE, LONG, MANY, BATCH = 96 << 20, 1024, 48_000, 120


def limited_layer() -> keras.Layer:
    """Return a layer that limits the memory of a worker's process; executors receive the function by value."""
    spare, array, steps = SPARE, 4 * MANY * LONG, MANY // BATCH

    def limit(step: int) -> None:
        if step == 1:
            lines = Path("/proc/self/status").read_text().splitlines()
            used = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmData:"))
            resource.setrlimit(resource.RLIMIT_DATA, (used + spare, resource.RLIM_INFINITY))
            try:
                np.ones(array, np.uint8)
            except MemoryError:
                return
            raise AssertionError("there is memory for all rows")
        if step == steps - 1:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    return step_callback_layer(limit)


@pytest.mark.slow
def test_more_rows_may_be_touched_than_fit_a_workers_memory(spark: SparkSession, tmp_path: Path) -> None:
    assert 4 * LONG * MANY > 3 * SPARE / 2
    user = keras.Input((1,), dtype="int64")
    layer = WideEmbedding(2**50, LONG, str(tmp_path), scale=0.0, name="table")
    hidden = limited_layer()(keras.layers.Flatten()(layer(user)))
    model = keras.Model(user, keras.layers.Dense(1, kernel_initializer="ones")(hidden))
    df = spark.range(MANY).selectExpr("id * 20000000000 as user", "1.0 as label")
    made = Trainer(
        model,
        make("downpour", window=2),
        worker_optimizer=keras.optimizers.SGD(0.1),
        loss="mse",
        features_col="user",
        num_workers=1,
        batch_size=BATCH,
        num_epoch=1,
    )
    trained = made.train(df).get_layer("table")
    assert sum(row["table_rows"] for row in made.commits.collect()) == MANY
    table = spark.read.parquet(trained.rows)
    assert table.count() == MANY
    assert table.where("id % 20000000000 = 0 and exists(vector, x -> x != 0)").count() == MANY


class TestErrors:
    """Errors, all of them before any work starts except for those that only the rows show."""

    @pytest.mark.slow
    @pytest.mark.parametrize("bad", [-1, pytest.param(ROWS, marks=pytest.mark.slow)])
    def test_an_id_outside_the_table_is_an_error(self, spark: SparkSession, tmp_path: Path, bad: int) -> None:
        df = ratings(spark, count=3).union(
            spark.createDataFrame([(bad, [0, 1], [0.0, 0.0, 0.0], 0.0)], ratings(spark, count=1).schema)
        )
        with pytest.raises(BadValueError, match=rf"ids of 'table' must be in \[0, {ROWS}\).*Received: {bad}") as caught:
            trainer(scored(wide(tmp_path))).train(df)
        assert caught.value.column == "user"

    @pytest.mark.slow
    def test_an_option_that_excludes_tables_by_rows_is_refused(self, spark: SparkSession, tmp_path: Path) -> None:
        """`test_table_choice` tests which options do."""
        with pytest.raises(ConfigurationError, match=r"'table' must travel by rows.*Adam may move rows"):
            trainer(scored(wide(tmp_path)), worker_optimizer="adam").train(ratings(spark))

    @pytest.mark.slow
    def test_a_folder_that_cannot_be_written_to_is_refused(self, spark: SparkSession, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigurationError, match="the `folder` of 'table' must be"):
            trainer(scored(wide(tmp_path / "file"))).train(ratings(spark))

    @pytest.mark.slow
    def test_train_groups_and_fit_refuse_a_wide_table(self, spark: SparkSession, tmp_path: Path) -> None:
        df, model = ratings(spark), scored(wide(tmp_path))
        with pytest.raises(ConfigurationError, match="no WideEmbedding for `train_groups`"):
            trainer(model).train_groups(df, by="user", path=str(tmp_path))
        with pytest.raises(ConfigurationError, match=r"must be trained by `distkeras\.Trainer`"):
            model.fit(inputs_of(df), np.zeros(70), verbose=0)

    @pytest.mark.parametrize(
        "callback",
        [
            pytest.param(
                lambda df: EarlyStopping(df, restore_best_weights=True), id="restores", marks=pytest.mark.slow
            ),
            pytest.param(lambda df: KerasCallbacks([], df), id="uses the model"),
        ],
    )
    def test_a_callback_that_needs_the_whole_model_is_refused(
        self, spark: SparkSession, tmp_path: Path, callback: Callable[[DataFrame], Callback]
    ) -> None:
        begun = []

        class Next(Callback):
            def on_begin(self, setup: TrainingSetup) -> None:
                begun.append(setup)

        df = ratings(spark)
        with pytest.raises(ConfigurationError, match=r"a callback that restores a center, or uses `context\.model`"):
            trainer(scored(wide(tmp_path))).train(df, callbacks=[callback(df), Next()])
        assert not begun  # the error occurs before any work

    @pytest.mark.slow
    def test_a_validation_row_with_an_id_outside_the_table_is_an_error(
        self, spark: SparkSession, tmp_path: Path
    ) -> None:
        bad = spark.createDataFrame([(3, [0, ROWS], [0.0, 0.0, 0.0], 0.0)], ratings(spark, count=1).schema)
        with pytest.raises(BadValueError, match=rf"ids of 'table' must be .*Received: {ROWS} in row 0") as caught:
            trainer(scored(wide(tmp_path))).train(ratings(spark), callbacks=[EarlyStopping(bad)])
        assert caught.value.column == "others"

    @pytest.mark.slow
    def test_a_callback_that_restores_other_weights_is_refused(self, spark: SparkSession, tmp_path: Path) -> None:
        class First(Callback):
            def on_end(self, context: CallbackContext) -> None:
                weights = context.center
                context.restore(CenterWeights(0, np.zeros_like(weights.vector), weights.moving_statistics))

        with pytest.raises(ConfigurationError, match="a callback that restores a center"):
            trainer(scored(wide(tmp_path))).train(ratings(spark), callbacks=[First(every_commits=1)])
