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
#: Of plain Keras: the best of 0.05, 0.1 and 0.2, give or take the noise of single runs.
SGD_RATE = 0.1
#: Accuracy that a rule may be behind.
POINTS = 0.03

#: All else is each rule's documented default. What is not here takes the learning rate of plain SGD.
RATES = {
    # The window's movement is divided by its length, 10, so that the center moves by one mean step a window.
    "agn": 0.2,
    "adag": 0.2,
    # Each payload is divided by its staleness and one: by 2, mostly, with two workers.
    "dynsgd": 0.2,
    # Half the sum of a round's two gradients is one step: half as many steps as gradients, of twice the size.
    "ssgd": 0.2,
    # Gradients of a window add up, taken at one point.
    "zealous_downpour": 0.05,
    # Momentum of 0.9 makes ten steps of one: eta / (1 - 0.9).
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
    # The same at the workers; and the elastic move needs eta rho < 1, which is 0.1 here.
    "eamsgd": 0.02,
    "daso": 0.02,
    # rho is 5 and n is 2: (n + 1) eta rho must be below 2, and is 1.5.
    "aeasgd": 0.1,
    "easgd": 0.1,
}

#: Epochs of rules that need more of them, and as many of plain SGD.
LONGER = {
    # An epoch is one round, which moves a weight by about 0.01. After 6 of them it is 6 points behind; after 20, 1.5.
    "fedopt": 20,
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
    """The accuracy of plain Keras after a number of epochs, with mini-batches of the same size."""
    x, y, x_test, y_test = data

    @cache
    def accuracy_after(epochs: int) -> float:
        model = image_classifier()
        model.compile(keras.optimizers.SGD(SGD_RATE), SPARSE)
        model.fit(x.astype(np.float32) / 255, y, batch_size=BATCH, epochs=epochs, verbose=0)
        return accuracy(model, x_test, y_test)

    return accuracy_after


#: What is not a default of the rule.
HYPER = {"daso": {"nodes": 2}}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", all_rules())
def test_it_is_within_three_points_of_sgd(
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
    # A partition's last mini-batch is short: at most one more an epoch for each worker but one.
    expected = epochs * -(-len(data[0]) // BATCH)
    assert expected <= steps <= expected + epochs * (WORKERS - 1)
    behind = sequential(epochs) - found
    for key, value in (("rule", name), ("rate", rate), ("accuracy", found), ("behind", behind)):
        record_property(key, value)
    assert behind < POINTS
