"""Tests of the page "Which rule should I take": each statement links to the section of the report that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distkeras.ps.rules import all_rules

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "guide" / "choosing-a-rule.md").read_text()
#: Without the tables that are generated from another study.
WRITTEN = re.sub(r"<!-- (defaults|many): .*?<!-- end of \1 -->", "", PAGE, flags=re.DOTALL)
REPORT = (DOCS / "reproduction" / "README.md").read_text()
#: Sections of the report, by their anchors.
SECTIONS = dict(re.findall(r'<a id="([\w-]+)"></a>\n(.*?)(?=<a id="|\Z)', REPORT, re.DOTALL))
#: Items of lists and rows of tables that state something about a rule; the head of a table does not.
STATEMENTS = re.findall(r"^(?:\* .*(?:\n  .*)*|\| (?!---|if |to ).*\|)$", WRITTEN, re.MULTILINE)
LINK = re.compile(r"\]\(\.\./reproduction/README\.md#([\w-]+)\)")


def test_the_page_has_statements() -> None:
    assert len(STATEMENTS) > 10


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda text: text[2:40])
def test_a_statement_follows_from_the_sections_that_it_links_to(statement: str) -> None:
    anchors = LINK.findall(statement)
    assert anchors, "there is no link to a section of the report"
    shown = "".join(SECTIONS[anchor] for anchor in anchors)
    for figure in re.findall(r"(?<![\w.])[+-]?\d+\.\d+(?!\w)", LINK.sub("", statement)):
        assert re.search(rf"(?<![\d.]){re.escape(figure.lstrip('+'))}(?!\d)", shown), f"{figure} is not in {anchors}"


def test_the_rules_of_the_page_exist() -> None:
    rules = set(re.findall(r"\(\.\./rules/(\w+)\.md\)", PAGE))
    assert rules
    assert rules <= {*all_rules(), "index"}
