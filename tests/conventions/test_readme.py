from __future__ import annotations

from pathlib import Path

from distkeras.ps.rules import table

ROOT = Path(__file__).parents[2]


def test_the_table_of_rules_is_the_generated_one() -> None:
    text = (ROOT / "README.md").read_text()
    between = text.partition("ps rules` -->\n")[2].partition("<!-- end of rules -->")[0]
    assert between.strip() == table(), "put the output of `python -m distkeras.ps rules` between the marks in README.md"
