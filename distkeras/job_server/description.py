"""A job's description: from a stranger's JSON to what a driver runs; what is refused names its field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from distkeras.callbacks import EarlyStopping
from distkeras.job_server.errors import DescriptionError
from distkeras.job_server.schema import job_schema
from distkeras.options import defaults_of
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import Rule, make
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.settings import flattened, grouped, server_settings, train_settings, worker_settings
from distkeras.trainer import Trainer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Bytes of the longest description.
LONGEST = 1 << 20

#: Longest part of what came that an error repeats.
_SHOWN = 300


@dataclass(frozen=True)
class JobDescription:
    """What a job is to do, as it was checked.

    Args:
        rule: name of the update rule.
        data: path or URI of Parquet.
        hyper_parameters: of the rule.
        options: keywords of `Trainer`.
        name: what its user calls it.
        checkpoint_every: commits from one snapshot to the next.
        time_budget: seconds after which a driver ends training early; None: never.
        early_stopping: keywords of `distkeras.EarlyStopping`, with the path or URI of its rows as ``data``; None: none.
    """

    rule: str
    data: str
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    checkpoint_every: int = 100
    time_budget: float | None = None
    early_stopping: Mapping[str, Any] | None = None

    @classmethod
    def from_json(cls, value: Any) -> JobDescription:
        """The description that ``value`` is, checked as far as it can be without model and data.

        Raises:
            DescriptionError: it is none, or cannot work; the error has the field.
        """
        require_valid(_validator(), value)
        made = cls(**value)
        made.made_rule()
        _require_settings(made)
        made.made_early_stopping(cast("DataFrame", None))  # which is not looked at yet
        return made

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; `from_json` takes it back."""
        return asdict(self)

    def made_rule(self) -> Rule:
        """The rule.

        Raises:
            DescriptionError: a hyper-parameter that cannot work.
        """
        try:
            return make(self.rule, **self.hyper_parameters)
        except ConfigurationError as error:
            raise _of_field(error, "hyper_parameters", self.hyper_parameters, "rule") from error

    def made_early_stopping(self, df: DataFrame) -> EarlyStopping | None:
        """What evaluates the center, and ends the job early, if there is to be one.

        Args:
            df: its rows.

        Raises:
            DescriptionError: a keyword that cannot work.
        """
        if self.early_stopping is None:
            return None
        given = {name: value for name, value in self.early_stopping.items() if name != "data"}
        try:
            return EarlyStopping(df, **given)
        except ConfigurationError as error:
            raise _of_field(error, "early_stopping", given, "early_stopping") from error

    def keywords(self) -> dict[str, Any]:
        """Return the arguments of `Trainer`."""
        return grouped(self._options())

    def _options(self) -> dict[str, Any]:
        options = dict(self.options)
        if "class_weight" in options:
            options["class_weight"] = {int(name): weight for name, weight in options["class_weight"].items()}
        return options


def json_of(text: str | bytes) -> Any:
    """What a stranger's JSON says.

    Raises:
        DescriptionError: it is none, is too long, or may mean several things.
    """
    if len(text) > LONGEST:
        raise DescriptionError(f"JSON must have at most {LONGEST} bytes. Received: {len(text)}")
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)
        json.dumps(found, ensure_ascii=False).encode()  # half of a sign is no text, and no database takes it
        return found
    except (ValueError, RecursionError) as error:
        raise DescriptionError(f"what is sent must be JSON. Received: {str(error)[:_SHOWN]}") from None


@cache
def _validator() -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(job_schema())


def require_valid(validator: Any, value: Any) -> None:
    """Whether ``value`` is what a schema says.

    Raises:
        DescriptionError: it is not; the error has the field.
    """
    import jsonschema

    error = jsonschema.exceptions.best_match(validator.iter_errors(value))
    if error is not None:
        where = ".".join(map(str, error.absolute_path))
        named = f"`{where}`" if where else "a description"
        told = error.message if len(error.message) <= _SHOWN else f"{error.message[:_SHOWN]}…"
        raise DescriptionError(f"{named} must be as the schema says. Received: {told}", where)


def _require_settings(description: JobDescription) -> None:
    """Whether the options work with each other and with the rule; as far as that shows without a model."""
    arguments = defaults_of(Trainer) | flattened(description.keywords()) | {"deadlines": Deadlines()}
    try:
        rule = description.made_rule()
        if arguments["learning_rate"] is None and rule.traits.gradient:
            arguments["learning_rate"] = 0.01  # the optimizer has one, which is not known here
        training = train_settings(arguments)
        worker_settings(rule, training, arguments)
        server_settings(rule, training, arguments)
    except DescriptionError:
        raise
    except ConfigurationError as error:
        raise _of_field(error, "options", description.options, "options") from error


def _of_field(error: ConfigurationError, group: str, given: Mapping[str, Any], else_: str) -> DescriptionError:
    """An argument's error, with the field that has its name."""
    named = re.search(r"`(\w+)`", error.message)
    return DescriptionError(error.message, f"{group}.{named[1]}" if named and named[1] in given else else_)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: of two that are the same, readers differ about which one counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key that comes twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name}, which JSON does not have")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number that is too large")
    return number
