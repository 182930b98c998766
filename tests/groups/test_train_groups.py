"""One model for each group, trained on Spark and compared with plain Keras."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from support.patience import patience
from support.training.spark_jobs import assert_no_jobs

from distkeras import Trainer, rules
from distkeras.data.ordering import partitioned
from distkeras.groups import job
from distkeras.groups.results import GroupResults
from distkeras.ml.groups import KerasGroupModel
from distkeras.ps.errors import (
    ConfigurationError,
    DeadlineError,
    DifferentJobError,
    EmptyDataError,
    LedgerError,
    OwnershipLostError,
)
from distkeras.ps.rules import Rule
from distkeras.ps.transport.deadlines import Deadlines

SHOPS, BATCH, EPOCHS, SEED = 12, 8, 3, 5


def rows_of(spark: SparkSession, shops: int = SHOPS) -> DataFrame:
    """Return a separable problem for each shop; shop ``sN`` has 10 + N rows."""
    rng = np.random.default_rng(3)
    frames = []
    for shop in range(shops):
        x = rng.normal(size=(10 + shop, 2)).astype(np.float32)
        label = (x @ rng.normal(size=2) > 0).astype(np.int64)
        frames.append(pd.DataFrame({"shop": f"s{shop}", "features": x.tolist(), "label": label}))
    schema = "shop string, features array<float>, label long"
    return spark.createDataFrame(pd.concat(frames), schema).repartition(3)


def model_with_all_kinds_of_state() -> keras.Model:
    """Return a model with weights, moving averages, and a seed that changes at each step."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((2,)),
        keras.layers.Dense(6, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.3, seed=4),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
    return keras.Sequential(layers)


def small_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, activation="sigmoid")])


def trainer(model: keras.Model | None = None, **options: Any) -> Trainer:
    settings = {
        "worker_optimizer": keras.optimizers.Adam(0.05),
        "loss": "binary_crossentropy",
        "metrics": ["accuracy"],
        "num_workers": 2,
        "batch_size": BATCH,
        "num_epoch": EPOCHS,
        "seed": SEED,
    }
    return Trainer(model or model_with_all_kinds_of_state(), "agn", **settings | options)


def compiled_model() -> keras.Model:
    model = model_with_all_kinds_of_state()
    model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy")
    model.optimizer.build(model.trainable_variables)
    return model


def compiled_trainer(model: keras.Model, rule: str | Rule = "agn") -> Trainer:
    return Trainer(model, rule, num_workers=1, batch_size=BATCH)


@pytest.fixture(scope="module")
def one_shop(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[DataFrame, Path]:
    """Return rows, and the folder of a job that trained on them and was resumed by an equal job."""
    df, path = rows_of(spark, 1), tmp_path_factory.mktemp("one shop") / "models"
    for resume in (False, True):
        compiled_trainer(compiled_model()).train_groups(df, by="shop", path=path, resume=resume)
    return df, path


@pytest.fixture(scope="module")
def twelve_shops(spark: SparkSession) -> GroupResults:
    """Return the models of all shops."""
    return trainer().train_groups(rows_of(spark), by="shop")


def test_each_model_is_that_of_plain_keras_to_the_bit(spark: SparkSession, twelve_shops: GroupResults) -> None:
    df, groups = rows_of(spark), twelve_shops
    table = {row["shop"]: row for row in groups.table.collect()}
    assert {shop: row["rows"] for shop, row in table.items()} == {f"s{n}": 10 + n for n in range(SHOPS)}
    for shop in ("s6", "s11"):  # 2 and 3 mini-batches, the first of which are complete
        mine = trainer()
        _, spec = mine._checked_columns(df)  # noqa: SLF001 - the trainer reads these columns
        ready = partitioned(df.where(F.col("shop") == shop), spec, 1).toPandas()
        x, y = np.stack(ready["features"]).astype(np.float32), ready["label"].to_numpy()
        model = model_with_all_kinds_of_state()
        model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=["accuracy"])
        for epoch in range(EPOCHS):
            order = np.random.default_rng((SEED, 0, epoch)).permutation(len(x))
            history = model.fit(x[order], y[order], batch_size=BATCH, shuffle=False, verbose=0).history
        for ours, plain in zip(groups.model(shop).get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, plain)
        row = table[shop]
        assert row["loss"] == pytest.approx(history["loss"][0], rel=1e-5)  # Keras computes this mean in float32
        assert row["metrics"]["accuracy"] == pytest.approx(history["accuracy"][0], rel=1e-5)
        assert row["error"] is None


