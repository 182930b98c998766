"""The table of rules for documentation, made of what each rule says of itself."""

from __future__ import annotations

from distkeras.ps.rules.base import Traits
from distkeras.ps.rules.registry import all_rules

HEADER = (
    "rule",
    "name",
    "paper",
    "equations",
    "family",
    "sends",
    "server vectors beside the center",
    "hyper-parameters",
    "scheduler",
)


def table() -> str:
    """The table of rules, in Markdown: from each rule's `RuleInfo`, traits and fields."""
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
    if traits.synchronous:
        return "rounds"
    return "asynchronous, all workers must fit" if traits.fixed_workers else "asynchronous"
