"""The trainer classes of dist-keras: the rule that each uses, and that each trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.present import present
from support.training.spark_jobs import (
    accuracy,
    assert_nothing_left,
    batches_of,
    blobs,
    counting_model,
    counts,
    table,
    total,
    wrong_model,
)

from distkeras import (
    ADAG,
    AEASGD,
    AGN,
    DOWNPOUR,
    EAMSGD,
    EASGD,
    AveragingTrainer,
    DynSGD,
    EnsembleTrainer,
    SingleTrainer,
)
from distkeras.data.batches import DataSpec
from distkeras.data.columns import Column
from distkeras.ps.errors import BadValueError, ConfigurationError

SPARSE = "sparse_categorical_crossentropy"
NAMED: dict[Any, tuple[str, int | None]] = {
    DOWNPOUR: ("downpour", 5),
    AGN: ("agn", 12),
    ADAG: ("adag", 10),
    DynSGD: ("dynsgd", 5),
    AEASGD: ("aeasgd", 32),
    EASGD: ("easgd", 10),
    EAMSGD: ("eamsgd", 32),
    AveragingTrainer: ("averaging", None),
    SingleTrainer: ("downpour", 10),
}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert_nothing_left()


@pytest.fixture(scope="module")
def clouds(spark: SparkSession) -> DataFrame:
    return table(spark, *blobs()).cache()


def sgd(rate: float = 0.1) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(rate)


@pytest.mark.parametrize("kind", NAMED)
def test_a_class_has_its_rule_and_window(kind: type[Any]) -> None:
    name, window = NAMED[kind]
    known = {"form": "4.7"} if kind is ADAG else {}  # the name alone does not select dist-keras' ADAG
    trainer = kind(wrong_model(), sgd(), SPARSE, **known)
    assert (trainer.rule.name, trainer.rule.window) == (name, window)
    assert kind(wrong_model(), sgd(), SPARSE, communication_window=3, **known).rule.window == 3


def test_hyperparameters_are_keywords() -> None:
    trainer = EAMSGD(wrong_model(), sgd(), SPARSE, rho=2.0, learning_rate=0.05, momentum=0.5, communication_window=4)
    assert trainer.rule.config() == {"window": 4, "rho": 2.0, "learning_rate": 0.05, "momentum": 0.5}
    assert ADAG(wrong_model(), sgd(), SPARSE, form="4.1").rule.config()["form"] == "4.1"


def test_a_hyperparameter_of_another_rule_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="`rho` must be a keyword of DOWNPOUR"):
        DOWNPOUR(wrong_model(), sgd(), SPARSE, rho=1.0)


@pytest.mark.slow
def test_each_trainer_learns(clouds: DataFrame) -> None:
    trainer = DOWNPOUR(wrong_model(), sgd(), SPARSE, batch_size=16, num_epoch=2)
    trainer.train(clouds)
    x, y = blobs(seed=1)
    assert accuracy(trainer.model, x, y) > 0.95
    assert trainer.get_training_time() == trainer.timings["total"] > 0


def test_single_trainer_is_plain_keras(clouds: DataFrame) -> None:
    """The difference is the float32 rounding of about 16 commits."""
    spec = DataSpec((Column("features", (2,)),), (Column("label", (), "int32"),), batch_size=48, epochs=3, seed=5)
    plain = wrong_model()
    plain.compile(sgd(), SPARSE)
    for batch in batches_of(clouds, spec):
        plain.train_on_batch(batch.x[0], batch.y[0])
    trainer = SingleTrainer(wrong_model(), sgd(), SPARSE, batch_size=48, num_epoch=3, seed=5)
    for got, expected in zip(trainer.train(clouds).get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert {row["worker"] for row in trainer.history.collect()} == {0}


@pytest.mark.slow
def test_shuffle_of_train_overrides_the_constructors(clouds: DataFrame) -> None:
    spec = DataSpec((Column("features", (2,)),), (Column("label", (), "int32"),), batch_size=64, shuffle=False)
    plain = wrong_model()
    plain.compile(sgd(), SPARSE)
    for batch in batches_of(clouds, spec):
        plain.train_on_batch(batch.x[0], batch.y[0])
    trainer = SingleTrainer(wrong_model(), sgd(), SPARSE, batch_size=64)
    for got, expected in zip(trainer.train(clouds, shuffle=False).get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


class TestEnsemble:
    @pytest.mark.slow
    def test_each_model_sees_its_own_part_of_the_rows(self, spark: SparkSession) -> None:
        rows = 40
        odd_names = {"features_col": "a.b`c d", "label_col": "a`b"}  # names that need quotes
        df = table(spark, np.eye(rows, dtype=np.float32), np.zeros(rows)).toDF(*odd_names.values())
        model = counting_model(rows)
        trainer = EnsembleTrainer(model, sgd(1.0), total, None, num_ensembles=3, batch_size=8, **odd_names)
        models = trainer.train(df)
        seen = np.array([counts(model) for model in models])
        assert seen.shape == (3, rows)
        assert set(seen.ravel()) == {0.0, 1.0}
        assert seen.sum(0).tolist() == [1.0] * rows
        assert seen.sum(1).min() >= 1
        assert [present(one.history.agg({"samples": "sum"}).first())[0] for one in trainer.trainers] == seen.sum(
            1
        ).tolist()

    @pytest.mark.slow
    def test_a_failure_is_raised(self, spark: SparkSession) -> None:
        df = spark.createDataFrame(
            [([float("nan"), float(n)], 0) for n in range(20)], "features array<float>, label int"
        )
        trainer = EnsembleTrainer(wrong_model(), sgd(), SPARSE, num_ensembles=2)
        with pytest.raises(BadValueError, match="finite") as caught:
            trainer.train(df)
        assert caught.value.column == "features"

    @pytest.mark.parametrize("number", [0, -1, 1.5, True])
    def test_an_invalid_number_of_models_is_refused(self, number: int) -> None:
        with pytest.raises(ConfigurationError, match="`num_ensembles` must be"):
            EnsembleTrainer(wrong_model(), sgd(), SPARSE, num_ensembles=number)
