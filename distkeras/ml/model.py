"""The Spark ML model that a `KerasEstimator` fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from pyspark.ml import Model

from distkeras.data.binding import GivenColumns, GivenEntries, entries_of, listed, names_of
from distkeras.data.losses import kind_of, losses_of
from distkeras.data.model_columns import ASSEMBLED, assembled, data_spec
from distkeras.data.padding import of_columns
from distkeras.data.rows import RaggedRows
from distkeras.data.schema import decoders
from distkeras.data.validity import valid_rows
from distkeras.keras_model import archive, keras_config
from distkeras.keras_model.mapped_tables import MappedModel
from distkeras.keras_model.recipe import recipe_of
from distkeras.ml.evaluation import evaluated
from distkeras.ml.params import PredictionParams, with_accessors
from distkeras.ps.errors import BadValueError, ConfigurationError, ShapeError
from distkeras.ps.validate import invalid
from distkeras.results import JobResults
from distkeras.shown import Shown
from distkeras.spark.failures import short_errors
from distkeras.transformers.expressions import check_new_columns
from distkeras.transformers.files import Saveable
from distkeras.transformers.outputs import OutputColumn, class_logits, class_probabilities, classes
from distkeras.transformers.params import on_dataframe
from distkeras.transformers.predictor import PackedModel, predicted
from distkeras.transformers.serving import PredictionOptions, outputs_of_call

if TYPE_CHECKING:
    import keras
    from pyspark.sql import DataFrame

    from distkeras.callbacks import Callback
    from distkeras.ml.declared import ModelKeywords, ModelMembers
    from distkeras.trainer import Trainer
else:
    ModelMembers = object


#: The keyword that names an output's column of a form; ``prediction_col`` for all others.
_KEYWORDS = {"logits": "raw_prediction_col", "probability": "probability_col"}


def with_predictions(dataset: DataFrame, model: KerasModel, options: PredictionOptions) -> DataFrame:
    """Return the rows with the columns of ``model``, predicted as ``options`` say."""
    packed = model.packed_model
    ready, features = assembled(dataset, model.value("features_col"), packed.input_dtypes)
    inputs = packed.input_parts.bound(features, "features_col")
    columns = model.output_columns()
    names = [*(column.name for column in columns), *([options.invalid_col] if options.invalid_col else ())]
    keywords = [_KEYWORDS.get(column.form, "prediction_col") for column in columns]
    check_new_columns(dataset, *names, arguments=[*keywords, "invalid_col"][: len(names)])
    out = predicted(ready, packed, inputs, columns, options)
    return out.drop(ASSEMBLED) if inputs == (ASSEMBLED,) else out


@dataclass(frozen=True)
class Head:
    """The meaning of one output of a model.

    Args:
        classes: it scores classes: one number each, or a single one for the second of two.
        logits: the scores have not been through softmax or sigmoid.
        size: how many numbers a row has, -1 where that is open.
    """

    classes: bool
    logits: bool
    size: int


def heads_of(model: keras.Model) -> list[Head]:
    """Return one head for each output of a model; without a loss, an output is numbers."""
    losses = losses_of(model) if model.compiled else [None] * len(model.outputs)
    heads = []
    for output, loss in zip(model.outputs, losses, strict=True):
        shape = tuple(output.shape[1:])
        size = -1 if None in shape else math.prod(shape)
        kind = kind_of(loss, shape)
        # Several binary outputs in one are labels that may hold at once, none of which is the class.
        of_classes = kind.scores in ("sparse", "one-hot") or (kind.scores == "binary" and size == 1)
        heads.append(Head(of_classes and len(shape) <= 1, kind.from_logits, size))
    return heads


def _meant(head: Head, kind: str, axes: int) -> Head:
    """Return the meaning of an output that the user calls "probabilities", "logits" or "numbers"."""
    if kind == "loss":
        return head
    if kind != "numbers" and axes > 1:
        raise ConfigurationError(
            "`output_kind` must be 'numbers' or 'loss' for an output of several axes, of which none is the classes'. "
            f"Received: output_kind={kind!r} for {axes} axes"
        )
    return Head(kind != "numbers", kind == "logits", head.size)


def one_row(value: Any, shape: tuple[int | None, ...], dtype: str, name: str) -> np.ndarray:
    """Return a batch ``(1, …)`` of a vector, list, array or number.

    Raises:
        ShapeError: it does not fill the shape.
        BadValueError: a NaN, an infinity, or a number that the integers of the input do not hold, as in `transform`.
    """
    given = np.asarray(value.toArray() if hasattr(value, "toArray") else value)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = given.astype(dtype)
    good = numbers == given if numbers.dtype.kind in "biu" else np.isfinite(numbers)
    if not np.all(good):
        raise BadValueError(
            f"input {name!r} must hold finite numbers that are exact as {dtype}. "
            f"Received: {given.flat[int(np.argmin(good))]}"
        )
    fits = len(shape) == numbers.ndim and all(want in (None, got) for want, got in zip(shape, numbers.shape))  # noqa: B905 - of equal length where it counts
    if not fits:
        if None in shape or numbers.size != math.prod(extent or 1 for extent in shape):
            raise ShapeError(f"input {name!r} must have the shape {shape}. Received: shape {numbers.shape}")
        numbers = numbers.reshape([extent or 1 for extent in shape])
    return np.ascontiguousarray(numbers[np.newaxis])


class TrainingSummary(JobResults):
    """The records of training: those of `Trainer`, by the same names.

    Attributes:
        callbacks: the fit's own copies of them, with what they have recorded.
    """

    def __init__(
        self,
        trainer: Trainer,
        validation: Sequence[dict[str, Any]],
        callbacks: Sequence[Callback],
        unchecked: DataFrame,
    ) -> None:
        super().__init__()
        self.outcome = trainer.outcome
        self.outcome.validation = validation
        self._trainer, self._unchecked = trainer, unchecked
        self.callbacks = list(callbacks)

    @property
    def invalid_rows(self) -> DataFrame:
        """Return the rows that cannot be trained on, with the reason in the column ``reason``.

        Each reading finds them again. Under ``handle_invalid="error"`` there are none, or the fit would have failed.
        """
        return self._trainer.invalid_rows(self._unchecked)


def _read(path: str | PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise invalid("keras_model", str(path), f"a model, or a file that Keras has saved ({error.strerror})") from None


@with_accessors
class KerasModel(Shown, Model, PredictionParams, Saveable, ModelMembers):
    """Predict with a Keras model: add columns, and keep all other columns, the rows and their order.

    ::

        fitted = KerasModel(trained, prediction_col="class")
        fitted.transform(df).select("class", "probability")

    `KerasEstimator` returns such a model when it is fitted; you can also create one from a trained model, whose
    compilation determines what its outputs mean unless ``output_kind`` does. Python workers load the model once. It is
    saved and loaded like Spark's own models, with its optimizer's state: ``KerasEstimator(fitted.keras_model)`` can
    continue training.

    Args:
        keras_model: a built Functional or Sequential model, or the path of a ``.keras`` file.
        features_col, prediction_col, probability_col, raw_prediction_col, output_type: see `KerasEstimator`.
        prediction_batch_size, prediction_batch_bytes: see `KerasEstimator`.
        decode: as in `Trainer`, for the features.
        padding: as in `ModelPredictor`; `evaluate` pads mini-batches as training does.
        thresholds, handle_invalid, invalid_col, output_kind: see `KerasEstimator`.
        label_col, sample_weight_col: columns for `evaluate`.
        custom_objects: classes and functions of the model, by registered name, in addition to those that `keras.saving`
            knows. They are sent to the workers, but not saved: register them before you load the model.

    Raises:
        ConfigurationError: The model cannot be saved, or the columns do not fit it.
    """

    left_out = ("custom_objects",)
    inner = frozenset({
        "archive_to_save", "extra_to_save", "fitted_by", "left_out", "load_files", "output_columns", "packed_model",
        "prediction_options", "restore", "save_files",
    })  # fmt: skip

    @short_errors
    def __init__(
        self, keras_model: keras.Model | str | PathLike[str] | None = None, **keywords: Unpack[ModelKeywords]
    ) -> None:
        super().__init__()
        self.setParams(**keywords)
        self._summary: TrainingSummary | None = None
        self._local: keras.Model | None = None
        #: The estimator that fitted it, in this process; None for a model that was loaded or made by hand.
        self.parent: Any = None
        self._heads_by_loss: list[Head] = []
        self._data: bytes | None = None
        self._packed: PackedModel | None = None
        if isinstance(keras_model, (str, PathLike)):
            keras_model = archive.from_bytes(_read(keras_model), self.value("custom_objects"), compiled=True)
        if keras_model is not None:
            self._data = archive.with_optimizer(keras_model, "keras_model")
            self._packed = PackedModel(self._data, self.value("custom_objects"), keras_model)
            self._data = archive.with_attributes(self._data, self._packed.attributes)
            self._heads_by_loss = heads_of(keras_model)

    @classmethod
    def load(cls, path: str) -> Any:
        """Return the stage that was saved below ``path``, or one of the model that Keras saved in that file."""
        return cls(path) if path.endswith(".keras") and Path(path).is_file() else super().load(path)

    def _facts(self) -> Mapping[str, Any]:
        """Return the shapes of the inputs, and the names of the outputs."""
        if self._data is None:
            return {"uid": self.uid, "keras_model": "none"}
        shapes = [shape for shape, _ in self.packed_model.inputs]
        return {"uid": self.uid, "inputs": shapes, "outputs": self.output_names}

    @property
    def keras_model(self) -> keras.Model:
        """Return a new copy of the model, compiled as it was trained, with the state of its optimizer."""
        return archive.from_bytes(self.archive_to_save(), self.value("custom_objects"), compiled=True)

    @property
    def hasSummary(self) -> bool:
        """Return whether the model was fitted in this process."""
        return self._summary is not None

    @property
    def summary(self) -> TrainingSummary:
        """Return the records of training.

        Raises:
            ConfigurationError: The model was not fitted in this process.
        """
        if self._summary is None:
            raise ConfigurationError(
                "`summary` must be read from a model that `fit` has returned in this process. Received: "
                f"a {type(self).__name__} that was loaded, or made of a Keras model"
            )
        return self._summary

    def fitted_by(self, estimator: Any, summary: TrainingSummary) -> KerasModel:
        """Set estimator and summary, and take over the estimator's id as Spark's own models do; return the model."""
        self._resetUid(estimator.uid)
        self.parent, self._summary = estimator, summary
        return self

    @property
    def numFeatures(self) -> int:
        """Return the number of values in the model's input for one row.

        Raises:
            ConfigurationError: The model has several inputs, or an input without a fixed size.
        """
        inputs = self.packed_model.inputs
        if len(inputs) != 1 or None in inputs[0][0]:
            shapes = [shape for shape, _ in inputs]
            raise ConfigurationError(f"`numFeatures` needs one input of fixed size. Received: inputs of shape {shapes}")
        return math.prod(extent or 1 for extent in inputs[0][0])

    @property
    def numClasses(self) -> int:
        """Return the number of classes of a classifier.

        Raises:
            ConfigurationError: The model is not a classifier, or has several outputs.
        """
        return max(2, self._only_classifier("numClasses").size)

    @property
    def _heads(self) -> list[Head]:
        """The meaning of each output: what ``output_kind`` says, or else the loss."""
        names, kinds = self.output_names, self.value("output_kind")
        if isinstance(kinds, Mapping) and (unknown := sorted(kinds.keys() - set(names))):
            raise ConfigurationError(f"`output_kind` must be of the outputs {names}. Received: {unknown}")
        given = [kinds.get(name, "loss") if isinstance(kinds, Mapping) else kinds for name in names]
        shapes = [shape for shape, _ in self.packed_model.outputs]
        return list(map(_meant, self._heads_by_loss, given, map(len, shapes)))

    def _only_classifier(self, name: str) -> Head:
        if len(self.output_names) != 1 or not self._heads[0].classes:
            raise ConfigurationError(
                f"`{name}` needs a classifier of one output. Received: a model with outputs {self.output_names}, "
                f"of which {[head.classes for head in self._heads]} are classes"
            )
        return self._heads[0]

    @short_errors
    def predict(self, value: Any) -> Any:
        """Return the prediction for one row, computed in this process.

        Args:
            value: the model's input: a vector, list or array of any shape with the right number of values, or a number
                if the input has one value. A list or a mapping of these if the model has several inputs.

        Returns:
            The value that `transform` writes to ``prediction_col``: a float or an array; a list for several outputs.

        Raises:
            ShapeError: ``value`` has another number of values.
            BadValueError: `transform` refuses a value.
        """
        outputs, predictions = self._outputs_of(value), []
        for column in self.output_columns():
            output = outputs[column.output]
            if column.form == "class":
                predictions.append(float(classes(output, column)[0]))
            elif column.form == "number":
                predictions.append(float(np.ravel(output)[0]))
            elif not column.derived:
                predictions.append(output[0])
        return predictions[0] if len(predictions) == 1 else predictions

    @short_errors
    def predictProbability(self, value: Any) -> np.ndarray:
        """Return the classes' probabilities for one row, shape ``(numClasses,)``, float64; see `predict`.

        Raises:
            ConfigurationError: The model is not a classifier, or has several outputs.
        """
        return self._of_classes("predictProbability", class_probabilities, value)

    @short_errors
    def predictRaw(self, value: Any) -> np.ndarray:
        """Return the classes' logits for one row, shape ``(numClasses,)``, float64; see `predict`.

        Raises:
            ConfigurationError: The model is not a classifier, or has several outputs.
        """
        return self._of_classes("predictRaw", class_logits, value)

    def _of_classes(self, name: str, make: Callable[[np.ndarray, OutputColumn], np.ndarray], value: Any) -> np.ndarray:
        head = self._only_classifier(name)
        return np.ravel(make(self._outputs_of(value)[0], OutputColumn("", 0, logits=head.logits)))

    def _outputs_of(self, value: Any) -> list[np.ndarray]:
        """Return the model's outputs for one row, each ``(1, …)``."""
        packed = self.packed_model
        parts = packed.input_parts
        if isinstance(value, Mapping):
            values = [value[name] for name in parts.bound({name: name for name in value}, "value")]
        else:
            values = [value] if len(packed.inputs) == 1 else list(value)
        if len(values) != len(packed.inputs):
            raise ShapeError(f"`value` must have {len(packed.inputs)} inputs. Received: {len(values)}")
        if self._local is None:
            self._local = archive.from_bytes(packed.data, packed.objects, trusted=packed.trusted)
        arrays = [
            one_row(number, shape, dtype, name)
            for number, (shape, dtype), name in zip(values, packed.inputs, parts.names, strict=True)
        ]
        if any(shape[:1] == (None,) for shape, _ in packed.inputs):
            options, columns = self.prediction_options(), parts.bound(self.value("features_col"), "features_col")
            arrays = [
                RaggedRows(array[0], np.array([0, array.shape[1]])).padded(np.zeros(1, int), options.padding_of(column))
                if shape[:1] == (None,)
                else array
                for array, (shape, _), column in zip(arrays, packed.inputs, columns, strict=True)
            ]
        with keras_config.applied(packed.settings):
            return outputs_of_call(self._local, arrays)

    @on_dataframe
    def _transform(self, dataset: DataFrame) -> DataFrame:
        return with_predictions(dataset, self, self.prediction_options())

    @on_dataframe
    def evaluate(self, dataset: DataFrame) -> dict[str, Any]:
        """Return loss and metrics over a DataFrame, by name, as `keras.Model.evaluate` does: on executors.

        It takes one pass over the rows, and the partitions do not matter. For a loss that depends on which rows share a
        mini-batch, such as one with ``reduction="sum"``, a mask or your own code, the mini-batches are cut from all
        rows in their order; Spark caches the rows and moves them.

        A metric of each class, such as an ``F1Score`` without an average, is an array; all others are floats. The loss
        of one of several outputs is a mean over rows, also where Keras counts a shorter batch like the others.
        The columns are ``label_col`` and ``sample_weight_col``, if that is set; the batches have
        ``prediction_batch_size`` rows.

        Raises:
            ConfigurationError: The model is not compiled with a loss, or a metric is of your own class, whose states
                may not be additive over the executors.
            MissingColumnError, ShapeError, BadValueError, EmptyDataError: The data cannot be evaluated.
        """
        with keras_config.applied(self.packed_model.settings):
            packed, labels = self.packed_model, self.value("label_col")
            recipe = recipe_of(
                self.keras_model,
                packed.data,
                objects=self.value("custom_objects"),
                labels=bool(listed(entries_of(labels, "label_col"))),
            )
            model = recipe.build(packed.data)
            ready, inputs = assembled(dataset, self.value("features_col"), packed.input_dtypes)
            spec = data_spec(
                model,
                ready.schema,
                rows=ready,
                features=inputs,
                labels=labels,
                weight=self.value("sample_weight_col"),
                batch_size=self.value("prediction_batch_size"),
                shuffle=False,
                decode=decoders(self.value("decode"), listed(names_of(inputs, "features_col"))),
                padding=self._padding(inputs, labels, self.value("sample_weight_col")),
            )
            if self.value("handle_invalid") != "error":
                ready = valid_rows(ready, spec)
            load = packed.loader(dataset.sparkSession, recipe, spec)

            def load_in_task() -> keras.Model | MappedModel:
                recipe.begin_task()
                return load()

            return evaluated(model, ready, spec, load_in_task)

    def _padding(self, features: GivenColumns, labels: GivenEntries, weights: GivenEntries) -> Any:
        """Return the padding of the columns that an evaluation reads."""
        given = [names_of(features, "features_col"), entries_of(labels, "label_col"), entries_of(weights, "weight")]
        return of_columns(self.value("padding"), [name for columns in given for name in listed(columns)])

    @property
    def packed_model(self) -> PackedModel:
        """Return the model as bytes, ready to travel."""
        if self._packed is None:
            self._packed = PackedModel(self.archive_to_save(), self.value("custom_objects"))
        return self._packed

    @property
    def output_names(self) -> list[str]:
        """Return the names of the model's outputs."""
        return list(self.packed_model.output_parts.names)

    def prediction_options(self) -> PredictionOptions:
        """Return the options of predictions."""
        features = listed(names_of(self.value("features_col"), "features_col"))
        functions = decoders(self.value("decode"), features)
        return PredictionOptions(
            self.value("prediction_batch_size"),
            self.value("prediction_batch_bytes"),
            {name: function for name, function in functions.items() if name in features},
            self.value("handle_invalid"),
            self.value("invalid_col"),
            padding=of_columns(self.value("padding"), features),
        )

    def output_columns(self) -> list[OutputColumn]:
        """Return the new columns: predictions, and of a classifier its scores and probabilities."""
        packed, columns = self.packed_model, []
        vectors = self.value("output_type") == "vector"
        for output, (name, head) in enumerate(zip(self._prediction_names(), self._heads, strict=True)):
            flat = len(packed.outputs[output][0]) == 1
            form = "vector" if vectors and flat else "values"
            if head.classes or head.size == 1:
                form = "class" if head.classes else "number"
            thresholds = self._thresholds(head) if head.classes else ()
            columns.append(packed.column(name, output, form, logits=head.logits, thresholds=thresholds))
        for keyword, form in (("raw_prediction_col", "logits"), ("probability_col", "probability")):
            names = self._with_output_names(self.value(keyword)) if self.value(keyword) else []
            for output, (name, head) in enumerate(zip(names, self._heads, strict=False)):
                if head.classes:
                    columns.append(packed.column(name, output, form, logits=head.logits))
        return columns

    def _thresholds(self, head: Head) -> tuple[float, ...]:
        thresholds = tuple(self.value("thresholds") or ())
        if thresholds and len(thresholds) != max(2, head.size):
            raise ConfigurationError(
                f"`thresholds` must have one for each of {max(2, head.size)} classes. Received: {list(thresholds)}"
            )
        return thresholds

    def _with_output_names(self, name: str) -> list[str]:
        """Return the name of a column, or one for each output."""
        outputs = self.output_names
        if len(outputs) == 1:
            return [name]
        # A layer that is called twice gives two outputs one name; Keras numbers the names of their metrics like this.
        numbers = [outputs[:place].count(output) for place, output in enumerate(outputs)]
        return [
            f"{name}_{output}" + (f"_{number}" if number else "")
            for output, number in zip(outputs, numbers, strict=True)
        ]

    def _prediction_names(self) -> list[str]:
        names = self.value("prediction_col")
        if isinstance(names, str):
            return self._with_output_names(names)
        return list(self.packed_model.output_parts.bound(names, "prediction_col"))

    def archive_to_save(self) -> bytes:
        """Return the archive of the model with its optimizer, as fitted; raise ConfigurationError without one."""
        if self._data is None:
            raise ConfigurationError("`keras_model` must be set. Received: KerasModel without keras_model")
        return self._data

    def extra_to_save(self) -> dict[str, Any]:
        """Return what the outputs mean."""
        return {"heads": [dataclasses.asdict(head) for head in self._heads_by_loss]}

    def restore(self, data: bytes | None, saved: Mapping[str, Any]) -> None:
        """Take back the model, and what its outputs mean."""
        self._data = data
        self._heads_by_loss = [Head(**head) for head in saved["heads"]]
