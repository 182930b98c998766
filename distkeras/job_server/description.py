"""The descriptions of jobs and predict jobs that a client submits, as pydantic models with checks and documentation.

The fields of `Trainer`, `ModelPredictor`, `EarlyStopping`, the rules and the schedules are read from their
declarations (`distkeras.settings`), so that an option is declared in one place.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping
from functools import reduce
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import from_json

from distkeras.callbacks import EarlyStopping
from distkeras.data.losses import CHOSEN_BY_LABELS
from distkeras.data.padding import padding_from_json
from distkeras.data.rows import Padding
from distkeras.job_server.errors import DescriptionError
from distkeras.job_server.submission import LEFT_OUT
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import Rule, all_rules, make
from distkeras.ps.rules.schedules import KINDS as SCHEDULES
from distkeras.ps.settings import ServerSettings, WorkerSettings
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.settings import component_settings, defaults_of, flattened, grouped, options_of, train_settings
from distkeras.trainer import Trainer
from distkeras.transformers.predictor import ModelPredictor

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: The most bytes of a description.
DESCRIPTION_BYTES_MAX = 1 << 20
#: Keywords of `ModelPredictor` that a job cannot set: the model is a separate part, and code is not sent.
PREDICTOR_LEFT_OUT = {"keras_model", "custom_objects", "decode"}
#: How pydantic names the scalar types of a union in the location of an error.
_TYPE_NAMES = {"float", "int", "bool", "str", "none"}
#: The most items of a list, the most characters of a text, and those of a received value in an error.
_ITEMS, _TEXT, _SHOWN = 100, 200, 300
#: Options whose values name something of Keras, by its module.
_KNOWN_BY_KERAS = {
    "loss": "losses",
    "metrics": "metrics",
    "weighted_metrics": "metrics",
    "worker_optimizer": "optimizers",
}


class Submitted(BaseModel):
    """Base of everything that a client sends: types are exact, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


Word = Annotated[str, Field(pattern=r"^[A-Za-z_]\w{0,99}$")]
#: A word by which a job is found.
Tag = Annotated[str, Field(pattern=r"^[\w.:/+-]{1,64}$")]
Text = Annotated[str, Field(max_length=_TEXT)]
#: One line without control characters, which a terminal or a database might interpret.
Line = Annotated[str, Field(max_length=_TEXT, pattern="^[^\\x00-\\x1f\\x7f-\\x9f]*$")]
Column = Annotated[str, Field(min_length=1, max_length=_TEXT)]
Place = Annotated[str, Field(min_length=1, max_length=1000)]
JobId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
#: The integers that JSON readers agree on.
Integer = Annotated[int, Field(ge=-(2**53), le=2**53)]
Scalar = float | int | bool | Text | None
Words = Annotated[list[Word], Field(max_length=_ITEMS)]
_Listed = Column | Annotated[list[Column], Field(min_length=1, max_length=_ITEMS)]
Columns = _Listed | Annotated[dict[str, Column], Field(min_length=1, max_length=_ITEMS)]
Entries = (
    Column
    | Annotated[list[_Listed | None], Field(max_length=_ITEMS)]
    | Annotated[dict[str, _Listed | None], Field(min_length=1, max_length=_ITEMS)]
    | None
)
ClassWeights = Annotated[dict[Annotated[str, Field(pattern=r"^-?\d{1,15}$")], float], Field(max_length=100_000)]


def _require_small_mapping(value: Any) -> Any:
    """Return ``value``; raise ValueError for a large dictionary, which pydantic would check only after its items."""
    if isinstance(value, dict) and len(value) > _ITEMS:
        raise ValueError(f"It must have at most {_ITEMS} items, not {len(value)}")
    return value


class OptimizerConfig(Submitted):
    """An optimizer of Keras, by the name of its class."""

    class_name: Word
    config: Annotated[dict[str, Scalar], BeforeValidator(_require_small_mapping)] = Field(
        {}, max_length=_ITEMS, description="The arguments of the optimizer."
    )


#: The JSON type of an option, by its annotation in Python.
_TYPES: dict[str, Any] = {
    "bool": bool,
    "int": Integer,
    "float": float,
    "float | Schedule": float,
    "str": Text,
    "int | str": Integer | Text,
    "str | Sequence[str]": _Listed,
    "str | Sequence[str] | Mapping[str, str]": Columns,
    "GivenEntries": Entries,
    "Mapping[int, float] | str": ClassWeights | Literal["balanced"],
    "tuple[int, ...]": Annotated[list[Integer], Field(max_length=_ITEMS)],
}


def _options_model(
    name: str, kind: type, left_out: Collection[str] = (), types: Mapping[str, Any] | None = None, **more: Any
) -> type[Submitted]:
    """Return a model whose fields are the arguments of the constructor of ``kind``."""
    for option in options_of(kind).values():
        if option.name in left_out:
            continue
        type_ = (types or {}).get(option.name) or _TYPES.get(option.annotation.removesuffix(" | None"))
        if type_ is None:
            raise ConfigurationError(f"an option must be of a type that JSON has. Received: {name}, {option}")
        default = ... if option.default is Parameter.empty else option.default
        optional = type_ | None if option.annotation.endswith("| None") else type_
        more[option.name] = (optional, Field(default, description=option.text))
    return cast("type[Submitted]", create_model(name, __base__=Submitted, **more))


