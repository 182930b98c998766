"""Draws of what `compile` takes and of what a layer is given: losses, metrics, optimizers, rates, initializers …"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np

Draw = np.random.Generator
F, M = keras.losses, keras.metrics


class Labels(NamedTuple):
    """Labels of an output: its activation, a function that draws the labels of some rows, and its units."""

    activation: str
    draw: Callable[[Draw, int], np.ndarray]
    units: int = 3


LABELS: dict[str, Labels] = {
    "classes": Labels("softmax", lambda draw, rows: draw.integers(0, 3, rows)),
    "logits": Labels("linear", lambda draw, rows: draw.integers(0, 3, rows)),
    "one-hot": Labels("softmax", lambda draw, rows: np.eye(3)[draw.integers(0, 3, rows)]),
    "binary": Labels("sigmoid", lambda draw, rows: draw.integers(0, 2, (rows, 3)).astype(float)),
    "signs": Labels("tanh", lambda draw, rows: draw.integers(0, 2, (rows, 3)) * 2.0 - 1.0),
    "positive": Labels("softplus", lambda draw, rows: draw.uniform(0.1, 2, (rows, 3))),
    "numbers": Labels("linear", lambda draw, rows: draw.normal(size=(rows, 3))),
    "one binary": Labels("sigmoid", lambda draw, rows: draw.integers(0, 2, (rows, 1)).astype(float), 1),
    "one sign": Labels("tanh", lambda draw, rows: draw.integers(0, 2, (rows, 1)) * 2.0 - 1.0, 1),
    "one number": Labels("linear", lambda draw, rows: draw.normal(size=(rows, 1)), 1),
}
ANY = tuple(LABELS)
ONE_HOT, CLASSES, POSITIVE = ("one-hot",), ("classes",), ("positive",)
BINARY, SIGNS, NUMBERS = ("binary", "one binary"), ("signs", "one sign"), ("numbers", "one number")
DENSE = tuple(kind for kind in ANY if kind not in ("classes", "logits"))
SPARSE = ("classes", "logits")


class Kind(NamedTuple):
    """A function that makes a part of `compile`, and the kinds of labels that it fits."""

    make: Callable[[], Any]
    labels: tuple[str, ...]


def own_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_true - y_pred) + 0.1 * keras.ops.abs(y_pred), axis=-1)


@keras.saving.register_keras_serializable("draws")
class Weighted(keras.losses.Loss):
    """A user's loss, which has a setting."""

    def __init__(self, strength: float = 1.0, name: str = "weighted", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.strength = strength

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.strength * keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "strength": self.strength}


