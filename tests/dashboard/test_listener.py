"""Tests of the page over HTTP: its token is required, an interrupted stream continues, and closing leaves nothing
behind.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.patience import patience, until
from support.training.recorded_job import RecordedJob

from distkeras.dashboard.dashboard import Dashboard
from distkeras.dashboard.record import JobRecord
from distkeras.dashboard.watch import JobWatch, Journal
from distkeras.ps.errors import ConfigurationError, LocalProtocolError
from distkeras.results import JobOutcome, JobRecords


@pytest.fixture
def watch(tmp_path: Path) -> JobWatch:
    """Return the watch of a job that has ended."""
    job = RecordedJob(2, seconds=10.0)
    watch = JobWatch(tmp_path / "journal.jsonl")
    watch.take(JobOutcome(records=JobRecords(job.commits, job.steps, job.metrics), facts=job.facts))
    return watch


@pytest.fixture
def dashboard(watch: JobWatch) -> Iterator[Dashboard]:
    with Dashboard([watch]) as dashboard:
        yield dashboard


def request(url: str, path: str = "", last: str = "") -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=patience(20))
    headers = {"Last-Event-ID": last} if last else {}
    connection.request("GET", path if path.startswith("/") else parts.path + path, headers=headers)
    return connection.getresponse(), connection


def events(answer: http.client.HTTPResponse, count: int) -> list[dict[str, str]]:
    """Return the next events of a stream, without its comments."""
    found: list[dict[str, str]] = []
    event: dict[str, str] = {}
    while len(found) < count:
        line = answer.readline().decode().rstrip("\n")
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            event[name] = value
        elif "data" in event:
            found.append(event)
            event = {}
    return found


def test_the_page_is_served_at_its_address(dashboard: Dashboard) -> None:
    answer, connection = request(dashboard.url)
    body = answer.read()
    assert answer.status == 200
    assert b"<!doctype html>" in body
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'self' http://localhost:*" in policy
    assert answer.headers["Cache-Control"] == "no-store"
    connection.close()


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/favicon.ico", "/x/", "/x/jobs/0", "/../etc/passwd", "/%2e%2e/", "//", "/" + "a" * 40 + "/"),
        *("jobs/1", "jobs/99", "jobs/", "jobs/0/", "jobs/-1", "page.js"),  # with the token
    ],
)
def test_a_request_without_the_token_or_for_another_page_is_not_found(dashboard: Dashboard, path: str) -> None:
    answer, connection = request(dashboard.url, path)
    assert answer.status == 404
    assert b"loss" not in answer.read()
    connection.close()


def test_a_request_that_would_write_is_refused(dashboard: Dashboard) -> None:
    parts = urlsplit(dashboard.url)
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=patience(20))
        connection.request(method, parts.path)
        assert connection.getresponse().status == 501
        connection.close()


def test_a_stream_sends_everything_and_continues_where_it_was_interrupted(
    dashboard: Dashboard, watch: JobWatch
) -> None:
    answer, connection = request(dashboard.url, "jobs/0")
    assert answer.headers["Content-Type"] == "text/event-stream"
    (whole,) = events(answer, 1)
    assert json.loads(whole["data"])["kind"] == "whole"
    connection.close()
    answer, connection = request(dashboard.url, "jobs/0", last=whole["id"])
    with watch.changed:
        with watch.path.open("ab") as file:
            file.write(b'{"kind":"more"}\n')
        watch.changed.notify_all()
    (more,) = events(answer, 1)
    assert json.loads(more["data"]) == {"kind": "more"}
    assert more["id"] != whole["id"]
    connection.close()


def test_an_open_stream_does_not_delay_closing(watch: JobWatch) -> None:
    threads = threading.active_count()
    dashboard = Dashboard([watch])
    assert "127.0.0.1" in repr(dashboard)
    answer, connection = request(dashboard.url, "jobs/0")
    events(answer, 1)
    dashboard.close()
    dashboard.close()
    left = answer.read()
    assert not left or left.endswith(b"\n\n"), "the stream ends regularly"
    connection.close()
    until(lambda: threading.active_count() <= threads)
    assert dashboard.closed
    parts = urlsplit(dashboard.url)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((parts.hostname or "", parts.port), timeout=patience(5))
    assert repr(dashboard) == "Dashboard(closed)"


def test_the_error_of_a_port_in_use_names_the_port(dashboard: Dashboard, watch: JobWatch) -> None:
    port = urlsplit(dashboard.url).port
    with pytest.raises(ConfigurationError, match=f"`port` must be free on this machine. Received: {port}"):
        Dashboard([watch], port=port or 0)


def test_a_browser_that_disconnects_is_not_reported(dashboard: Dashboard, capfd: pytest.CaptureFixture[str]) -> None:
    parts = urlsplit(dashboard.url)
    for sent in (b"GET ", b"\xff\xfe\n\n", f"GET {parts.path}jobs/0 HTTP/1.1\r\n\r\n".encode()):
        with socket.create_connection((parts.hostname or "", parts.port), timeout=patience(5)) as sock:
            sock.sendall(sent)
    answer, connection = request(dashboard.url)
    assert answer.status == 200
    connection.close()
    assert capfd.readouterr().err == ""


def test_connections_above_the_limit_are_closed(dashboard: Dashboard) -> None:
    parts = urlsplit(dashboard.url)
    held = [socket.create_connection((parts.hostname or "", parts.port), timeout=patience(10)) for _ in range(64)]
    over = socket.create_connection((parts.hostname or "", parts.port), timeout=patience(10))
    assert over.recv(1) == b""
    for sock in (*held, over):
        sock.close()


def test_the_page_is_saved_as_a_file(dashboard: Dashboard, tmp_path: Path) -> None:
    path = dashboard.save(tmp_path / "job.html")
    text = path.read_text(encoding="utf-8")
    assert '"mode":"saved"' in text
    assert "AGN(window=4, window_max=None)" in text
    answer, connection = request(dashboard.url, "job.html")
    assert answer.read().decode() == text
    connection.close()


def test_saving_a_page_without_a_job_is_an_error(tmp_path: Path) -> None:
    with Dashboard([JobWatch()]) as dashboard, pytest.raises(LocalProtocolError, match="without a job"):
        dashboard.save(tmp_path / "job.html")
    assert not (tmp_path / "job.html").exists()


def test_a_notebook_shows_the_page_in_a_frame(dashboard: Dashboard) -> None:
    html = dashboard._repr_html_()
    assert html.count(dashboard.url) == 2
    assert 'title="distkeras dashboard"' in html


def test_a_reader_follows_a_job_through_several_editions(tmp_path: Path) -> None:
    """After streaming over a real connection, a browser has the same data as the record."""
    job = RecordedJob(2, seconds=10.0)
    watch = JobWatch(tmp_path / "journal.jsonl")
    journal, record = Journal(watch.path), JobRecord(job.facts, job.metrics, 0.0)
    with Dashboard([watch]) as dashboard:
        answer, connection = request(dashboard.url, "jobs/0")
        seen = []
        for edition in range(3):
            with watch.changed:
                journal.begin(record.whole() | {"edition": edition})
                watch.changed.notify_all()
            seen += [json.loads(event["data"])["edition"] for event in events(answer, 1)]
        assert seen == [0, 1, 2]
        connection.close()