_Padding = _options_model("Fields of Padding", Padding)
_TYPES["Padding | Mapping[str, Padding]"] = (
    _Padding | Annotated[dict[str, _Padding], Field(min_length=1, max_length=_ITEMS)]  # type: ignore[valid-type]  # a class that is made here
)
_SCHEDULES = [
    _options_model(f"{kind.__name__}Schedule", kind, schedule=(Literal[name], ...)) for name, kind in SCHEDULES.items()
]
_RULES = {name: _options_model(f"{name} hyper-parameters", kind) for name, kind in all_rules().items()}


class TrainerOptions(
    _options_model(  # type: ignore[misc]  # a class that is made here
        "Keywords of Trainer",
        Trainer,
        LEFT_OUT,
        {
            "learning_rate": float
            | Annotated[reduce(operator.or_, cast("Any", _SCHEDULES)), Field(discriminator="schedule")],
            "loss": Word | Words,
            "metrics": Words,
            "weighted_metrics": Words,
            "loss_weights": Annotated[list[float], Field(max_length=_ITEMS)],
            "num_workers": Annotated[int, Field(ge=1, le=100_000)],
            "num_epoch": Annotated[int, Field(ge=1, le=1_000_000)],
            "batch_size": Annotated[int, Field(ge=1, le=10_000_000)],
            "worker_optimizer": Word | OptimizerConfig,
        },
    )
):
    """Keywords of `Trainer`."""


class EvaluationOptions(
    _options_model(  # type: ignore[misc]  # a class that is made here
        "Keywords of EarlyStopping",
        EarlyStopping,
        {"df"},
        {"max_rows": Annotated[int, Field(ge=1, le=10**7)]},  # the driver holds them in memory
        data=(Place, Field(description="Path or URI of the Parquet that the center is evaluated on.")),
    )
):
    """Keywords of `EarlyStopping`, and its data."""


class PredictorOptions(
    _options_model(  # type: ignore[misc]  # a class that is made here
        "Keywords of ModelPredictor",
        ModelPredictor,
        PREDICTOR_LEFT_OUT,
        {
            "batch_size": Annotated[int, Field(ge=1, le=2**53)],
            "batch_bytes": Annotated[int, Field(ge=1, le=2**53)],
            "output_type": Literal["array", "vector"],
        },
    )
):
    """Keywords of `ModelPredictor`."""


class Description(Submitted):
    """The common part of all descriptions."""

    name: Line = Field("", description="A name of your choice for the job.")
    data: Place = Field(description="Path or URI of the Parquet to read, in a folder that the server allows.")
    tags: list[Tag] = Field([], max_length=20, description="Tags of the job.")

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the checked description in ``value``; raise DescriptionError, which names the invalid field."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise description_error(error) from None

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON, with the options that were given; `from_json` reads it."""
        dumped = self.model_dump()
        for group in ("options", "early_stopping"):
            if isinstance(part := getattr(self, group, None), Submitted):
                dumped[group] = part.model_dump(exclude_unset=True)
        return dumped


class JobDescription(Description):
    """A training job."""

    rule: Literal[tuple(all_rules())] = Field(description="The update rule.")  # type: ignore[valid-type]  # the table of rules is read at import
    hyper_parameters: dict[str, Any] = Field(
        {},
        description="The hyper-parameters of the rule.",
        json_schema_extra={"anyOf": [model.model_json_schema() for model in _RULES.values()]},
    )
    options: TrainerOptions = Field(TrainerOptions(), description="Keywords of Trainer.")
    checkpoint_every: int = Field(100, ge=1, le=2**53, description="Commits between two snapshots.")
    time_budget: float | None = Field(
        None, gt=0, description="Seconds after which training ends early and successfully."
    )
    early_stopping: EvaluationOptions | None = Field(
        None,
        description="Keywords of EarlyStopping, and its data. Without `patience` and `target`: only evaluations.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        """Check the fields in combination, as far as is possible without a model."""
        rule = self.build_rule()
        _require_known(self.options.model_dump(include={*_KNOWN_BY_KERAS}))
        self.made_early_stopping(cast("DataFrame", None))  # the rows are read later
        arguments = defaults_of(Trainer) | flattened(self.keywords()) | {"deadlines": Deadlines()}
        try:
            if arguments["learning_rate"] is None and rule.traits.gradient:
                arguments["learning_rate"] = 0.01  # that of the model's optimizer, which is unknown here
            training = train_settings(arguments)
            for kind in (ServerSettings, WorkerSettings):
                component_settings(kind, rule, training, arguments)
        except ConfigurationError as error:
            raise _of_field(error, "options", self.options.model_fields_set, "options") from error
        return self

    def build_rule(self) -> Rule:
        """Return the rule; raise DescriptionError if a hyper-parameter is not valid."""
        try:
            _RULES[self.rule].model_validate(self.hyper_parameters)
            return make(self.rule, **self.hyper_parameters)
        except ValidationError as error:
            raise description_error(error, "hyper_parameters") from None
        except ConfigurationError as error:
            raise _of_field(error, "hyper_parameters", self.hyper_parameters, "rule") from error

    def made_early_stopping(self, df: DataFrame) -> EarlyStopping | None:
        """Return the callback that evaluates the center on ``df``, or None; DescriptionError for a bad keyword."""
        if self.early_stopping is None:
            return None
        keywords = self.early_stopping.model_dump(exclude_unset=True, exclude={"data"})
        try:
            return EarlyStopping(df, **keywords)
        except ConfigurationError as error:
            raise _of_field(error, "early_stopping", keywords, "early_stopping") from error

    def keywords(self) -> dict[str, Any]:
        """Return the arguments of `Trainer`."""
        options = self.options.model_dump(exclude_unset=True)
        if isinstance(options.get("class_weight"), Mapping):
            options["class_weight"] = {int(name): weight for name, weight in options["class_weight"].items()}
        return grouped(_with_padding(options))


class PredictionDescription(Description):
    """A predict job."""

    output: Place = Field(
        description="Path or URI that the rows with their predictions are written to, as Parquet. It must not exist "
        "yet, and must be in your own folder, inside a folder that the server allows."
    )
    job: JobId | None = Field(
        None, description="The finished job whose model predicts. Without it, a model must be sent."
    )
    options: PredictorOptions = Field(PredictorOptions(), description="Keywords of ModelPredictor.")

    def keywords(self) -> dict[str, Any]:
        """Return the arguments of `ModelPredictor`."""
        options: dict[str, Any] = self.options.model_dump(exclude_unset=True)
        return _with_padding(options)


def _with_padding(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with `Padding` in place of its fields; raise DescriptionError if one is not valid."""
    try:
        return options | {"padding": padding_from_json(options["padding"])} if "padding" in options else options
    except ConfigurationError as error:
        raise DescriptionError(error.message, "options.padding") from error


