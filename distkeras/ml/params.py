"""The keywords of `Trainer` as Spark ML parameters, over Spark's own mixins where it has one for the concept."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasHandleInvalid,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasSeed,
    HasThresholds,
    HasValidationIndicatorCol,
    HasWeightCol,
)

from distkeras.data.binding import entries_of
from distkeras.data.schema import require_dataframe
from distkeras.keras_model.archive import require_model
from distkeras.ps.validate import require_number
from distkeras.ps.world.files import absolute
from distkeras.settings import (
    GROUPS,
    TrainSettings,
    arguments_of,
    by_own_names,
    flattened,
    texts_of_arguments,
    unknown_keyword,
)
from distkeras.trainer import Trainer
from distkeras.transformers.files import saveable, unwrapped
from distkeras.transformers.params import (
    BOOLEAN,
    COLUMN_OR_NONE,
    INVALID,
    POSITIVE_INTEGER,
    HasDecode,
    HasOutputType,
    HasPadding,
    column_name,
    column_names,
    columns_by_name,
    finite_float,
    integer_from,
    param,
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
    "handle_invalid": "handleInvalid",
    "validation_indicator_col": "validationIndicatorCol",
}
KEYWORDS = {name: keyword for keyword, name in SPARK_NAMES.items()}


def _place(value: Any) -> Any:
    """Return a path as an absolute one, and any other value, such as a `Checkpoint`, as it is."""
    text = fspath(value) if isinstance(value, PathLike) else value
    return absolute(text) if isinstance(text, str) and text else value


def with_trainer_params(kind: _P) -> _P:
    """Give a class of parameters one for each keyword of `Trainer` that Spark has no mixin for."""
    texts, own = texts_of_arguments(Trainer), arguments_of(Trainer)
    for keyword in own:
        name = SPARK_NAMES.get(keyword, keyword)
        if not isinstance(getattr(kind, name, None), Param):
            setattr(kind, name, Param(Params._dummy(), name, texts[keyword], _checked(keyword)))  # noqa: SLF001 - the owner that Spark ML's own mixins give
    for name in _names_of_params(kind):
        setattr(kind, name, saveable(getattr(kind, name)))
    keywords = [parameter.replace(annotation=Any) for parameter in own.values()]
    for name in (KEYWORDS.get(name, name) for name in _names_of_params(kind)):
        if name not in own:
            keywords.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
    setattr(kind, "__signature__", inspect.Signature(keywords))  # noqa: B010 - what `inspect` and `help` show, unknown to type checkers
    return with_accessors(kind)


def _names_of_params(kind: type[Params]) -> list[str]:
    return [name for name in dir(kind) if isinstance(getattr(kind, name), Param)]


def with_accessors(kind: _P) -> _P:
    """Give a class `setX` and `getX` for each of its parameters that has none, as Spark's own stages have them."""
    for name in _names_of_params(kind):
        _add_accessors(kind, name)
    return kind


def _add_accessors(kind: type[Params], name: str) -> None:
    words = "".join(word[:1].upper() + word[1:] for word in name.split("_"))

    def set_value(stage: Any, value: Any) -> Any:
        return stage.setParams(**{name: value})

    def get_value(stage: Any) -> Any:
        return stage.getOrDefault(name)

    for prefix, function, text in (
        ("set", set_value, f"Set ``{name}``; None sets it back to its default."),
        ("get", get_value, f"Return ``{name}``."),
    ):
        if not hasattr(kind, prefix + words):
            function.__name__, function.__doc__ = prefix + words, text
            function.__qualname__ = f"{kind.__name__}.{prefix}{words}"
            setattr(kind, prefix + words, function)


def _checked(keyword: str) -> Callable[[Any], Any]:
    # What a trainer's settings refuse in one value alone is refused where it is set; `fit` refuses the rest.
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
    """Return the name of one column, several of them, or a mapping from names of a model's inputs or outputs."""
    if isinstance(value, Mapping):
        return columns_by_name(value)
    return column_name(value) if isinstance(value, str) else column_names(value)


