"""DataFrame transformers, predictors and evaluators, as Spark ML stages.

What Spark can express runs on the JVM; a model predicts in batches through Arrow. Importing this package loads
pyspark, and neither Keras nor a backend.
"""

if __name__ != "distkeras.transformers":
    raise ImportError(f"this folder imports as 'distkeras.transformers'. Received: import of {__name__!r}")

from distkeras.transformers.evaluators import AccuracyEvaluator, LossEvaluator
from distkeras.transformers.predictor import ModelPredictor
from distkeras.transformers.scaling import MinMaxTransformer, StandardScaleTransformer
from distkeras.transformers.shaping import (
    DenseTransformer,
    LabelIndexTransformer,
    OneHotTransformer,
    ReshapeTransformer,
)

__all__ = [
    "AccuracyEvaluator",
    "DenseTransformer",
    "LabelIndexTransformer",
    "LossEvaluator",
    "MinMaxTransformer",
    "ModelPredictor",
    "OneHotTransformer",
    "ReshapeTransformer",
    "StandardScaleTransformer",
]
