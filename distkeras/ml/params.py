"""The keywords of `Trainer` as Spark ML parameters, over Spark's own mixins where it has one for the concept."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasSeed,
    HasValidationIndicatorCol,
    HasWeightCol,
)

from distkeras.keras_model.archive import require_model
from distkeras.options import texts_of_arguments
from distkeras.ps.errors import ConfigurationError
from distkeras.settings import GROUPS, TrainSettings, flattened
from distkeras.trainer import Trainer
from distkeras.transformers.params import (
    HasDecode,
    HasOutputType,
    column_name,
    column_names,
    columns_by_name,
    finite_float,
    integer_from,
    param,
    true_or_false,
)
from distkeras.transformers.predictor import BATCH_BYTES

_P = TypeVar("_P", bound="type[Params]")

#: Spark's own name of a parameter, by the keyword for it here.
SPARK_NAMES = {
    "features_col": "featuresCol",
    "label_col": "labelCol",
    "sample_weight_col": "weightCol",
    "prediction_col": "predictionCol",
    "probability_col": "probabilityCol",
    "raw_prediction_col": "rawPredictionCol",
    "validation_indicator_col": "validationIndicatorCol",
}
KEYWORDS = {name: keyword for keyword, name in SPARK_NAMES.items()}


def trainer_keywords() -> Mapping[str, inspect.Parameter]:
    """The keywords of `Trainer` and their defaults, in its order."""
    return inspect.signature(Trainer).parameters


def with_trainer_params(kind: _P) -> _P:
    """Gives a class of parameters one for each keyword of `Trainer` that Spark has no mixin for."""
    texts = texts_of_arguments(Trainer)
    for keyword in trainer_keywords():
        name = SPARK_NAMES.get(keyword, keyword)
        if not isinstance(getattr(kind, name, None), Param):
            setattr(kind, name, Param(Params._dummy(), name, texts[keyword], _checked(keyword)))  # noqa: SLF001 - the owner that Spark ML's own mixins give
    own = [param.name for param in vars(TrainingParams).values() if isinstance(param, Param)]
    own = [name for name in own if name not in trainer_keywords()]
    keywords = [
        *(parameter.replace(annotation=Any) for parameter in trainer_keywords().values()),
        *(inspect.Parameter(KEYWORDS.get(name, name), inspect.Parameter.KEYWORD_ONLY, default=None) for name in own),
    ]
    signature = inspect.Signature(list({keyword.name: keyword for keyword in keywords}.values()))
    setattr(kind, "__signature__", signature)  # noqa: B010 - what `inspect` and `help` show, unknown to type checkers
    return kind


def _checked(keyword: str) -> Callable[[Any], Any]:
    """What a trainer's settings can say of one value alone is said where it is set; the rest is said by `fit`."""
    if keyword == "model":
        return _model
    known = {field.name for field in dataclasses.fields(TrainSettings)}
    if keyword not in {*known, *GROUPS}:
        return lambda value: value

    def convert(value: Any) -> Any:
        options = flattened({keyword: value}) if keyword in GROUPS else {keyword: value}
        TrainSettings(**{name: option for name, option in options.items() if name in known})
        return value

    return convert


def _model(value: Any) -> Any:
    require_model(value)
    return value


def one_or_several(value: Any) -> str | list[str] | dict[str, str]:
    """Return the name of one column, a list of them, or a mapping from names of a model's inputs or outputs."""
    if isinstance(value, Mapping):
        return columns_by_name(value)
    return column_name(value) if isinstance(value, str) else column_names(value)


def fraction(value: Any) -> float:
    """A number in [0, 1); ValueError for another one."""
    if not 0 <= finite_float(value) < 1:
        raise ValueError
    return float(value)


def name_or_empty(value: Any) -> str:
    """The name of a column; "" for none."""
    if not isinstance(value, str):
        raise TypeError
    return value


class KeywordParams(Params):
    """Parameters that are set, and asked for, by the keywords of the constructor too."""

    def getParam(self, paramName: str) -> Param[Any]:
        """A parameter by Spark's name or by the constructor's keyword: ``featuresCol`` is ``features_col``."""
        return super().getParam(SPARK_NAMES.get(paramName, paramName))

    def hasParam(self, paramName: str) -> bool:
        """Return whether there is one of that name: Spark's, or the constructor's keyword."""
        return super().hasParam(SPARK_NAMES.get(paramName, paramName))

    def setParams(self, **keywords: Any) -> Any:
        """Sets parameters by the constructor's keywords; None sets one back to its default.

        Raises:
            ConfigurationError: no such keyword, or a value that cannot work.
        """
        for keyword, value in keywords.items():
            name = SPARK_NAMES.get(keyword, keyword)
            if not isinstance(getattr(type(self), name, None), Param):
                known = sorted(KEYWORDS.get(known.name, known.name) for known in self.params)
                raise ConfigurationError(
                    f"{type(self).__name__} takes {', '.join(known)}. Received: {keyword}={value!r}"
                )
            if value is None:
                self.clear(self.getParam(name))
            else:
                self._set(**{name: value})
        return self

    def value(self, keyword: str) -> Any:
        """What is set for a keyword, or its default; None where there is neither."""
        param = self.getParam(keyword)
        return self.getOrDefault(param) if self.isDefined(param) else None


