"""A program of a user. A type checker finds an error in each line that ignores one, and in no other.

mypy checks it with all tests, and finds comments that ignore nothing; `test_users_program` has pyright check it.
"""

from __future__ import annotations

import keras
from pyspark.sql import DataFrame

from distkeras import KerasEstimator, KerasModel, Trainer


def right(model: keras.Model, df: DataFrame) -> float:
    """Train and evaluate."""
    fitted = KerasEstimator(model, epochs=3, batch_size=8, label_col="digit").setNumWorkers(2).fit(df)
    fitted.summary.epochs.show()
    fitted.setPredictionCol("guess").transform(df)
    trainer = Trainer(model, epochs=3, optimizer="adam", class_weight="balanced")
    trainer.train(df, validation_split=0.1).summary()
    return KerasModel("model.keras", output_kind="logits").evaluate(df)["loss"]


def wrong(model: keras.Model, df: DataFrame) -> None:
    """Make each kind of mistake."""
    KerasEstimator(model, batchsize=3)  # type: ignore[call-arg]  # there is no such keyword
    KerasEstimator(model, num_workers="two")  # type: ignore[arg-type]  # no number
    KerasEstimator(model).epoch  # type: ignore[attr-defined]  # noqa: B018 - there is no such attribute
    KerasModel(model, features="x")  # type: ignore[call-arg]  # there is no such keyword
    Trainer(model, epoch=3)  # type: ignore[call-arg]  # there is no such keyword
    Trainer(model).epochz  # type: ignore[attr-defined]  # noqa: B018 - there is no such attribute
    Trainer(model).train(df, validation_split="half")  # type: ignore[arg-type]  # no number
