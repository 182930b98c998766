"""Events: log records with a kind, which are sent from one process to another and collected in a table."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.logs import records, texts
from support.present import present

from distkeras.ps.events import Event, Events, JsonFormatter, record_from_json, report
from distkeras.results import event_table
from distkeras.training.progress import StallDetector

log = logging.getLogger("distkeras.tests")


def test_a_record_survives_formatting_and_parsing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    report(log, "takeover", "attempt %d\ntook over", 3, worker=1, attempt=3, level=logging.INFO)
    (record,) = records(caplog, log.name)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    parsed = present(record_from_json(line))
    assert (parsed.name, parsed.levelno, parsed.levelname) == ("distkeras.tests", logging.INFO, "INFO")
    assert (parsed.getMessage(), parsed.created) == ("attempt 3\ntook over", record.created)
    assert (vars(parsed)["event"], vars(parsed)["worker"], vars(parsed)["attempt"]) == ("takeover", 1, 3)


def test_percent_signs_and_tracebacks_survive_formatting_and_parsing(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("100%d")
    except ValueError:
        log.exception("at 5%% of %s", "it")
    text = present(record_from_json(JsonFormatter().format(records(caplog, log.name)[0]))).getMessage()
    assert text.startswith("at 5% of it\nTraceback")
    assert text.endswith("ValueError: 100%d")


@pytest.mark.parametrize(
    "line", ["", "Fatal Python error: Aborted", "{}", "[1]", "7", '{"name": 1, "level": "x"}', '{"name": "x', "null"]
)
def test_a_line_that_is_not_a_record_is_parsed_as_none(line: str) -> None:
    assert record_from_json(line) is None


class TestEvents:
    def test_a_record_without_a_kind_is_not_an_event(self, caplog: pytest.LogCaptureFixture) -> None:
        events = Events()
        log.warning("nothing special")
        events.add(records(caplog, log.name)[0], "server")
        assert events.all() == []

    def test_only_the_latest_events_are_kept(self) -> None:
        events = Events(most=2)
        for number in range(3):
            events.report(log, "stall", "number %d", number, worker=number)
        assert [event.text for event in events.all()] == ["number 1", "number 2"]
        assert [event.worker for event in events.all()] == [1, 2]
        assert {event.source for event in events.all()} == {"driver"}

    def test_an_event_is_kept_at_every_log_level_and_logged_if_its_level_is_enabled(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        events = Events()
        with caplog.at_level(logging.ERROR, logger=log.name):
            events.report(log, "stop", "quietly")
        with caplog.at_level(logging.WARNING, logger=log.name):
            events.report(log, "stop", "aloud")
        assert [event.text for event in events.all()] == ["quietly", "aloud"]
        assert texts(caplog, log.name) == ["aloud"]

    def test_the_table_has_a_row_for_each_event(self) -> None:
        rows = [Event(1.5, "server", "takeover", 2, 9, "text"), Event(2.0, "driver", "stop", None, None, "why")]
        table = event_table(rows)
        assert table.schema == pa.schema(
            [
                ("timestamp", pa.timestamp("us", tz="UTC")),
                ("source", pa.string()),
                ("kind", pa.string()),
                ("worker", pa.int32()),
                ("attempt", pa.int64()),
                ("text", pa.string()),
            ]
        )
        assert table["worker"].to_pylist() == [2, None]
        assert table["timestamp"].cast(pa.int64()).to_pylist() == [1_500_000, 2_000_000]
        assert event_table([]).schema == table.schema


class TestStallDetector:
    def table(self, *rows: object) -> Any:
        return np.array(rows, np.float64).reshape(-1, 4)

    def test_each_silence_is_reported_once(self) -> None:
        events = Events()
        stalls = StallDetector(10.0, events)
        stalls.check(self.table())
        stalls.check(self.table((0, 5, 3, 9.9), (1, 6, 0, 12.0)))
        stalls.check(self.table((0, 5, 3, 11.0), (1, 6, 0, 13.1)))
        stalls.check(self.table((0, 5, 3, 12.0), (1, 6, 0, 14.2)))
        stalls.check(self.table((0, 5, 4, 30.0), (1, 8, 0, 10.0)))
        assert [(event.worker, event.attempt, event.text.split("silent for ")[1]) for event in events.all()] == [
            (1, 6, "12 s, since it joined"),
            (0, 5, "11 s, since its commit 3"),
            (0, 5, "30 s, since its commit 4"),
            (1, 8, "10 s, since it joined"),
        ]
        assert {event.kind for event in events.all()} == {"stall"}
