"""Tests of the programs that tests start from strings, which neither ruff nor mypy reads."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from pathlib import Path

from support.sources import nodes_of, tree_of

TESTS = Path(__file__).parents[1]


def programs() -> Iterator[tuple[str, ast.Module]]:
    """Yield each string of the tests that imports a whole module of `support`, with its place."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in nodes_of(tree_of(path)):
            match node:
                case ast.Constant(value=str(text)) if "\nfrom support." in text and " import *\n" in text:
                    yield f"{path.relative_to(TESTS)}:{node.lineno}", ast.parse(text)


def bound(tree: ast.Module) -> set[str]:
    """Return every name that a program binds in any scope; a name that no line binds is an error."""
    names: set[str] = set()
    for node in nodes_of(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=[ast.alias(name="*")]):
                names |= bound(tree_of((TESTS / module.replace(".", "/")).with_suffix(".py")))
            case ast.alias(name=name, asname=other):
                names.add(other or name.partition(".")[0])
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_every_name_is_bound() -> None:
    found = 0
    for where, tree in programs():
        known = bound(tree) | vars(builtins).keys() | {"__name__", "__file__"}
        used = {node.id for node in nodes_of(tree) if isinstance(node, ast.Name)}
        assert used <= known, f"{where}: {sorted(used - known)} without an import"
        found += 1
    assert found >= 4
