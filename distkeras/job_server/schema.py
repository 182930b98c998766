"""What a job's description may be, as a JSON schema: made of `Trainer`'s signature and docstring, and of the rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from distkeras.callbacks import EarlyStopping
from distkeras.options import options_of
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import Rule, all_rules
from distkeras.ps.rules.schedules import KINDS as SCHEDULES
from distkeras.trainer import Trainer

#: Keywords of `Trainer` that a stranger may not set: code, addresses, files and the terminal of the driver's machine.
LEFT_OUT = {
    *("model", "rule", "custom_objects", "decode", "deadlines", "frozen_weights"),
    *("server", "host", "port", "progress", "log_every", "resources"),
}

#: Likewise, of `ModelPredictor`: the model comes otherwise.
PREDICTOR_LEFT_OUT = {"keras_model", "custom_objects", "decode"}

#: Longest list, and longest text, within a description.
_ITEMS, _TEXT = 100, 200
#: What Python's and Spark's integers have in common, with room for the seeds that are made of one.
_LARGEST = 2**53

_WORD = {"type": "string", "pattern": r"^[A-Za-z_]\w{0,99}$"}
_COLUMN = {"type": "string", "minLength": 1, "maxLength": _TEXT}
_INTEGER = {"type": "integer", "minimum": -_LARGEST, "maximum": _LARGEST}
_NUMBER = {"type": "number"}
_SCALAR = {"type": ["number", "string", "boolean", "null"], "maxLength": _TEXT}
#: A line of text, without signs that a terminal or a database would stumble over.
LINE = {"type": "string", "maxLength": _TEXT, "pattern": "^[^\\x00-\\x1f\\x7f-\\x9f]*$"}
_NAME = LINE | {"description": "what you call it"}


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": _ITEMS}


#: What an annotation of a signature, or of a rule's field, is in JSON.
_KINDS: dict[str, dict[str, Any]] = {
    "bool": {"type": "boolean"},
    "int": _INTEGER,
    "float": _NUMBER,
    "float | Schedule": _NUMBER,  # and its schedules: see `trainer_properties`
    "str": {"type": "string", "maxLength": _TEXT},
    "int | str": {"anyOf": [_INTEGER, {"type": "string", "maxLength": _TEXT}]},
    "str | Sequence[str] | Mapping[str, str]": {
        "anyOf": [
            _COLUMN,
            _list_of(_COLUMN) | {"minItems": 1},
            {"type": "object", "additionalProperties": _COLUMN, "minProperties": 1, "maxProperties": _ITEMS},
        ]
    },
    "Mapping[int, float]": {
        "type": "object",
        "patternProperties": {r"^-?\d{1,15}$": _NUMBER},
        "additionalProperties": False,
        "maxProperties": 100_000,
    },
}
#: Likewise, of a schedule's field.
_FIELDS = _KINDS | {"tuple[int, ...]": _list_of(_INTEGER)}
#: Keywords whose annotation says too little: Keras' own losses and metrics by name, and no objects.
_BY_NAME: dict[str, dict[str, Any]] = {
    "loss": {"anyOf": [_WORD, _list_of(_WORD)]},
    "metrics": _list_of(_WORD),
    "weighted_metrics": _list_of(_WORD),
    "loss_weights": _list_of(_NUMBER),
    "sample_weight_col": _COLUMN,
    "output_type": {"enum": ["array", "vector"]},
    "num_workers": _INTEGER | {"minimum": 1, "maximum": 100_000},
    "worker_optimizer": {
        "anyOf": [
            _WORD,
            {
                "type": "object",
                "required": ["class_name"],
                "properties": {
                    "class_name": _WORD,
                    "config": {"type": "object", "additionalProperties": _SCALAR, "maxProperties": _ITEMS},
                },
                "additionalProperties": False,
            },
        ]
    },
}


@cache
def job_schema() -> dict[str, Any]:
    """Return the schema of what is submitted with a model: JSON Schema, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Job",
        "type": "object",
        "required": ["rule", "data"],
        "additionalProperties": False,
        "properties": {
            "name": _NAME,
            "rule": {"enum": list(all_rules()), "description": "the update rule"},
            "hyper_parameters": {"type": "object", "description": "of the rule", "default": {}},
            "data": _place("Parquet to train on: a path or URI of the server's, below one that it allows"),
            "options": {
                "type": "object",
                "description": "keywords of Trainer",
                "additionalProperties": False,
                "properties": trainer_properties(),
                "default": {},
            },
            "checkpoint_every": {
                **_INTEGER,
                "minimum": 1,
                "description": "commits from one snapshot to the next",
                "default": 100,
            },
            "time_budget": {
                "type": ["number", "null"],
                "exclusiveMinimum": 0,
                "description": "seconds after which training ends early, and well, as of distkeras.TimeBudget",
                "default": None,
            },
            "early_stopping": {"anyOf": [_early_stopping(), {"type": "null"}], "default": None},
        },
        "allOf": [
            {
                "if": {"properties": {"rule": {"const": name}}, "required": ["rule"]},
                "then": {"properties": {"hyper_parameters": rule_schema(kind)}},
            }
            for name, kind in all_rules().items()
        ],
    }


