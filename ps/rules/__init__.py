"""All update rules, found by looking: a file in this folder that defines a `Rule` with a card is a rule."""

from __future__ import annotations

import dataclasses
import importlib
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
    "from_text",
    "make",
    "table",
]


@cache
def all_rules() -> Mapping[str, type[Rule]]:
    """Every rule by its name, in alphabetical order."""
    found: dict[str, type[Rule]] = {}
    for module_info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        for value in vars(module).values():
            if (
                isinstance(value, type)
                and issubclass(value, Rule)
                and value.__module__ == module.__name__
                and value is not Rule
            ):
                found[value.name] = value
    return dict(sorted(found.items()))


def make(name: str, **hyper_parameters: Any) -> Rule:
    """The rule called ``name`` (upper or lower case).

    Raises:
        ConfigurationError: no such rule, or a hyper-parameter that it does not have or cannot take.
    """
    rule = all_rules().get(name.lower())
    if rule is None:
        raise ConfigurationError(f"`rule` must be one of {', '.join(all_rules())}. Received: rule={name!r}")
    known = {field.name for field in dataclasses.fields(rule)}
    unknown = sorted(set(hyper_parameters) - known)
    if unknown:
        raise ConfigurationError(f"rule {rule.name!r} takes {', '.join(sorted(known))}. Received: {', '.join(unknown)}")
    return rule(**hyper_parameters)


def from_text(name: str, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Hyper-parameters of the rule called ``name`` from the words of a command line; the last of a name counts.

    Values are JSON where they can be, else text; "4.10" stays text where the rule wants text.
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
    """What ``text`` says as JSON; itself, if that is nothing."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def table() -> str:
    """The table of rules, in Markdown: from each rule's card, traits and fields."""
    lines = [
        "| rule | name | paper | equations | family | sends | server vectors beside the center | hyper-parameters | "
        "scheduler |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, kind in all_rules().items():
        rule, card = kind(), kind.card
        hyper_parameters = ", ".join(f"`{key}={value!r}`" for key, value in rule.config().items())
        lines.append(
            f"| `{name}` | {card.title} | {card.paper} | {card.equations} | {card.family} | {card.sends} | "
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
    if traits.synchronous:
        return "rounds"
    return "asynchronous, all workers must fit" if traits.fixed_workers else "asynchronous"
