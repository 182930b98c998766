"""What a job's description may be, as a JSON schema: made of `Trainer`'s signature and docstring, and of the rules."""

from __future__ import annotations

import dataclasses
import inspect
from functools import cache
from typing import Any

from distkeras.flags import texts_of_arguments
from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules import Rule, all_rules
from distkeras.trainer import Trainer

#: Keywords of `Trainer` that a stranger may not set: code, addresses and the terminal of the driver's machine.
LEFT_OUT = {"model", "rule", "custom_objects", "deadlines", "host", "port", "progress", "log_every", "decode"}

#: Longest list, and longest text, within a description.
_ITEMS, _TEXT = 100, 200
#: What Python's and Spark's integers have in common, with room for the seeds that are made of one.
_LARGEST = 2**53

_WORD = {"type": "string", "pattern": r"^[A-Za-z_]\w{0,99}$"}
_COLUMN = {"type": "string", "minLength": 1, "maxLength": _TEXT}
_INTEGER = {"type": "integer", "minimum": -_LARGEST, "maximum": _LARGEST}
_NUMBER = {"type": "number"}
_SCALAR = {"type": ["number", "string", "boolean", "null"], "maxLength": _TEXT}


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": _ITEMS}


#: What an annotation of a signature, or of a rule's field, is in JSON.
_KINDS: dict[str, dict[str, Any]] = {
    "bool": {"type": "boolean"},
    "int": _INTEGER,
    "float": _NUMBER,
    "float | Schedule": _NUMBER,
    "str": {"type": "string", "maxLength": _TEXT},
    "int | str": {"anyOf": [_INTEGER, {"type": "string", "maxLength": _TEXT}]},
    "str | Sequence[str]": {"anyOf": [_COLUMN, _list_of(_COLUMN) | {"minItems": 1}]},
    "Mapping[int, float]": {
        "type": "object",
        "patternProperties": {r"^-?\d{1,15}$": _NUMBER},
        "additionalProperties": False,
        "maxProperties": 100_000,
    },
}
#: Keywords whose annotation says too little: Keras' own losses and metrics by name, and no objects.
_BY_NAME: dict[str, dict[str, Any]] = {
    "loss": {"anyOf": [_WORD, _list_of(_WORD)]},
    "metrics": _list_of(_WORD),
    "weighted_metrics": _list_of(_WORD),
    "loss_weights": _list_of(_NUMBER),
    "sample_weight_col": _COLUMN,
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
    """The schema of what is submitted beside a model: JSON Schema, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Job",
        "type": "object",
        "required": ["rule", "data"],
        "additionalProperties": False,
        "properties": {
            "name": {"type": "string", "maxLength": _TEXT, "description": "what you call it"},
            "rule": {"enum": list(all_rules()), "description": "the update rule"},
            "hyper_parameters": {"type": "object", "description": "of the rule", "default": {}},
            "data": {
                "type": "string",
                "minLength": 1,
                "maxLength": 1000,
                "description": "Parquet to train on: a path or URI of the server's, below one that it allows",
            },
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
        },
        "allOf": [
            {
                "if": {"properties": {"rule": {"const": name}}, "required": ["rule"]},
                "then": {"properties": {"hyper_parameters": rule_schema(kind)}},
            }
            for name, kind in all_rules().items()
        ],
    }


def trainer_properties() -> dict[str, dict[str, Any]]:
    """The schema of each keyword of `Trainer` that a job may have, with the text of the docstring and the default."""
    texts = texts_of_arguments(Trainer)
    found = {}
    for name, parameter in inspect.signature(Trainer).parameters.items():
        if name in LEFT_OUT:
            continue
        kind = _BY_NAME.get(name) or _kind(name, str(parameter.annotation))
        found[name] = {**kind, "description": texts[name]}
        if parameter.default is not None:
            found[name]["default"] = parameter.default
    return found


def rule_schema(kind: type[Rule]) -> dict[str, Any]:
    """The schema of a rule's hyper-parameters."""
    properties = {}
    for field in dataclasses.fields(kind):
        annotation = str(field.type)
        schema = _kind(field.name, annotation)
        nullable = {"anyOf": [schema, {"type": "null"}]} if annotation.endswith("| None") else schema
        properties[field.name] = {**nullable, "default": field.default}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _kind(name: str, annotation: str) -> dict[str, Any]:
    schema = _KINDS.get(annotation.removesuffix(" | None"))
    if schema is None:
        raise ConfigurationError(f"each keyword must be of a type that JSON has. Received: {name}: {annotation}")
    return schema