def _early_stopping() -> dict[str, Any]:
    """The schema of validation data, and of what is made of it: of `distkeras.EarlyStopping`."""
    properties = _properties(EarlyStopping, {"df"})
    properties["max_rows"]["maximum"] = 10**7  # which the driver holds in memory
    place = _place("Parquet that the center is evaluated on: a path or URI of the server's, below one that it allows")
    return {
        "type": "object",
        "description": "keywords of EarlyStopping, and its data; without `patience` and `target`, it only evaluates",
        "required": ["data"],
        "properties": {"data": place} | properties,
        "additionalProperties": False,
    }


def trainer_properties() -> dict[str, dict[str, Any]]:
    """The schema of each keyword of `Trainer` that a job may have, with the text of the docstring and the default."""
    found = _properties(Trainer, LEFT_OUT)
    schedules = []
    for name, kind in SCHEDULES.items():
        schema = _of_fields(kind, _FIELDS) | {"required": ["schedule", "rate"]}
        schema["properties"]["schedule"] = {"const": name}
        schedules.append(schema)
    found["learning_rate"] = {"anyOf": [_NUMBER, *schedules], "description": found["learning_rate"]["description"]}
    return found


def prediction_schema() -> dict[str, Any]:
    """The schema of a predict job: made of `ModelPredictor`'s signature and docstring."""
    from distkeras.transformers import ModelPredictor

    options = _properties(ModelPredictor, PREDICTOR_LEFT_OUT)
    for name in ("batch_size", "batch_bytes"):
        options[name]["minimum"] = 1
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Prediction",
        "type": "object",
        "required": ["data", "output"],
        "additionalProperties": False,
        "properties": {
            "name": _NAME,
            "data": _place("Parquet to predict for: a path or URI of the server's, below one that it allows"),
            "output": _place(
                "what the rows with their predictions are written to, as Parquet: a path or URI where nothing is yet, "
                "below a folder of your name in a place that the server allows"
            ),
            "job": {
                "type": ["string", "null"],
                "pattern": "^[0-9a-f]{32}$",
                "description": "one that is done, whose model predicts; without it, a model is sent",
                "default": None,
            },
            "options": {
                "type": "object",
                "description": "keywords of ModelPredictor",
                "additionalProperties": False,
                "properties": options,
                "default": {},
            },
        },
    }


def _place(description: str) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": 1000, "description": description}


def _properties(kind: type, left_out: Collection[str]) -> dict[str, dict[str, Any]]:
    """The schema of each keyword, with the text of the class's docstring, and the default."""
    found = {}
    for name, option in options_of(kind).items():
        if name in left_out:
            continue
        schema = _BY_NAME.get(name) or _kind(name, option.annotation)
        if option.default is not None and option.annotation.endswith("| None"):
            schema = {"anyOf": [schema, {"type": "null"}]}
        found[name] = {**schema, "description": option.text}
        if option.default is not None:
            found[name]["default"] = option.default
    return found


def rule_schema(kind: type[Rule]) -> dict[str, Any]:
    """The schema of a rule's hyper-parameters."""
    return _of_fields(kind, _KINDS)


def _of_fields(kind: type, kinds: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The schema of a dataclass."""
    properties = {}
    for field in dataclasses.fields(kind):
        annotation = str(field.type)
        schema = _kind(field.name, annotation, kinds)
        nullable = {"anyOf": [schema, {"type": "null"}]} if annotation.endswith("| None") else schema
        properties[field.name] = dict(nullable)
        if field.default is not dataclasses.MISSING:
            properties[field.name]["default"] = field.default
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _kind(name: str, annotation: str, kinds: Mapping[str, dict[str, Any]] = _KINDS) -> dict[str, Any]:
    schema = kinds.get(annotation.removesuffix(" | None"))
    if schema is None:
        raise ConfigurationError(f"each keyword must be of a type that JSON has. Received: {name}: {annotation}")
    return schema