def entries(value: Any) -> Any:
    """Return columns of labels or weights, of which outputs may have none or several: see `binding.entries_of`."""
    if isinstance(value, str):
        return column_name(value)
    checked = entries_of(value, "value")
    if isinstance(checked, dict):
        return {name: list(entry) if isinstance(entry, tuple) else entry for name, entry in checked.items()}
    return [list(entry) if isinstance(entry, tuple) else entry for entry in checked]


def _dataframe(value: Any) -> Any:
    require_dataframe("validation_data", value, stream=False)
    return value


#: What the numbers of an output may be.
OUTPUT_KINDS = ("loss", "probabilities", "logits", "numbers")


def output_kinds(value: Any) -> str | dict[str, str]:
    """Return what the outputs' numbers are, for all outputs or by their names; ValueError for anything else."""
    kinds = dict(value) if isinstance(value, Mapping) else value
    if any(kind not in OUTPUT_KINDS for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
        raise ValueError
    return kinds


def class_thresholds(value: Any) -> list[float]:
    """Return thresholds of classes as floats; ValueError where they cannot work."""
    thresholds = [finite_float(threshold) for threshold in value]
    if len(thresholds) < 2 or min(thresholds) < 0 or thresholds.count(0.0) > 1:
        raise ValueError
    return thresholds


class KeywordParams(Params):
    """Parameters that are set and read by the keywords of the constructor too."""

    def getParam(self, paramName: str) -> Param[Any]:
        """Return a parameter by Spark's name or by the constructor's keyword: ``featuresCol`` is ``features_col``."""
        return super().getParam(SPARK_NAMES.get(paramName, paramName))

    def hasParam(self, paramName: str) -> bool:
        """Return whether there is one of that name: Spark's, or the constructor's keyword."""
        return super().hasParam(SPARK_NAMES.get(paramName, paramName))

    def setParams(self, **keywords: Any) -> Any:
        """Set parameters by the constructor's keywords; None sets one back to its default."""
        for keyword, value in by_own_names(keywords).items():
            name = SPARK_NAMES.get(keyword, keyword)
            if not isinstance(getattr(type(self), name, None), Param):
                known = [KEYWORDS.get(param.name, param.name) for param in self.params]
                raise unknown_keyword(keyword, value, known, type(self).__name__)
            if value is None:
                self.clear(self.getParam(name))
            else:
                self._set(**{name: value})
        return self

    def _set(self, **values: Any) -> Any:
        return super()._set(**{name: unwrapped(value) for name, value in values.items()})

    def getOrDefault(self, param: Any) -> Any:
        """Return the value, or the default, of a parameter, of Spark's name of it, or of the keyword."""
        return unwrapped(super().getOrDefault(param))

    def extractParamMap(self, extra: Any = None) -> Any:
        """Return the values of all parameters that are set or have a default."""
        return {param: unwrapped(value) for param, value in super().extractParamMap(extra).items()}

    def value(self, keyword: str) -> Any:
        """Return what is set for a keyword, or its default; None where there is neither."""
        param = self.getParam(keyword)
        return self.getOrDefault(param) if self.isDefined(param) else None


_SEVERAL = one_or_several, "a column name, or several different ones"
_ENTRIES = entries, "a column name, several, or a mapping: name of an output to column, list of columns, or None"
_POSITIVE = lambda value: float(require_number("value", value)), "a positive number"


def _spark_param(name: str, doc: str, convert: Callable[[Any], Any], expected: str) -> Param[Any]:
    return param(name, doc, convert, expected, keyword=KEYWORDS[name])


class PredictionParams(
    HasFeaturesCol,
    HasLabelCol,
    HasWeightCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasThresholds,
    HasHandleInvalid,
    HasOutputType,
    HasDecode,
    HasPadding,
    KeywordParams,
):
    """The parameters that estimator and model share: the columns to read, and the new ones."""

    featuresCol = _spark_param("featuresCol", "columns to predict from", *_SEVERAL)
    labelCol = _spark_param("labelCol", "column or columns of labels; none for []", *_ENTRIES)
    weightCol = _spark_param("weightCol", "column of weights, or one for each output", *_ENTRIES)
    predictionCol = _spark_param(
        "predictionCol",
        "new column of predictions, or one for each output: the class of a classifier, else what the model returns",
        *_SEVERAL,
    )
    probabilityCol = _spark_param(
        "probabilityCol",
        'new column of class probabilities, or one for each output that is a classifier; "" for none',
        *COLUMN_OR_NONE,
    )
    rawPredictionCol = _spark_param(
        "rawPredictionCol",
        'new column of the logits of a classifier, or one for each output that is one; "" for none',
        *COLUMN_OR_NONE,
    )
    handleInvalid = _spark_param(
        "handleInvalid",
        "treatment of a row with a null, NaN or another invalid value: error, skip or keep, without a prediction",
        *INVALID,
    )
    invalid_col = param(
        "invalid_col",
        'new column with the reason why a row that is kept has no prediction; "" for none',
        *COLUMN_OR_NONE,
    )
    thresholds = param(
        "thresholds",
        "for each class a number by which its probability is divided before the largest is taken",
        class_thresholds,
        "numbers of at least 0, of which at most one is 0",
    )
    output_kind = param(
        "output_kind",
        "what the outputs' numbers are: probabilities or logits of classes, numbers, or what the loss says (loss); "
        "one for all outputs, or a mapping from their names",
        output_kinds,
        f"one of {list(OUTPUT_KINDS)}, or a mapping: name of an output to one of them",
    )
    prediction_batch_size = param(
        "prediction_batch_size", "rows a call of the model, to predict, at most", *POSITIVE_INTEGER
    )
    prediction_batch_bytes = param(
        "prediction_batch_bytes", "bytes of the inputs and outputs of such a call, at most", *POSITIVE_INTEGER
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
        self._setDefault(handleInvalid="error", invalid_col="", output_kind="loss")


class TrainingParams(PredictionParams, HasSeed, HasValidationIndicatorCol):
    """The parameters of the estimator in addition to the keywords of `Trainer`."""

    # Spark's mixin has a default of its own, which may be negative, until the trainer's takes its place.
    seed = param("seed", "of the row order", integer_from(-(1 << 63)), "an integer")
    validation_data: Param[Any] = Param(
        Params._dummy(),  # noqa: SLF001 - as Spark ML's own mixins
        "validation_data",
        "rows to validate on, with the columns of those to train on; not saved",
        _dataframe,
    )
    validation_split = param(
        "validation_split",
        "share of the rows that are left out of training and validated on, chosen by their values",
        lambda value: float(require_number("value", value, inclusive=True, below=1)),
        "a number in [0, 1)",
    )
    validation_rows = param(
        "validation_rows", "rows to validate on while training, at most; the driver holds them", *POSITIVE_INTEGER
    )
    validation_every_epochs = param("validation_every_epochs", "epochs between two validations", *_POSITIVE)
    validation_every_seconds = param("validation_every_seconds", "seconds between two validations", *_POSITIVE)
    validation_every_commits = param("validation_every_commits", "commits between two validations", *POSITIVE_INTEGER)
    worker_learning_rate = param(
        "worker_learning_rate", "learning rate of the workers' optimizer, in place of the optimizer's own", *_POSITIVE
    )
    callbacks = param("callbacks", "of `Trainer.train`", list, "a list of callbacks")
    checkpoint: Param[Any] = Param(Params._dummy(), "checkpoint", "of `Trainer.train`", _place)  # noqa: SLF001 - as Spark ML's own mixins
    resume = param("resume", "of `Trainer.train`", *BOOLEAN)
