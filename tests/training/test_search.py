"""A search whose trials continue from their checkpoints, on Spark."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from pyspark.sql import DataFrame
from support.training.small_jobs import SPARSE

from distkeras import EarlyStopping, SuccessiveHalving, Trainer

pytestmark = pytest.mark.usefixtures("nothing_left")


def trainer_of(rate: float, epochs: int) -> Trainer:
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2, activation="softmax")]
    return Trainer(
        keras.Sequential([keras.Input((2,)), *layers]),
        "agn",
        worker_optimizer=keras.optimizers.Adam(rate),
        loss=SPARSE,
        num_workers=1,
        batch_size=16,
        num_epoch=epochs,
    )


@pytest.mark.slow
def test_a_resumed_trial_equals_an_uninterrupted_one(clouds: DataFrame, tmp_path: Path) -> None:
    """With one worker a job can be repeated to the bit; the moments of its optimizer continue as well."""
    weights, steps = {}, {}
    search = SuccessiveHalving([1e-6, 0.01], epochs=3, factor=2, mode="min")
    for rung in search:
        for trial in rung:
            evaluation = EarlyStopping(clouds, every_epochs=trial.epochs)
            trainer = trainer_of(trial.setting, trial.epochs)
            model = trainer.train(
                clouds, callbacks=[evaluation], checkpoint=tmp_path / str(trial.number), resume=bool(trial.values)
            )
            trial.report(evaluation.evaluations[-1]["loss"])
            weights[trial.setting, trial.epochs] = model.get_weights()
            steps[trial.setting, trial.epochs] = trainer.history.count()
    assert set(weights) == {(1e-6, 1), (0.01, 1), (0.01, 3)}
    assert (search.best.setting, set(search.best.values)) == (0.01, {1, 3})
    assert steps[0.01, 3] == 3 * steps[0.01, 1]  # the steps of the earlier rung are included
    whole = trainer_of(0.01, 3).train(clouds).get_weights()
    for found, expected in zip(weights[0.01, 3], whole, strict=True):
        np.testing.assert_array_equal(found, expected)
