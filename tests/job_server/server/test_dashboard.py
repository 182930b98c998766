"""Tests of the job server's page: its HTML is public, and its data requires the job's owner or an administrator."""

from __future__ import annotations

import json

import pytest
from support.job_server.service import JobService
from support.training.recorded_job import RecordedJob, record_of, write_journal

from distkeras.dashboard.watch import Journal
from distkeras.job_server.errors import JobState


@pytest.fixture(scope="module")
def job(service: JobService, model: bytes) -> str:
    """Return a finished job of ann's that has a journal."""
    found = service.submit("ann", model, name="<b>clouds</b>").json["id"]
    assert service.finish(found) is JobState.DONE
    write_journal(service.files.of(found).journal, RecordedJob(2, 10.0), state="done")
    return str(found)


def test_the_html_is_public_and_has_its_own_policy(service: JobService) -> None:
    answer = service.call("GET", "/dashboard", prefix="")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/html")
    policy = answer.headers["Content-Security-Policy"]
    assert "script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Frame-Options"] == "DENY"


def test_a_stream_ends_after_the_present_events_and_can_be_continued(service: JobService, job: str) -> None:
    """A client that watches a job does not occupy a thread of the server."""
    answer = service.call("GET", f"/jobs/{job}/stream", "ann")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    blocks = answer.body.decode().split("\n\n")
    assert blocks[0] == "retry: 1000"
    found, data = blocks[1].split("\n")
    assert json.loads(data.removeprefix("data: "))["kind"] == "whole"
    headers = {"Last-Event-ID": found.removeprefix("id: ")}
    again = service.call("GET", f"/jobs/{job}/stream", "ann", headers=headers)
    assert again.body == b"retry: 1000\n\n: alive\n\n"


@pytest.mark.parametrize("last", ["x", "\u00e9", "0" * 9000, "0123456789abcdef-99999999999999999999"])
def test_any_last_event_id_is_accepted(service: JobService, job: str, last: str) -> None:
    answer = service.call("GET", f"/jobs/{job}/stream", "ann", headers={"Last-Event-ID": last})
    assert answer.status == 200
    assert b'"kind":"whole"' in answer.body


def test_a_page_is_one_file_and_the_job_s_name_is_escaped(service: JobService, job: str) -> None:
    answer = service.call("GET", f"/jobs/{job}/page", "ann")
    assert answer.status == 200
    assert answer.headers["Content-Disposition"] == f"attachment; filename={job[:8]}.html"
    assert b"\\u003cb\\u003eclouds" in answer.body
    assert b"<b>clouds" not in answer.body


def test_another_user_cannot_read_the_page(service: JobService, job: str) -> None:
    for part in ("stream", "page"):
        assert service.call("GET", f"/jobs/{job}/{part}", "ben").status == 404
        assert service.call("GET", f"/jobs/{job}/{part}").status == 401
        assert service.call("GET", f"/jobs/{job}/{part}", "admin").status == 200


def test_a_job_that_has_not_started_has_no_page(service: JobService, model: bytes) -> None:
    found = service.submit("ann", model).json["id"]
    assert service.call("GET", f"/jobs/{found}/page", "ann").status == 409
    assert service.call("GET", f"/jobs/{found}/stream", "ann").body.endswith(b": alive\n\n")


def test_the_next_driver_s_journal_is_sent_from_its_beginning(service: JobService, job: str) -> None:
    first = service.call("GET", f"/jobs/{job}/stream", "ann").body.decode()
    last = first.split("id: ")[-1].split("\n")[0]
    Journal(service.files.of(job).journal).begin(record_of(RecordedJob(3, 5.0)).whole())
    again = service.call("GET", f"/jobs/{job}/stream", "ann", headers={"Last-Event-ID": last})
    assert json.loads(again.body.decode().split("data: ")[1])["facts"]["workers"] == 3
