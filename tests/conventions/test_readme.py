"""Tests of README and docs: generated parts are up to date, links lead to files, and README is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docsite import generated

from distkeras.ps.rules import all_rules, make

ROOT = Path(__file__).parents[2]
#: Pages as a reader of the repository sees them; the links of the site's own pages are checked when it is built.
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINES = 150


@pytest.mark.parametrize("path", generated.files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_generated_parts_are_up_to_date(path: Path) -> None:
    assert path.read_text() == generated.files()[path], "run `python docs/docsite --no-build`"


def test_a_text_without_its_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="marks of 'rules'"):
        generated.filled("nothing", {"rules": str})


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LINES


def test_the_readme_imports_public_names_only() -> None:
    imported = re.findall(r"^\s*(?:from|import) (distkeras[\w.]*)", (ROOT / "README.md").read_text(), re.M)
    assert set(imported) <= {"distkeras", "distkeras.transformers"}


def test_the_numbers_in_the_readme_are_right() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    counts = re.findall(r"(?:all|one of) (\d+)", text)
    assert counts
    assert set(map(int, counts)) == {len(all_rules())}
    (met,) = re.findall(r"\d+ of \d+ criteria as first written are met[^.]*\.", text)
    assert f"\n{met}\n" in (ROOT / "docs" / "reproduction" / "README.md").read_text()


@pytest.mark.parametrize(
    ("trait", "path", "begin", "end"),
    [
        ("rows", "docs/guide/wide-tables.md", "| rule | ", "| all others"),
        ("sums", "docs/guide/clusters.md", "Rules whose movements can be added support this: ", "with Algorithm 12"),
        ("sums", "distkeras/settings.py", "All workers must run at once when the job begins. For ", "(Algorithm 12)"),
    ],
)
def test_lists_of_rules_are_complete(trait: str, path: str, begin: str, end: str) -> None:
    text = " ".join((ROOT / path).read_text().split())
    listed = text.split(begin)[1].split(end)[0]
    assert set(re.findall(r"`(\w+)`", listed)) == {name for name in all_rules() if getattr(make(name).traits, trait)}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files_of_the_repository(name: str) -> None:
    text = (ROOT / name).read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"", text):
        target = "".join(link)
        path, _, anchor = target.partition("#")
        if not re.match(r"\w+:", target):
            assert not path or (ROOT / path).exists(), target
            there = (ROOT / path if path else ROOT / name).read_text() if anchor else ""
            assert not anchor or anchor in {_anchor(head) for head in re.findall(r"^#+ (.*)$", there, re.M)}, target


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub makes from a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
