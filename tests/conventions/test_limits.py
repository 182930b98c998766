"""Tests that no test has a fixed limit, which a slower machine might exceed; see `support.patience`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sources import nodes_of, tree_of

TESTS = Path(__file__).parents[1]
#: Calls whose only argument is a limit.
WAITS = {"acquire", "communicate", "exited", "get", "join", "result", "settimeout", "wait"}
#: Files in which a number is no limit: examples of source text, a manual clock, the measurement of patience itself.
#: Programs that a person runs on a machine of their choice.
PROGRAMS = {"chaos", "fuzz", "matrix", "mutants", "simulation"}
EXEMPT = {"conventions/test_deadlines.py", "ps/transport/test_channel.py", "support/patience.py"}


def fixed_limits(tree: ast.AST) -> Iterator[str]:
    """Yield the calls in ``tree`` that wait for a fixed number of seconds, 1 or more."""
    for node in nodes_of(tree):
        if not isinstance(node, ast.Call):
            continue
        limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
        if isinstance(node.func, ast.Attribute) and node.func.attr in WAITS and not node.keywords:
            limits += node.args if len(node.args) == 1 else []
        numbers = [value.value for value in limits if isinstance(value, ast.Constant)]
        if any(isinstance(number, (int, float)) and number >= 1 for number in numbers):
            yield ast.unparse(node)


def test_every_limit_scales_with_the_speed_of_the_machine() -> None:
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        if path.relative_to(TESTS).parts[0] in PROGRAMS:
            continue
        if name not in EXEMPT and (calls := list(fixed_limits(tree_of(path)))):
            found[name] = calls
    assert not found


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        ("thread.join(20)", True),
        ("subprocess.run(command, timeout=60.0)", True),
        ("queue.get(timeout=5)", True),
        ("thread.join(patience(20))", False),
        ("thread.join(0.2)", False),
        ("center.join(0, 7)", False),
        ("', '.join(names)", False),
    ],
)
def test_fixed_limits_are_found(text: str, fixed: bool) -> None:
    assert bool(list(fixed_limits(ast.parse(text)))) == fixed
