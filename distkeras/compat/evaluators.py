"""The base class of dist-keras' evaluators; its one evaluator is this project's own."""

from __future__ import annotations

from pyspark.sql import DataFrame

from distkeras.compat.refusals import refusal


class Evaluator:
    """The base of dist-keras' evaluators, whose subclasses write `evaluate` anew.

    Args:
        label_col: kept as `label_column`.
        prediction_col: kept as `prediction_column`.
    """

    def __init__(self, label_col: str = "label", prediction_col: str = "prediction") -> None:
        self.label_column = label_col
        self.prediction_column = prediction_col

    def evaluate(self, dataframe: DataFrame) -> float:
        """Written by subclasses."""
        raise refusal(f"{type(self).__name__}.evaluate", "write it, or extend `pyspark.ml.evaluation.Evaluator`")