@pytest.mark.slow
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="models side by side are TensorFlow's")
def test_groups_train_side_by_side_and_their_weights_are_rows(spark: SparkSession) -> None:
    df = rows_of(spark, 3)
    keras.utils.set_random_seed(1)
    layers = [keras.Input((2,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1, activation="sigmoid")]
    mine = trainer(keras.Sequential(layers), worker_optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    together = mine.train_groups(df, by="shop", side_by_side=3)  # `test_side_by_side` compares the numbers
    rows = {row["shop"]: (row["rows"], row["error"]) for row in together.table.collect()}
    assert rows == {f"s{number}": (10 + number, None) for number in range(3)}
    weights = {row["shop"]: bytes(row["weights"]) for row in together.weights.collect()}
    assert set(weights) == set(rows)
    assert weights["s1"] == b"".join(array.tobytes() for array in together.model("s1").get_weights())
    assert len(set(weights.values())) == 3
    with pytest.raises(ConfigurationError, match="`side_by_side` must be a positive integer"):
        mine.train_groups(df, by="shop", side_by_side=0)


@pytest.mark.slow
def test_keys_may_have_several_columns_and_nulls(spark: SparkSession) -> None:
    year = F.when(F.col("label") == 0, F.lit(None)).otherwise(F.lit(2020)).cast("int")
    df = rows_of(spark, 2).withColumn("year", year)
    expected = {(row["shop"], row["year"]): row["count"] for row in df.groupBy("shop", "year").count().collect()}
    groups = trainer().train_groups(df, by=["shop", "year"])
    assert groups.table.columns == ["shop", "year", "rows", "seconds", "loss", "metrics", "error"]
    assert {(row["shop"], row["year"]): row["rows"] for row in groups.table.collect()} == expected
    assert None in {year for _, year in expected}
    assert len(expected) == 4
    assert groups.model({"shop": "s1", "year": None}).get_weights()


@pytest.mark.slow
def test_an_invalid_group_is_a_row_with_its_error(spark: SparkSession) -> None:
    label = F.when(F.col("shop") == "s1", F.lit(None)).otherwise(F.col("label"))
    huge = F.when(F.col("shop") == "s2", F.array(F.lit(1e38), F.lit(-1e38))).otherwise(F.col("features"))
    df = rows_of(spark, 4).withColumns({"label": label, "features": huge.cast("array<float>")})
    keras.utils.set_random_seed(1)
    linear = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    groups = trainer(linear, loss="mse", metrics=None, worker_optimizer="sgd").train_groups(df, by="shop")
    errors = {row["shop"]: (row["error"], row["loss"]) for row in groups.table.collect()}
    assert errors["s0"][0] is None
    assert errors["s3"][0] is None
    assert errors["s1"][0].startswith("BadValueError: values must not be null")
    assert "'label'" in errors["s1"][0]
    assert errors["s2"][0].startswith("NonFiniteError: the loss is inf in epoch 0")
    assert errors["s1"][1] is None
    assert errors["s2"][1] is None
    with pytest.raises(ConfigurationError, match=r"shop=s1 was not trained: BadValueError"):
        groups.model("s1")
    with pytest.raises(ConfigurationError, match="there is no model for shop=s9"):
        groups.model("s9")


@pytest.mark.slow
def test_a_large_group_is_trained_as_a_job(spark: SparkSession) -> None:
    df = rows_of(spark, 4)
    small = trainer().train_groups(df, by="shop")
    mixed = trainer().train_groups(df, by="shop", rows_max=12)
    rows = {row["shop"]: row["rows"] for row in mixed.table.collect()}
    assert rows == {"s0": 10, "s1": 11, "s2": 12, "s3": 13}
    for shop, equal in (("s2", True), ("s3", False)):
        pairs = zip(small.model(shop).get_weights(), mixed.model(shop).get_weights(), strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs) == equal


@pytest.mark.slow
def test_a_large_group_keeps_its_class_weights_and_its_timestamp(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `Row` of Spark has local times.
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        day = F.when(F.col("shop") == "s0", F.lit("2020-07-01 12:00:00Z")).otherwise(F.lit("2021-01-01 00:00:00Z"))
        df = rows_of(spark, 2).withColumn("day", day.cast("timestamp"))
        df = df.withColumn("label", F.lit(1))
        means = {}
        for weight in (1.0, 3.0):
            mine = trainer(small_model(), class_weight={1: weight}, num_epoch=1)
            groups = mine.train_groups(df, by="day", rows_max=10)
            rows = {row["rows"]: row for row in groups.weights.join(groups.table, "day").collect()}
            assert [rows[count]["error"] for count in (10, 11)] == [None, None]
            means[weight] = [rows[count]["loss"] for count in (10, 11)]
            fitted = KerasGroupModel(groups, features_col="features")
            assert fitted.transform(df).where("prediction is not null").count() == df.count()
        assert means[3.0][1] > 2 * means[1.0][1]
    finally:
        monkeypatch.undo()
        time.tzset()


def killing(flag: Path, first: float) -> Callable[[Any], Any]:
    """Return a function that kills, once, the process that decodes a row whose first feature is ``first``."""

    def decode(value: list[float]) -> np.ndarray:
        if value[0] == first and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.asarray(value, np.float32)

    return decode


@pytest.mark.slow
def test_a_killed_task_is_repeated_and_each_group_counts_once(
    spark: SparkSession, tmp_path: Path, twelve_shops: GroupResults
) -> None:
    df, flag = rows_of(spark), tmp_path / "killed"
    row = df.where("shop = 's6'").first()
    assert row is not None
    groups = trainer(decode=killing(flag, row["features"][0])).train_groups(df, by="shop", path=tmp_path / "models")
    assert flag.exists()
    found, expected = (sorted(each.weights.collect()) for each in (groups, twelve_shops))
    assert found == expected
    assert [row["shop"] for row in found] == sorted(f"s{n}" for n in range(SHOPS))


@pytest.mark.slow
def test_tasks_that_save_nothing_for_too_long_end_the_job(spark: SparkSession, tmp_path: Path) -> None:
    released, most = tmp_path / "released", patience(120)

    def decode(value: list[float]) -> np.ndarray:
        deadline = time.monotonic() + most
        while not released.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the test must release its tasks within {most:g} s")
            time.sleep(0.05)
        return np.asarray(value, np.float32)

    waiting = trainer(small_model(), num_workers=1, decode=decode, deadlines=Deadlines(silence=1.5))
    try:
        with pytest.raises(
            DeadlineError, match=r"waited 1.5 s .*for a task to save groups .* \d tasks have ended so far"
        ):
            waiting.train_groups(rows_of(spark, 1), by="shop")
        assert_no_jobs(spark)
    finally:
        released.touch()


def files_below(path: Path) -> dict[str, int]:
    return {str(file.relative_to(path)): file.stat().st_mtime_ns for file in path.rglob("part-*.parquet")}


@pytest.mark.slow
def test_a_job_is_resumed_in_its_folder(spark: SparkSession, tmp_path: Path) -> None:
    df, path = rows_of(spark, 4), tmp_path / "my models ä+#%20"
    trainer(small_model()).train_groups(df.where("shop != 's3'"), by="shop", path=path)
    before = files_below(path)
    with pytest.raises(ConfigurationError, match="`path` must be an empty folder"):
        trainer(small_model()).train_groups(df, by="shop", path=path)
    with pytest.raises(DifferentJobError, match="`num_epoch` must be 3"):
        trainer(small_model(), num_epoch=4).train_groups(df, by="shop", path=path, resume=True)
    again = trainer(small_model()).train_groups(df, by="shop", path=path, resume=True)
    assert before.items() < files_below(path).items()
    assert sorted(row["shop"] for row in again.table.collect()) == ["s0", "s1", "s2", "s3"]
    changed = "the input must have the same rows as before .* other rows of "
    with pytest.raises(LedgerError, match=changed + r"shop=s1 \(11 rows before, \d now\)"):
        trainer(small_model()).train_groups(df.where("label = 0 or shop != 's1'"), by="shop", path=path, resume=True)


@pytest.mark.slow
def test_an_older_driver_neither_harms_its_successor_nor_succeeds(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    df, path = rows_of(spark, 2), tmp_path / "models"
    results: list[GroupResults] = []

    def write_late(self: Any, groups: DataFrame, name: str) -> None:
        monkeypatch.setattr(job.GroupJob, "write", write)
        write(self, groups, name)
        results.append(trainer(small_model()).train_groups(df, by="shop", path=path, resume=True))

    write = job.GroupJob.write
    monkeypatch.setattr(job.GroupJob, "write", write_late)
    with pytest.raises(OwnershipLostError, match="continues the job"):
        trainer(small_model()).train_groups(df, by="shop", path=path)
    (successor,) = results
    assert successor.table.count() == 2
    assert successor.model("s1").get_weights()


@pytest.mark.slow
def test_weights_that_are_not_finite_are_an_error(spark: SparkSession) -> None:
    """The loss of the last step is of the weights before it, so it is finite."""
    df = rows_of(spark, 1)
    layers = [keras.Input((2,)), keras.layers.Dense(1)]
    huge = keras.optimizers.SGD(3e38)
    mine = trainer(
        keras.Sequential(layers), loss="mse", metrics=None, worker_optimizer=huge, batch_size=64, num_epoch=1
    )
    (row,) = mine.train_groups(df, by="shop").table.collect()
    assert (row["error"] or "").startswith("NonFiniteError: the weights are not finite after the last step")
    assert (row["rows"], row["loss"]) == (10, None)


@pytest.mark.slow  # the test above has another number of epochs
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("weights", "state"),
        ("optimizer", "state"),
        ("rule", "rule.hyper_parameters.window"),
        ("rows_max", "rows_max"),
        ("side_by_side", "side_by_side"),
    ],
)
def test_a_job_that_would_train_other_models_is_not_resumed(
    one_shop: tuple[DataFrame, Path], changed: str, named: str
) -> None:
    df, path = one_shop
    model = compiled_model()
    if changed == "weights":
        model.layers[0].bias.assign(np.ones(6))
    elif changed == "optimizer":
        model.optimizer.iterations.assign(1)
    rule = rules.make("agn", window=7) if changed == "rule" else "agn"
    rows_max = 9 if changed == "rows_max" else None
    options: dict[str, Any] = {"rows_max": rows_max, "side_by_side": 2 if changed == "side_by_side" else 1}
    with pytest.raises(DifferentJobError, match=rf"`{named}` must be [^;]*$"):
        compiled_trainer(model, rule).train_groups(df, by="shop", path=path, resume=True, **options)


@pytest.mark.slow
def test_invalid_arguments_are_refused(spark: SparkSession) -> None:
    df = rows_of(spark, 1)
    with pytest.raises(EmptyDataError):
        trainer(small_model()).train_groups(df.where("false"), by="shop")
    with pytest.raises(ConfigurationError, match="`path` must have none of the characters"):
        trainer(small_model()).train_groups(df, by="shop", path="models[1]")
    with pytest.raises(ConfigurationError, match="`resume` needs `path`"):
        trainer(small_model()).train_groups(df, by="shop", resume=True)
