"""The commit log: it returns the commits that were added, from memory or from a file, and its memory is bounded."""

from __future__ import annotations

import logging
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from distkeras.ps.center.commit_log import COMMIT, CommitLog, CommitOutcome
from distkeras.ps.protocol.loop import NO_ROWS
from distkeras.ps.protocol.messages import Commit


def commit_of(number: int, steps: int, columns: int = 4) -> Commit:
    history = np.arange(steps * columns, dtype=np.float64).reshape(steps, columns) + number
    return Commit(
        worker=number % 3,
        attempt=7,
        incarnation=1,
        sequence=number + 1,
        epoch=0,
        first=number,
        last=number + steps - 1,
        epoch_end=False,
        wants_center=True,
        learning_rate=0.5,
        scale=1.0,
        waited=number / 7,
        parts=(np.zeros(3, np.float32),),
        history=history if steps else NO_ROWS,
    )


def add(log: CommitLog, number: int, *, steps: int = 1, columns: int = 4, skipped: bool = False) -> None:
    log.add(commit_of(number, steps, columns), CommitOutcome(number, 2, 1.7e9 + number, 0.5, math.nan, 1.0, skipped))


def filled(count: int) -> CommitLog:
    log = CommitLog()
    for number in range(count):
        add(log, number, steps=number % 4, skipped=number % 50 == 49)
    return log


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_every_part_that_is_read_equals_what_was_added(count: int) -> None:
    log = filled(count)
    assert len(log) == count
    whole = log.read()
    assert whole.commits["clock"].tolist() == list(range(count))
    assert whole.commits["wait"].tolist() == [number / 7 for number in range(count)]
    assert whole.lengths.tolist() == [number % 4 for number in range(count)]
    expected = [commit_of(number, number % 4).history for number in range(count) if number % 4]
    if expected:
        np.testing.assert_array_equal(whole.history, np.concatenate(expected))
    for start, size in [(0, 1), (3, 5), (250, 20), (0, 256), (256, 300), (900, 500), (count, 3)]:
        part = log.read(start, size)
        assert part.commits.tobytes() == whole.commits[start : start + size].tobytes()
        assert part.lengths.tolist() == whole.lengths[start : start + size].tolist()
        first = int(whole.lengths[:start].sum())
        rows = whole.history[first : first + int(part.lengths.sum())]
        assert part.history.tobytes() == rows.tobytes()


def test_the_totals_count_all_commits() -> None:
    log = filled(1000)
    assert log.batches == sum(commit_of(number, number % 4).steps for number in range(1000))
    assert log.skipped == 20
    assert log.samples == int(log.read().history[:, 1].sum())
    restored = CommitLog()
    restored.extend(log.read())
    restored.restore_totals(log.totals())
    assert restored.totals() == log.totals()
    assert (restored.loss, restored.staleness, restored.missing) == (log.loss, log.staleness, 0)


def test_mini_batches_of_lost_records_count_as_missing() -> None:
    log, restored = filled(1000), CommitLog()
    restored.extend(log.read(0, 400))
    restored.extend(log.read(500))
    restored.restore_totals(log.totals())
    assert restored.missing == int(log.read(400, 100).commits["steps"].sum())
    assert restored.batches == log.batches
    add(restored, 1000, steps=2)
    assert restored.read(899).commits["clock"].tolist() == [999, 1000]


def test_memory_does_not_grow_with_the_number_of_commits() -> None:
    def traced_memory(count: int) -> int:
        tracemalloc.start()
        log = CommitLog()
        for number in range(count):
            add(log, number)
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(log) == count
        return size

    assert (traced_memory(8_192) - traced_memory(2_048)) / 6_144 < 5  # bytes per commit


@pytest.mark.slow
def test_large_histories_do_not_stay_in_memory() -> None:
    log = CommitLog()
    tracemalloc.start()
    for number in range(40):
        add(log, number, steps=10_000, columns=8)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 8 << 20  # the histories have 26 MB
    assert log.read(39, 1).history.tobytes() == commit_of(39, 10_000, 8).history.tobytes()


def test_a_log_that_cannot_write_its_file_keeps_all_records_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "not there"))
    log = CommitLog()
    with caplog.at_level(logging.WARNING):
        for number in range(5000):
            add(log, number)
    assert len([record for record in caplog.records if getattr(record, "event", "") == "records"]) == 1
    assert log.read().commits["clock"].tolist() == list(range(5000))
    restored = CommitLog()
    restored.extend(log.read())
    restored.restore_totals(log.totals())
    assert restored.read().history.tobytes() == log.read().history.tobytes()
    (tmp_path / "not there").mkdir()
    for number in range(5000, 6000):
        add(log, number)
    assert log.read().commits["clock"].tolist() == list(range(6000))
    assert not list((tmp_path / "not there").iterdir())  # the log's file has no name
    assert log.read().commits.dtype == COMMIT
