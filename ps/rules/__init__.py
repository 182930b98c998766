"""All update rules: each `Rule` with its `RuleInfo` that a file in this folder defines."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from distkeras.ps.errors import ConfigurationError
from distkeras.ps.rules.base import Chunk, Context, Replica, Rule, RuleInfo, Traits, WorkerState

__all__ = [
    "Chunk",
    "Context",
    "Replica",
    "Rule",
    "RuleInfo",
    "Traits",
    "WorkerState",
    "all_rules",
    "center_rules",
    "from_text",
    "json_or_text",
    "make",
    "table",
]


@cache
def all_rules() -> Mapping[str, type[Rule]]:
    """Return every rule by name, in alphabetical order: each subclass of `Rule` that a file of this folder defines."""
    assert __package__
    rules: dict[str, type[Rule]] = {}
    for module_info in pkgutil.iter_modules(importlib.import_module(__package__).__path__):
        module = importlib.import_module(f"{__package__}.{module_info.name}")
        rules |= {kind.name: kind for kind in vars(module).values() if _is_rule(kind, module.__name__)}
    return dict(sorted(rules.items()))


def center_rules() -> Mapping[str, type[Rule]]:
    """Return the rules whose workers exchange only with the center."""
    return {name: kind for name, kind in all_rules().items() if not kind().traits.peers}


def _is_rule(value: Any, module: str) -> bool:
    own = inspect.isclass(value) and value.__module__ == module
    return own and issubclass(value, Rule) and "name" in vars(value)  # a common base class has no name


def make(name: str, **hyper_parameters: Any) -> Rule:
    """Return the rule called ``name``, in upper or lower case; raise ConfigurationError if a name or value is wrong."""
    rule = all_rules().get(name.lower()) if isinstance(name, str) else None
    if rule is None:
        raise ConfigurationError(f"`rule` must be one of {', '.join(all_rules())}. Received: rule={name!r}")
    known = {field.name for field in dataclasses.fields(rule)}
    unknown = sorted(set(hyper_parameters) - known)
    if unknown:
        raise ConfigurationError(f"rule {rule.name!r} takes {', '.join(sorted(known))}. Received: {', '.join(unknown)}")
    return rule(**hyper_parameters)


def from_text(name: str, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the hyper-parameters of rule ``name`` from a command line; of equal keys, the last one counts.

    Values are parsed as JSON if possible; otherwise, or if the rule's field is a text (such as "4.10"), they are texts.
    """
    kind = all_rules().get(name.lower())
    texts = {field.name for field in dataclasses.fields(kind) if str(field.type).startswith("str")} if kind else set()
    values: dict[str, Any] = {}
    for key, text in pairs:
        value = json_or_text(text)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        values[key] = text if number and key in texts else value
    return values


def json_or_text(text: str) -> Any:
    """Return the JSON value of ``text``; ``text`` itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


HEADER = (
    "rule",
    "name",
    "paper",
    "equations",
    "family",
    "sends",
    "server vectors next to the center",
    "hyper-parameters",
    "scheduler",
)


def table() -> str:
    """Return the table of rules, in Markdown, from each rule's `RuleInfo`, traits and fields."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    for name, kind in all_rules().items():
        rule, info = kind(), kind.info
        hyper_parameters = ", ".join(f"`{key}={value!r}`" for key, value in rule.config().items())
        lines.append(
            f"| `{name}` | {info.title} | {info.paper} | {info.equations} | {info.family} | {info.sends} | "
            f"{_server_vectors(rule.traits)} | {hyper_parameters} | {_scheduler(rule.traits)} |"
        )
    return "\n".join(lines)


def _server_vectors(traits: Traits) -> str:
    vectors = [*traits.model_vectors, *(f"n × {vector}" for vector in traits.worker_vectors)]
    if traits.keeps_sent:
        vectors.append("n × what was sent")
    if traits.synchronous:
        vectors.append("the round's sum")
    return " + ".join(vectors).replace("_", " ") or "–"


def _scheduler(traits: Traits) -> str:
    if traits.peers:
        return "a round an epoch"
    if traits.synchronous:
        return "rounds"
    if traits.lends:
        return "asynchronous, workers lend"
    return "asynchronous, all workers must fit" if traits.fixed_workers else "asynchronous"