#: Losses by the name of their class or function in Keras, and users' own.
LOSSES: dict[str, Kind] = {
    "BinaryCrossentropy": Kind(lambda: F.BinaryCrossentropy(label_smoothing=0.1), BINARY),
    "BinaryFocalCrossentropy": Kind(lambda: F.BinaryFocalCrossentropy(apply_class_balancing=True), BINARY),
    "CategoricalCrossentropy": Kind(lambda: F.CategoricalCrossentropy(label_smoothing=0.1), ONE_HOT),
    "CategoricalFocalCrossentropy": Kind(lambda: F.CategoricalFocalCrossentropy(), ONE_HOT),
    "CategoricalGeneralizedCrossEntropy": Kind(lambda: F.CategoricalGeneralizedCrossEntropy(), CLASSES),
    "CategoricalHinge": Kind(lambda: F.CategoricalHinge(), ONE_HOT),
    "CosineSimilarity": Kind(lambda: F.CosineSimilarity(axis=-1), NUMBERS),
    "Dice": Kind(lambda: F.Dice(), BINARY),
    "Hinge": Kind(lambda: F.Hinge(), SIGNS),
    "Huber": Kind(lambda: F.Huber(0.5), NUMBERS),
    "KLDivergence": Kind(lambda: F.KLDivergence(), ONE_HOT),
    "LogCosh": Kind(lambda: F.LogCosh(), NUMBERS),
    "MeanAbsoluteError": Kind(lambda: F.MeanAbsoluteError(), NUMBERS),
    "MeanAbsolutePercentageError": Kind(lambda: F.MeanAbsolutePercentageError(), POSITIVE),
    "MeanSquaredError": Kind(lambda: F.MeanSquaredError(reduction="sum"), NUMBERS),
    "MeanSquaredLogarithmicError": Kind(lambda: F.MeanSquaredLogarithmicError(), POSITIVE),
    "Poisson": Kind(lambda: F.Poisson(), POSITIVE),
    "SparseCategoricalCrossentropy": Kind(lambda: F.SparseCategoricalCrossentropy(from_logits=True), ("logits",)),
    "SquaredHinge": Kind(lambda: F.SquaredHinge(), SIGNS),
    "Tversky": Kind(lambda: F.Tversky(0.3, 0.7), BINARY),
    "binary_crossentropy": Kind(lambda: "binary_crossentropy", BINARY),
    "binary_focal_crossentropy": Kind(lambda: F.binary_focal_crossentropy, BINARY),
    "categorical_crossentropy": Kind(lambda: "categorical_crossentropy", ONE_HOT),
    "categorical_focal_crossentropy": Kind(lambda: "categorical_focal_crossentropy", ONE_HOT),
    "categorical_hinge": Kind(lambda: "categorical_hinge", ONE_HOT),
    "cosine_similarity": Kind(lambda: "cosine_similarity", NUMBERS),
    "dice": Kind(lambda: F.dice, BINARY),
    "hinge": Kind(lambda: "hinge", SIGNS),
    "huber": Kind(lambda: "huber", NUMBERS),
    "kl_divergence": Kind(lambda: "kld", ONE_HOT),
    "log_cosh": Kind(lambda: "log_cosh", NUMBERS),
    "mean_absolute_error": Kind(lambda: "mae", NUMBERS),
    "mean_absolute_percentage_error": Kind(lambda: "mape", POSITIVE),
    "mean_squared_error": Kind(lambda: "mse", NUMBERS),
    "mean_squared_logarithmic_error": Kind(lambda: "msle", POSITIVE),
    "poisson": Kind(lambda: "poisson", POSITIVE),
    "sparse_categorical_crossentropy": Kind(lambda: "sparse_categorical_crossentropy", CLASSES),
    "squared_hinge": Kind(lambda: "squared_hinge", SIGNS),
    "tversky": Kind(lambda: F.tversky, BINARY),
    "mean_with_sample_weight": Kind(lambda: F.MeanSquaredError(reduction="mean_with_sample_weight"), ("numbers",)),
    "no reduction": Kind(lambda: F.MeanAbsoluteError(reduction=None), ("numbers",)),
    "bce": Kind(lambda: "bce", BINARY),
    "own function": Kind(lambda: own_loss, NUMBERS),
    "binary_crossentropy of one": Kind(lambda: "binary_crossentropy", ("one binary",)),
    "bce of one": Kind(lambda: F.BinaryCrossentropy(), ("one binary",)),
    "hinge of one": Kind(lambda: F.Hinge(), ("one sign",)),
    "mse of one": Kind(lambda: "mse", ("one number",)),
    "own class of one": Kind(lambda: Weighted(0.5), ("one number",)),
    "own class": Kind(lambda: Weighted(0.5), NUMBERS),
}
_CONFIG = "it makes or describes the others"
LOSS_REASONS = {
    "Loss": "the base class", "deserialize": _CONFIG, "serialize": _CONFIG, "get": _CONFIG,
    "categorical_generalized_cross_entropy": "a function with an argument that has no default: not a loss by itself",
    "CTC": "its labels have another shape than the output: a case of its own",
    "ctc": "its labels have another shape than the output: a case of its own",
    "Circle": "its labels have another shape than the output: a case of its own",
    "circle": "its labels have another shape than the output: a case of its own",
}  # fmt: skip