class PredictionParams(
    HasFeaturesCol,
    HasLabelCol,
    HasWeightCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasOutputType,
    HasDecode,
    KeywordParams,
):
    """What estimator and model share: the columns to read, and the new ones."""

    featuresCol = param(
        "featuresCol", "columns to predict from", one_or_several, "a column name or several", keyword="features_col"
    )
    labelCol = param(
        "labelCol", "column or columns of labels", one_or_several, "a column name or several", keyword="label_col"
    )
    weightCol = param(
        "weightCol", "column of weights", column_name, "the name of a column", keyword="sample_weight_col"
    )
    predictionCol = param(
        "predictionCol",
        "new column of predictions, or one for each output: the class of a classifier, else what the model returns",
        one_or_several,
        "a column name or several",
        keyword="prediction_col",
    )
    probabilityCol = param(
        "probabilityCol",
        'new column of class probabilities, or one for each output that is a classifier; "" for none',
        name_or_empty,
        "a column name",
        keyword="probability_col",
    )
    rawPredictionCol = param(
        "rawPredictionCol",
        'new column of what a classifier returns, or one for each output that is one; "" for none',
        name_or_empty,
        "a column name",
        keyword="raw_prediction_col",
    )
    prediction_batch_size = param(
        "prediction_batch_size", "rows a call of the model, to predict, at most", integer_from(1), "a positive integer"
    )
    prediction_batch_bytes = param(
        "prediction_batch_bytes",
        "bytes of the inputs and outputs of such a call, at most",
        integer_from(1),
        "a positive integer",
    )
    custom_objects = param(
        "custom_objects",
        "classes and functions of the model, by registered name, in addition to what keras.saving knows; not saved",
        dict,
        "a dictionary: name to class or function",
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(prediction_batch_size=1024, prediction_batch_bytes=BATCH_BYTES, output_type="array")
        self._setDefault(probabilityCol="probability", rawPredictionCol="rawPrediction")

    def setFeaturesCol(self, value: str | list[str]) -> Any:
        """Sets ``featuresCol``."""
        return self._set(featuresCol=value)

    def setLabelCol(self, value: str | list[str]) -> Any:
        """Sets ``labelCol``."""
        return self._set(labelCol=value)

    def setWeightCol(self, value: str) -> Any:
        """Sets ``weightCol``."""
        return self._set(weightCol=value)

    def setPredictionCol(self, value: str | list[str]) -> Any:
        """Sets ``predictionCol``."""
        return self._set(predictionCol=value)

    def setProbabilityCol(self, value: str) -> Any:
        """Sets ``probabilityCol``."""
        return self._set(probabilityCol=value)

    def setRawPredictionCol(self, value: str) -> Any:
        """Sets ``rawPredictionCol``."""
        return self._set(rawPredictionCol=value)


class TrainingParams(PredictionParams, HasSeed, HasValidationIndicatorCol):
    """What the estimator has in addition to the keywords of `Trainer`."""

    # Spark's mixin has a default of its own, which may be negative, until the trainer's takes its place.
    seed = param("seed", "of the row order", integer_from(-(1 << 63)), "an integer")
    validation_split = param(
        "validation_split",
        "share of the rows that are left out of training and validated on, chosen by their values",
        fraction,
        "a number in [0, 1)",
    )
    validation_rows = param(
        "validation_rows", "rows to validate on, at most; the driver holds them", integer_from(1), "a positive integer"
    )
    callbacks = param("callbacks", "of `Trainer.train`", list, "a list of callbacks")
    checkpoint: Param[Any] = Param(Params._dummy(), "checkpoint", "of `Trainer.train`")  # noqa: SLF001 - as Spark ML's own mixins
    resume = param("resume", "of `Trainer.train`", true_or_false, "True or False")

    def setSeed(self, value: int) -> Any:
        """Sets ``seed``."""
        return self._set(seed=value)

    def setValidationIndicatorCol(self, value: str) -> Any:
        """Sets ``validationIndicatorCol``."""
        return self._set(validationIndicatorCol=value)
