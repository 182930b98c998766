"""Tests of the journal: a reader receives what was written, wherever it starts, and the file stays small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distkeras.dashboard.watch import Journal, read_since


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


def test_a_reader_continues_at_its_last_id(journal: Journal) -> None:
    assert read_since(journal.path) == []
    journal.begin({"kind": "whole"})
    (first,) = read_since(journal.path)
    assert json.loads(first.data) == {"kind": "whole"}
    assert read_since(journal.path, first.id) == []
    for number in range(3):
        journal.add({"number": number})
    rest = read_since(journal.path, first.id)
    assert [json.loads(entry.data)["number"] for entry in rest] == [0, 1, 2]
    assert [json.loads(entry.data)["number"] for entry in read_since(journal.path, rest[0].id)] == [1, 2]


@pytest.mark.parametrize("last", ["", "nonsense", "0123456789abcdef-12", "-1", "x" * 10_000])
def test_a_reader_with_an_unknown_id_receives_everything(journal: Journal, last: str) -> None:
    journal.begin({"kind": "whole"})
    journal.add({"number": 0})
    assert len(read_since(journal.path, last)) == 2


def test_a_reader_of_the_previous_edition_receives_the_whole_current_one(journal: Journal) -> None:
    journal.begin({"edition": 1})
    journal.add({"number": 0})
    last = read_since(journal.path)[-1].id
    journal.begin({"edition": 2})
    assert [json.loads(entry.data) for entry in read_since(journal.path, last)] == [{"edition": 2}]


def test_an_id_beyond_the_end_or_within_the_header_yields_no_partial_line(journal: Journal) -> None:
    journal.begin({"kind": "whole"})
    edition = read_since(journal.path)[0].id.split("-")[0]
    assert read_since(journal.path, f"{edition}-999999") == []
    assert [json.loads(entry.data) for entry in read_since(journal.path, f"{edition}-1")] == [{"kind": "whole"}]


def test_an_incomplete_line_is_not_read(journal: Journal) -> None:
    journal.begin({"kind": "whole"})
    with journal.path.open("ab") as file:
        file.write(b'{"number": 0')
    (first,) = read_since(journal.path)
    with journal.path.open("ab") as file:
        file.write(b"}\n")
    assert [json.loads(entry.data) for entry in read_since(journal.path, first.id)] == [{"number": 0}]


def test_a_new_edition_is_due_when_the_additions_outgrow_the_first_message(journal: Journal) -> None:
    assert journal.full
    journal.begin({"text": "x" * 1000})
    while not journal.full:
        journal.add({"text": "y" * 10_000})
    assert 256_000 < journal.path.stat().st_size < 300_000


def test_only_the_owner_may_read_the_journal(journal: Journal) -> None:
    journal.begin({})
    assert journal.path.stat().st_mode & 0o077 == 0


def test_after_a_full_disk_the_journal_must_start_a_new_edition(journal: Journal) -> None:
    journal.begin({"kind": "whole"})
    assert not journal.full
    journal.path.unlink()
    journal.path.mkdir()
    with pytest.raises(OSError, match="directory"):
        journal.add({"number": 0})
    assert journal.full


def test_a_number_that_is_not_finite_is_an_error(journal: Journal) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        journal.begin({"loss": float("nan")})