@keras.saving.register_keras_serializable("draws")  # type: ignore[untyped-decorator]  # Keras has no types
def confidence(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.max(y_pred, axis=-1)


#: Metrics of one number by the name of their class or function in Keras, and a user's own.
METRICS: dict[str, Kind] = {
    "AUC": Kind(lambda: M.AUC(num_thresholds=20), BINARY),
    "Accuracy": Kind(lambda: M.Accuracy(), BINARY),
    "BinaryAccuracy": Kind(lambda: M.BinaryAccuracy(threshold=0.4), BINARY),
    "BinaryCrossentropy": Kind(lambda: M.BinaryCrossentropy(label_smoothing=0.1), BINARY),
    "BinaryIoU": Kind(lambda: M.BinaryIoU(), BINARY),
    "CategoricalAccuracy": Kind(lambda: M.CategoricalAccuracy(), ONE_HOT),
    "CategoricalCrossentropy": Kind(lambda: M.CategoricalCrossentropy(), ONE_HOT),
    "CategoricalHinge": Kind(lambda: M.CategoricalHinge(), ONE_HOT),
    "ConcordanceCorrelation": Kind(lambda: M.ConcordanceCorrelation(axis=-1), ("numbers",)),
    "CosineSimilarity": Kind(lambda: M.CosineSimilarity(), NUMBERS),
    "F1Score": Kind(lambda: M.F1Score("macro"), ONE_HOT),
    "FBetaScore": Kind(lambda: M.FBetaScore("micro", beta=2.0), ONE_HOT),
    "FalseNegatives": Kind(lambda: M.FalseNegatives(), BINARY),
    "FalsePositives": Kind(lambda: M.FalsePositives(), BINARY),
    "Hinge": Kind(lambda: M.Hinge(), SIGNS),
    "IoU": Kind(lambda: M.IoU(3, [0, 2], sparse_y_pred=False), CLASSES),
    "KLDivergence": Kind(lambda: M.KLDivergence(), ONE_HOT),
    "LogCoshError": Kind(lambda: M.LogCoshError(), NUMBERS),
    "MeanAbsoluteError": Kind(lambda: M.MeanAbsoluteError(), DENSE),
    "MeanAbsolutePercentageError": Kind(lambda: M.MeanAbsolutePercentageError(), POSITIVE),
    "MeanIoU": Kind(lambda: M.MeanIoU(3, sparse_y_pred=False), CLASSES),
    "MeanMetricWrapper": Kind(lambda: M.MeanMetricWrapper(confidence, name="confidence"), DENSE),
    "MeanSquaredError": Kind(lambda: M.MeanSquaredError(), DENSE),
    "MeanSquaredLogarithmicError": Kind(lambda: M.MeanSquaredLogarithmicError(), POSITIVE),
    "OneHotIoU": Kind(lambda: M.OneHotIoU(3, [0, 1]), ONE_HOT),
    "OneHotMeanIoU": Kind(lambda: M.OneHotMeanIoU(3), ONE_HOT),
    "PearsonCorrelation": Kind(lambda: M.PearsonCorrelation(), ("numbers",)),
    "Poisson": Kind(lambda: M.Poisson(), POSITIVE),
    "Precision": Kind(lambda: M.Precision(), BINARY),
    "PrecisionAtRecall": Kind(lambda: M.PrecisionAtRecall(0.5, num_thresholds=20), BINARY),
    "R2Score": Kind(lambda: M.R2Score(), NUMBERS),
    "Recall": Kind(lambda: M.Recall(class_id=1), ("binary",)),
    "RecallAtPrecision": Kind(lambda: M.RecallAtPrecision(0.5, num_thresholds=20), BINARY),
    "RootMeanSquaredError": Kind(lambda: M.RootMeanSquaredError(), DENSE),
    "SensitivityAtSpecificity": Kind(lambda: M.SensitivityAtSpecificity(0.5, num_thresholds=20), BINARY),
    "SparseCategoricalAccuracy": Kind(lambda: M.SparseCategoricalAccuracy(name="right"), CLASSES),
    "SparseCategoricalCrossentropy": Kind(lambda: M.SparseCategoricalCrossentropy(), CLASSES),
    "SparseTopKCategoricalAccuracy": Kind(lambda: M.SparseTopKCategoricalAccuracy(2), CLASSES),
    "SpecificityAtSensitivity": Kind(lambda: M.SpecificityAtSensitivity(0.5, num_thresholds=20), BINARY),
    "SquaredHinge": Kind(lambda: M.SquaredHinge(), SIGNS),
    "TopKCategoricalAccuracy": Kind(lambda: M.TopKCategoricalAccuracy(2), ONE_HOT),
    "TrueNegatives": Kind(lambda: M.TrueNegatives(), BINARY),
    "TruePositives": Kind(lambda: M.TruePositives(), BINARY),
    "binary_accuracy": Kind(lambda: "binary_accuracy", BINARY),
    "binary_crossentropy": Kind(lambda: "bce", BINARY),
    "binary_focal_crossentropy": Kind(lambda: M.binary_focal_crossentropy, BINARY),
    "categorical_accuracy": Kind(lambda: "categorical_accuracy", ONE_HOT),
    "categorical_crossentropy": Kind(lambda: "categorical_crossentropy", ONE_HOT),
    "categorical_focal_crossentropy": Kind(lambda: M.categorical_focal_crossentropy, ONE_HOT),
    "categorical_hinge": Kind(lambda: "categorical_hinge", ONE_HOT),
    "concordance_correlation": Kind(lambda: M.concordance_correlation, ("numbers",)),
    "hinge": Kind(lambda: "hinge", SIGNS),
    "huber": Kind(lambda: M.huber, NUMBERS),
    "kl_divergence": Kind(lambda: "kl_divergence", ONE_HOT),
    "log_cosh": Kind(lambda: M.log_cosh, NUMBERS),
    "mean_absolute_error": Kind(lambda: "mae", DENSE),
    "mean_absolute_percentage_error": Kind(lambda: "mape", POSITIVE),
    "mean_squared_error": Kind(lambda: "mse", DENSE),
    "mean_squared_logarithmic_error": Kind(lambda: "msle", POSITIVE),
    "pearson_correlation": Kind(lambda: M.pearson_correlation, ("numbers",)),
    "poisson": Kind(lambda: "poisson", POSITIVE),
    "sparse_categorical_accuracy": Kind(lambda: "sparse_categorical_accuracy", SPARSE),
    "sparse_categorical_crossentropy": Kind(lambda: "sparse_categorical_crossentropy", CLASSES),
    "sparse_top_k_categorical_accuracy": Kind(lambda: M.sparse_top_k_categorical_accuracy, CLASSES),
    "squared_hinge": Kind(lambda: "squared_hinge", SIGNS),
    "top_k_categorical_accuracy": Kind(lambda: M.top_k_categorical_accuracy, ONE_HOT),
    "accuracy": Kind(lambda: "accuracy", ("classes", "logits", "one-hot", "binary", "one binary")),
    "own function": Kind(lambda: confidence, ANY),
}
METRIC_REASONS = {
    "Metric": "the base class", "deserialize": _CONFIG, "serialize": _CONFIG, "get": _CONFIG,
    "Mean": "it takes values, and no labels: `compile` cannot use it",
    "Sum": "it takes values, and no labels: `compile` cannot use it",
}  # fmt: skip

O = keras.optimizers  # noqa: E741 - Keras' own letter for it in this table
Rate = Any
#: Optimizers by their name in Keras, made with a learning rate and the settings that all of them take.
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adadelta": lambda rate, **given: O.Adadelta(rate, rho=0.9, **given),
    "Adafactor": lambda rate, **given: O.Adafactor(rate, **given),
    "Adagrad": lambda rate, **given: O.Adagrad(rate, **given),
    "Adam": lambda rate, **given: O.Adam(rate, amsgrad=True, epsilon=1e-3, **given),
    "AdamW": lambda rate, **given: O.AdamW(rate, epsilon=1e-3, **given),
    "Adamax": lambda rate, **given: O.Adamax(rate, epsilon=1e-3, **given),
    "Ftrl": lambda rate, **given: O.Ftrl(rate, l2_regularization_strength=0.01, **given),
    "Lamb": lambda rate, **given: O.Lamb(rate, epsilon=1e-3, **given),
    "Lion": lambda rate, **given: O.Lion(rate, **given),
    "Muon": lambda rate, **given: O.Muon(rate, exclude_embeddings=True, **given),
    "Nadam": lambda rate, **given: O.Nadam(rate, epsilon=1e-3, **given),
    "RMSprop": lambda rate, **given: O.RMSprop(rate, centered=True, epsilon=1e-3, **given),
    "SGD": lambda rate, **given: O.SGD(rate, **given),
    "SGD with momentum": lambda rate, **given: O.SGD(rate, momentum=0.9, nesterov=True, **given),
    "LossScaleOptimizer": lambda rate, **given: O.LossScaleOptimizer(O.SGD(rate, **given), dynamic_growth_steps=2),
    "own class": lambda rate, **given: Signed(rate, strength=0.5, **given),
    "ScheduleFreeAdamW": lambda rate, **given: O.ScheduleFreeAdamW(rate, **given),
    "MultiOptimizer": lambda rate, **given: O.MultiOptimizer(O.OptimizerMap(O.SGD(rate), {"first/.*": O.Adam(rate)})),
}
OPTIMIZER_REASONS = {
    "Optimizer": "the base class", "OptimizerMap": "drawn within MultiOptimizer", "deserialize": _CONFIG,
    "serialize": _CONFIG, "get": _CONFIG, "legacy": "optimizers of Keras 2", "schedules": "drawn as rates",
}  # fmt: skip


