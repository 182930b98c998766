"""Tests that docs, docstrings, comments and messages are in plain words; `WORDS` lists those that are not used."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sources import ROOT, nodes_of, text_of, tree_of

#: The words that are not used, as regular expressions, and their replacements.
WORDS = {
    r"who(?:m)?ever|whosoever": "the caller, the process that, anyone who",
    r"whatever|whichever": "any, every, regardless of; or name the thing",
    r"somebody": "someone, or name the process or the person",
    r"nobody": "no one, or name the process or the person",
    r"likewise": "also, the same; or repeat the words",
    r"anew": "again",
    r"told": "reported, informed, configured",
    r"heard": "received, seen",
    r"it is no(?! longer\b)": "it is not, there is no",
    r"beside": "next to, with, in addition to",
    r"so it is\.": "repeat the words",
    r"for ever\b": "forever",
    r"in vain": "without success",
    r"to be had": "available",
    r"end(?:s|ed)? well\b": "successfully",
    r"(?:keeps?|kept) silent": "does not respond",
    r"look(?:s|ed)? after": "check, watch",
    r"under way": "in progress, current",
    r"passed over": "skipped",
    r"fenced off": "has lost its lease, is refused",
    r"at hand": "available",
    r"what bec(?:ome|ame|omes) of": "the outcome of, the result of",
    r"for want of": "because ... is missing",
    r"in the midst of": "in the middle of, during",
    r"gone on with": "resumed, continued",
    r"dealt out": "distributed",
    r"lets? through": "accept",
    r"as said": "as described in; or repeat the words",
}

#: All pages, including their generated parts, whose words are in `scripts/`.
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

#: Packages whose docstrings, comments, messages and names of tests are searched.
PACKAGES = ("benchmarks", "distkeras", "docs/docsite", "notebooks", "ps", "scripts", "tests", "transformers")

_PATTERN = re.compile(
    "|".join(rf"(?P<w{place}>\b(?:{word}))" for place, word in enumerate(WORDS)).replace(" ", r"\s+"), re.IGNORECASE
)
_END = re.compile(r"\w")


def unused_words(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line number of each word of `WORDS` in ``text``, the word, and its replacement.

    Inline code is skipped, because it names objects of the code.
    """
    without_code = re.sub(r"(`+)[^`\n]+\1", lambda code: " " * len(code[0]), text)
    for found in _PATTERN.finditer(without_code):
        ends_within_a_word = found[0][-1].isalpha() and _END.match(without_code, found.end())
        if not ends_within_a_word:
            instead = list(WORDS.values())[int((found.lastgroup or "")[1:])]
            yield text.count("\n", 0, found.start()) + 1, found[0], instead


def prose(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of every docstring, message and comment of a module, and each test's name.

    A string without white space is a key or a name, and is skipped. Each piece of a formatted string is searched.
    """
    for node in nodes_of(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\s", node.value):
            yield node.lineno, node.value
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")
    behind = "\n".join(line.partition("#")[2] for line in source.splitlines())
    for token in tokenize.generate_tokens(io.StringIO(source).readline) if _PATTERN.search(behind) else ():
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def report(path: Path, first_line: int, text: str) -> list[str]:
    """Return one line for each finding in ``text``, whose first line is ``first_line`` of ``path``."""
    name = path.relative_to(ROOT).as_posix()
    return [f'{name}:{first_line + line - 1}: "{word}"; write: {instead}' for line, word, instead in unused_words(text)]


def modules(package: str) -> list[Path]:
    """Return the Python files of a folder at any depth, except this one, which contains the words."""
    return sorted(path for path in (ROOT / package).rglob("*.py") if path != Path(__file__))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_is_in_plain_words(path: Path) -> None:
    found = report(path, 1, path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_comments_and_messages_are_in_plain_words(package: str) -> None:
    paths = modules(package)
    assert paths, f"{package} has no Python file"
    found = [
        line
        for path in paths
        for first_line, text in prose(text_of(path), tree_of(path))
        for line in report(path, first_line, text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Whoever asks is\ntold so.", [(1, "Whoever"), (2, "told")]),
        ("It is\n    no error. So it is.", [(1, "It is no"), (2, "So it is.")]),
        ("It is not there, it is no longer there, and it is nothing.", []),
        ("A table beside a table; besides, a `told` field and ``heard()``.", [(1, "beside")]),
        ("untold, overheard, told_at", []),
    ],
)
def test_unused_words_are_found(text: str, words: list[tuple[int, str]]) -> None:
    assert [(line, " ".join(word.split())) for line, word, _ in unused_words(text)] == words


def test_docstrings_comments_messages_and_test_names_are_searched() -> None:
    source = '"""A module."""\nkey = "told"\nraise ValueError(f"worker {key} was told {key} told")\n# told\n'
    source += "def test_told(): told\ndef told(): ...\n"
    assert [(line, text.strip()) for line, text in prose(source, ast.parse(source))] == [
        (5, "test told"),
        (1, "A module."),
        (3, "worker"),
        (3, "was told"),
        (3, "told"),
        (4, "# told"),
    ]
