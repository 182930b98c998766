"""A job's description: from a stranger's JSON to what a driver runs; what is refused names its field."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from distkeras.jobs.errors import DescriptionError
from distkeras.jobs.schema import job_schema
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import Rule, make
from distkeras.ps.transport.deadlines import Deadlines
from distkeras.settings import rule_of, server_settings, train_settings, worker_settings
from distkeras.trainer import Trainer

#: Bytes of the longest description.
LONGEST = 1 << 20

#: Longest part of what came that an error repeats.
_SHOWN = 300
#: What Spark would take for a pattern, which might lead out of where a user may read.
_PATTERN = re.compile(r"[*?#\[\]{}\\%\x00-\x1f]")


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
    """

    rule: str
    data: str
    hyper_parameters: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    checkpoint_every: int = 100

    @classmethod
    def from_json(cls, value: Any) -> JobDescription:
        """The description that ``value`` is, checked as far as it can be without model and data.

        Raises:
            DescriptionError: it is none, or cannot work; the error has the field.
        """
        _require_valid(value)
        made = cls(**value)
        made.made_rule()
        _require_settings(made)
        return made

    @classmethod
    def from_text(cls, text: str | bytes) -> JobDescription:
        """Likewise, of JSON as text.

        Raises:
            DescriptionError: it is no JSON, or no description.
        """
        return cls.from_json(json_of(text))

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

    def keywords(self) -> dict[str, Any]:
        """The keywords of `Trainer`."""
        given = dict(self.options)
        if "class_weight" in given:
            given["class_weight"] = {int(name): weight for name, weight in given["class_weight"].items()}
        return given


def json_of(text: str | bytes) -> Any:
    """What a stranger's JSON says.

    Raises:
        DescriptionError: it is none, is too long, or may mean several things.
    """
    if len(text) > LONGEST:
        raise DescriptionError(f"JSON must have at most {LONGEST} bytes. Received: {len(text)}")
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise DescriptionError(f"what is sent must be JSON. Received: {str(error)[:_SHOWN]}") from None


def require_allowed(data: str, roots: Sequence[str]) -> str:
    """Where Spark reads ``data`` from, as a URI, if that lies below one of ``roots``.

    Args:
        data: a path, or a URI.
        roots: paths and URIs of folders, or of what is read itself.

    Raises:
        DescriptionError: it lies elsewhere, or may mean several things.
    """
    allowed = [_located(root) for root in roots]
    if _PATTERN.search(data) or ".." in PurePosixPath(data).parts:
        raise DescriptionError(
            f"`data` must be one path or URI, without patterns and `..`. Received: {data[:_SHOWN]!r}", "data"
        )
    base, path = _located(data)
    if not any(base == root and path.is_relative_to(below) for root, below in allowed):
        shown = ", ".join(roots) or "no place: its operator has allowed none"
        raise DescriptionError(f"`data` must be where the server lets jobs read: {shown}. Received: {data!r}", "data")
    return f"{base}{path}"


def _located(place: str) -> tuple[str, PurePosixPath]:
    """Scheme and host, and the path there; that of a local file without its symbolic links."""
    parts = urlsplit(place if "://" in place else f"file://{Path(place).absolute()}")
    if parts.scheme == "file" and not parts.netloc:
        return "file://", PurePosixPath(Path(parts.path).resolve())
    return f"{parts.scheme}://{parts.netloc}", PurePosixPath("/", parts.path)


@cache
def _validator() -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(job_schema())


def _require_valid(value: Any) -> None:
    """Whether ``value`` is what the schema says."""
    import jsonschema

    error = jsonschema.exceptions.best_match(_validator().iter_errors(value))
    if error is not None:
        where = ".".join(map(str, error.absolute_path))
        named = f"`{where}`" if where else "a description"
        told = error.message if len(error.message) <= _SHOWN else f"{error.message[:_SHOWN]}…"
        raise DescriptionError(f"{named} must be as the schema says. Received: {told}", where)


def _require_settings(description: JobDescription) -> None:
    """Whether the options work with each other and with the rule; as far as that shows without a model."""
    signature = inspect.signature(Trainer).parameters
    arguments = {name: parameter.default for name, parameter in signature.items()} | description.keywords()
    arguments |= {"deadlines": Deadlines()}
    try:
        rule = rule_of(description.made_rule(), arguments["communication_window"])
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