@keras.saving.register_keras_serializable("draws")
class Signed(keras.optimizers.SGD):
    """A user's optimizer, which has a setting."""

    def __init__(self, learning_rate: Any = 0.01, strength: float = 1.0, **options: Any) -> None:
        super().__init__(learning_rate, **options)
        self.strength = strength

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, self.strength * learning_rate)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "strength": self.strength}


S = keras.optimizers.schedules


@keras.saving.register_keras_serializable("draws")
class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A user's schedule."""

    def __init__(self, first: float) -> None:
        self.first = first

    def __call__(self, step: Any) -> Any:
        return self.first / (1.0 + keras.ops.cast(step, "float32"))

    def get_config(self) -> dict[str, Any]:
        return {"first": self.first}


#: Learning rates: schedules by their name in Keras, and numbers.
RATES: dict[str, Callable[[], Any]] = {
    "number": lambda: 0.05,
    "small": lambda: 0.003,
    "CosineDecay": lambda: S.CosineDecay(0.0, 9, warmup_target=0.1, warmup_steps=3),
    "CosineDecayRestarts": lambda: S.CosineDecayRestarts(0.05, 3),
    "ExponentialDecay": lambda: S.ExponentialDecay(0.05, 2, 0.5),
    "InverseTimeDecay": lambda: S.InverseTimeDecay(0.05, 1, 0.5, staircase=True),
    "PiecewiseConstantDecay": lambda: S.PiecewiseConstantDecay([2, 4], [0.1, 0.05, 0.01]),
    "PolynomialDecay": lambda: S.PolynomialDecay(0.05, 5, 0.001),
    "own class": lambda: Halving(0.1),
}
RATE_REASONS = {"LearningRateSchedule": "the base class", "deserialize": _CONFIG, "serialize": _CONFIG}

