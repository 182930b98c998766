"""All update rules: each `Rule` with its `RuleInfo` that a file in this folder defines."""

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