def _require_known(options: Mapping[str, Any]) -> None:
    """Raise DescriptionError for a name that Keras does not know, so that no job has to start to find that out."""
    for option, value in options.items():
        values = value if isinstance(value, list) else [value]
        names = [one["class_name"] if isinstance(one, dict) else one for one in values if one is not None]
        for name in [name for name in names if name.lower() not in CHOSEN_BY_LABELS.get(option, ())]:
            import keras

            try:
                getattr(keras, _KNOWN_BY_KERAS[option]).get(name)
            except ValueError:
                field = f"options.{option}"
                raise DescriptionError(f"`{field}` must be one that Keras knows. Received: {name!r}", field) from None


def description_error(error: ValidationError, prefix: str = "", *, form: bool = False) -> DescriptionError:
    """Return one error of a validation: that of the most deeply nested field."""
    places = []
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, DescriptionError):
            return cause
        places.append((_names(detail), detail))
    names, detail = max(places, key=lambda place: (len(place[0]), place[1]["type"].startswith("union_tag")))
    names = names[1:] if form and names[:1] == ["job"] and len(names) > 1 else names
    field = ".".join([*filter(None, [prefix]), *names])
    received = repr(detail["input"])
    shortened = received if len(received) <= _SHOWN else f"{received[:_SHOWN]}…"
    message = str(detail.get("ctx", {}).get("error") or detail["msg"])
    message = message[0].lower() + message[1:]
    return DescriptionError(f"`{field or 'the description'}` is not valid: {message}. Received: {shortened}", field)


def _names(detail: Mapping[str, Any]) -> list[str]:
    """Return the path of fields to an error, without the types and schedule tags that pydantic adds for unions."""
    parts = [str(part)[:100] for part in detail["loc"]]
    last = parts[-1:] if detail["type"] in ("extra_forbidden", "missing") else []
    path = parts[: len(parts) - len(last)]
    names = [part for part in path if re.fullmatch("[a-z_0-9]+", part) and part not in _TYPE_NAMES]
    if names[1:2] == ["learning_rate"] and names[2:] and names[2] in SCHEDULES:
        del names[2]
    return names + last


def json_of(text: str | bytes) -> Any:
    """Return the parsed JSON in ``text``; raise DescriptionError if it is invalid or too long."""
    if len(text) > DESCRIPTION_BYTES_MAX:
        raise DescriptionError(f"JSON must have at most {DESCRIPTION_BYTES_MAX} bytes. Received: {len(text)}")
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise DescriptionError(f"the request must be JSON. Received: {str(error)[:_SHOWN]}") from None


def _of_field(error: ConfigurationError, group: str, keywords: Collection[str], else_: str) -> DescriptionError:
    """Return a DescriptionError with the field of the argument that ``error`` names."""
    if isinstance(error, DescriptionError):
        return error
    match = re.search(r"`(\w+)`", error.message)
    return DescriptionError(error.message, f"{group}.{match[1]}" if match and match[1] in keywords else else_)