#: Settings of every optimizer, by the argument's name in Keras.
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "clipnorm": {"clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "weight_decay": {"weight_decay": 0.1},
    "use_ema": {"use_ema": True, "ema_momentum": 0.5},
    "ema_overwrite_frequency": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "loss_scale_factor": {"loss_scale_factor": 8.0},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "name": {"name": "mine"},
    "excluded": {"weight_decay": 0.1},
}
#: Arguments of all optimizers that are not drawn as a setting.
SETTING_REASONS = {"learning_rate": "drawn as a rate", "ema_momentum": "drawn with `use_ema`"}

C, R, I = keras.constraints, keras.regularizers, keras.initializers  # noqa: E741 - as above


@keras.saving.register_keras_serializable("draws")
class Centered(keras.constraints.Constraint):
    """A user's constraint."""

    def __call__(self, w: Any) -> Any:
        return w - keras.ops.mean(w)


CONSTRAINTS: dict[str, Callable[[], Any]] = {
    "MaxNorm": lambda: C.MaxNorm(0.5),
    "MinMaxNorm": lambda: C.MinMaxNorm(0.3, 0.6, rate=0.5),
    "NonNeg": lambda: C.NonNeg(),
    "UnitNorm": lambda: C.UnitNorm(),
    "own class": lambda: Centered(),
}
REGULARIZERS: dict[str, Callable[[], Any]] = {
    "L1": lambda: R.L1(0.1),
    "L1L2": lambda: R.L1L2(0.01, 0.01),
    "L2": lambda: R.L2(0.1),
    "OrthogonalRegularizer": lambda: R.OrthogonalRegularizer(0.1),
}
INITIALIZERS: dict[str, Callable[[], Any]] = {
    "Constant": lambda: I.Constant(0.2),
    "GlorotNormal": lambda: I.GlorotNormal(1),
    "GlorotUniform": lambda: I.GlorotUniform(1),
    "HeNormal": lambda: I.HeNormal(1),
    "HeUniform": lambda: I.HeUniform(1),
    "Identity": lambda: I.Identity(0.5),
    "LecunNormal": lambda: I.LecunNormal(1),
    "LecunUniform": lambda: I.LecunUniform(1),
    "Ones": lambda: I.Ones(),
    "Orthogonal": lambda: I.Orthogonal(seed=1),
    "RandomNormal": lambda: I.RandomNormal(seed=1),
    "RandomUniform": lambda: I.RandomUniform(seed=1),
    "TruncatedNormal": lambda: I.TruncatedNormal(seed=1),
    "VarianceScaling": lambda: I.VarianceScaling(seed=1),
    "Zeros": lambda: I.Zeros(),
}
INITIALIZER_REASONS = {"Initializer": "the base class", "STFT": "drawn within STFTSpectrogram"}
