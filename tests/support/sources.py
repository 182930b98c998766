"""The Python sources of the repository, which a process reads and parses once."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ("distkeras", "ps", "transformers")
OTHERS = ("benchmarks", "docs/docsite", "notebooks", "scripts", "tests")


def sources(*folders: str) -> Iterator[Path]:
    """Yield every Python file of these folders; the links in ``distkeras/`` are not followed."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not name_of(path).startswith(("distkeras/ps/", "distkeras/transformers/")):
                yield path


def name_of(path: Path) -> str:
    """Return the path within the repository."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    # Searching the nodes for garbage, again and again as their number grows, takes longer than parsing.
    enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text_of(path))
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@functools.cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return all nodes below ``tree`` and itself."""
    return tuple(ast.walk(tree))
