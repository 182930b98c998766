"""DataFrame transformers, predictors and evaluators, as Spark ML stages.

Stages that Spark can express run on the JVM; a model predicts in batches through Arrow. Importing this package loads
pyspark, and neither Keras nor a backend.
"""

if __name__ != "distkeras.transformers":
    raise ImportError(f"this folder imports as 'distkeras.transformers'. Received: import of {__name__!r}")

from typing import TYPE_CHECKING, Any

from distkeras.transformers.evaluators import AccuracyEvaluator, LossEvaluator
from distkeras.transformers.predictor import ModelPredictor as ModelPredictor
from distkeras.transformers.scaling import MinMaxTransformer, StandardScaleTransformer
from distkeras.transformers.shaping import (
    DenseTransformer,
    LabelIndexTransformer,
    OneHotTransformer,
    ReshapeTransformer,
)

if TYPE_CHECKING:
    from distkeras.compat.stages import BinaryLabelTransformer, StandardTransformer, Transformer

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


def __getattr__(name: str) -> Any:
    """Return one of dist-keras' names from `distkeras.compat`."""
    if name not in __all__:
        raise AttributeError(f"module 'distkeras.transformers' has no attribute {name!r}")
    import distkeras.compat.stages as compat

    return getattr(compat, name)
