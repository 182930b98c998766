"""All update rules, one file each: a file in this folder that defines a `Rule` with its `RuleInfo` is a rule."""

from __future__ import annotations

from distkeras.ps.rules.base import Chunk, Context, Replica, Rule, RuleInfo, Traits, WorkerState
from distkeras.ps.rules.registry import all_rules, center_rules, from_text, json_or_text, make, table

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
