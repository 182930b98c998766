"""DataFrame transformers, predictors and evaluators, as Spark ML stages.

Stages that Spark can express run on the JVM; a model predicts in batches through Arrow. Importing this package loads
pyspark, and neither Keras nor a backend.
"""

if __name__ != "distkeras.transformers":
    raise ImportError(f"this folder imports as 'distkeras.transformers'. Received: import of {__name__!r}")

from distkeras.transformers.evaluators import AccuracyEvaluator, LossEvaluator
from distkeras.transformers.predictor import ModelPredictor as ModelPredictor
from distkeras.transformers.scaling import MinMaxTransformer, StandardScaleTransformer, StandardTransformer
from distkeras.transformers.shaping import (
    BinaryLabelTransformer,
    DenseTransformer,
    LabelIndexTransformer,
    OneHotTransformer,
    ReshapeTransformer,
    Transformer,
)

__all__ = [
    "AccuracyEvaluator",
    "BinaryLabelTransformer",
    "DenseTransformer",
    "LabelIndexTransformer",
    "LossEvaluator",
    "MinMaxTransformer",
    "ModelPredictor",
    "OneHotTransformer",
    "ReshapeTransformer",
    "StandardScaleTransformer",
    "StandardTransformer",
    "Transformer",
]
