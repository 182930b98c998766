"""Every rule trains a small network on Fashion-MNIST about as well as plain SGD does with as many gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame, SparkSession
from support.present import present
from support.training.spark_jobs import accuracy, assert_nothing_left, image_classifier

from distkeras import Trainer
from distkeras.data import datasets
from distkeras.ps.rules import all_rules, make

BATCH, EPOCHS, WORKERS = 64, 6, 2
SPARSE = "sparse_categorical_crossentropy"
#: The best learning rate of plain Keras among 0.05, 0.1 and 0.2, within the noise of single runs.
SGD_RATE = 0.1
#: The accuracy by which a rule may be worse.
POINTS = 0.03

#: Learning rates that differ from plain SGD's. All other hyperparameters are each rule's documented defaults.
RATES = {
    # The window's movement is divided by its length, 10, so that the center moves by one mean step a window.
    "agn": 0.2,
    "adag": 0.2,
    # Each payload is divided by 1 + staleness: mostly by 2, with two workers.
    "dynsgd": 0.2,
    # A step is the mean of a round's two gradients: half as many steps as gradients, each of twice the size.
    "ssgd": 0.2,
    # All gradients of a window are taken at the same parameters and added.
    "zealous_downpour": 0.05,
    # Momentum of 0.9 multiplies a step by ten: eta / (1 - 0.9).
    **dict.fromkeys(
        (
            "asgdm",
            "dana_dc",
            "dana_slim",
            "dana_zero",
            "lwp",
            "multi_asgd",
            "nag_asgd",
            "ormo",
            "shifted_momentum",
            "smega2",
            "ssgdm",
            "ssgdm_local",
        ),
        0.01,
    ),
    # The same holds for momentum at the workers; the elastic move also needs eta rho < 1, and it is 0.1 here.
    "eamsgd": 0.02,
    "daso": 0.02,
    # With rho = 5 and n = 2, (n + 1) eta rho is 1.5; it must be below 2.
    "aeasgd": 0.1,
    "easgd": 0.1,
}

#: Numbers of epochs, of a rule and of plain SGD, for rules that need more than `EPOCHS`.
LONGER = {
    # An epoch is one round, which moves a weight by about 0.01: 6 points behind after 6 epochs, 1.5 after 20.
    "fedopt": 20
}


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    (x, y), (x_test, y_test) = datasets.fashion_mnist()
    return x, y, x_test.astype(np.float32) / 255, y_test


@pytest.fixture(scope="module")
def train(
    spark: SparkSession,
    data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    tmp_path_factory: pytest.TempPathFactory,
) -> DataFrame:
    folder = datasets.write_parquet(tmp_path_factory.mktemp("fashion") / "train", data[0], data[1], files=WORKERS)
    return spark.read.parquet(folder)


@pytest.fixture(scope="module")
def sequential(data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> Callable[[int], float]:
    """Return a function of epochs that returns the accuracy of plain Keras, with mini-batches of the same size."""
    x, y, x_test, y_test = data

    @cache
    def accuracy_after(epochs: int) -> float:
        model = image_classifier()
        model.compile(keras.optimizers.SGD(SGD_RATE), SPARSE)
        model.fit(x.astype(np.float32) / 255, y, batch_size=BATCH, epochs=epochs, verbose=0)
        return accuracy(model, x_test, y_test)

    return accuracy_after


#: Options that are not a rule's defaults.
HYPER = {"daso": {"nodes": 2}}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", all_rules())
def test_a_rule_is_within_three_points_of_sgd(
    name: str,
    train: DataFrame,
    data: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    sequential: Callable[[int], float],
    record_property: Callable[[str, object], None],
) -> None:
    rate, epochs = RATES.get(name, SGD_RATE), LONGER.get(name, EPOCHS)
    trainer = Trainer(
        image_classifier(),
        make(name, **HYPER.get(name, {})),
        worker_optimizer=keras.optimizers.SGD(rate),
        loss=SPARSE,
        num_workers=WORKERS,
        batch_size=BATCH,
        num_epoch=epochs,
    )
    found = accuracy(trainer.train(train), data[2], data[3])
    assert_nothing_left()
    steps = present(trainer.commits.agg({"steps": "sum"}).first())[0]
    # The last mini-batch of a partition may be short: per epoch, at most one more for each worker but one.
    expected = epochs * -(-len(data[0]) // BATCH)
    assert expected <= steps <= expected + epochs * (WORKERS - 1)
    behind = sequential(epochs) - found
    for key, value in (("rule", name), ("rate", rate), ("accuracy", found), ("behind", behind)):
        record_property(key, value)
    assert behind < POINTS
