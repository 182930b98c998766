"""Tests of the requests to a server on loopback."""

from __future__ import annotations

import base64
import json
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema
import pytest
from sqlalchemy import event
from support.job_server.service import JSON, JobService
from support.patience import patience
from support.present import present

from distkeras.job_server.runner.files import JobFiles
from distkeras.job_server.server.app import FailureLimit, create_app
from distkeras.job_server.server.endpoints import PREFIX, ErrorView, JobView


def detail_of(answer: Any) -> dict[str, Any]:
    ErrorView.model_validate(answer.json, strict=True)
    return answer.json["error"]


def test_a_job_is_accepted_and_shown_according_to_the_schema(service: JobService, model: bytes) -> None:
    answer = service.submit("ann", model, options={"batch_size": 16})
    assert answer.status == 201
    jsonschema.validate(answer.json, JobView.model_json_schema(mode="serialization"))
    assert answer.json["description"]["options"] == {"batch_size": 16}
    assert "location" not in answer.json["description"]
    assert answer.json["bytes"] == len(model)
    assert service.files.of(answer.json["id"]).sent_model.read_bytes() == model
    assert service.call("POST", f"/jobs/{answer.json['id']}/cancel", "ann").json["state"] == "cancelled"
    assert service.call("DELETE", f"/jobs/{answer.json['id']}", "ann").status == 204
    assert not service.files.of(answer.json["id"]).path.exists()


@pytest.mark.parametrize(
    ("description", "field"),
    [
        ({"rule": "nothing"}, "rule"),
        ({"options": {"batch_size": 0}}, "options.batch_size"),
        ({"data": "/etc/passwd"}, "data"),
        ({"code": "x"}, "code"),
    ],
)
def test_a_refused_job_leaves_nothing(
    service: JobService, model: bytes, description: dict[str, Any], field: str | None
) -> None:
    answer = service.submit("ann", model, **description)
    assert answer.status == 422
    assert detail_of(answer).get("field") == field
    assert list(service.files.uploads.iterdir()) == []


def test_a_refused_model_leaves_nothing(service: JobService) -> None:
    jobs = sorted(path.name for path in (service.files.root / "jobs").iterdir())
    answer = service.submit("ann", b"no archive")
    assert (answer.status, detail_of(answer)["field"]) == (422, "model")
    assert list(service.files.uploads.iterdir()) == []
    assert sorted(path.name for path in (service.files.root / "jobs").iterdir()) == jobs


def test_data_among_the_servers_own_files_is_refused(service: JobService, model: bytes) -> None:
    """The data is refused even if the operator allows a folder that contains it, or if a link leads to it."""
    root = service.files.root
    link = Path(service.data("train.parquet")).with_name("link")
    link.symlink_to(root)
    for place in (root / "jobs", link):
        assert detail_of(service.submit("ann", model, data=str(place)))["field"] == "data"
        answer = service.submit("ann", model, early_stopping={"data": str(place)})
        assert (answer.status, detail_of(answer)["field"]) == (422, "early_stopping.data")
    assert service.submit("ann", model, early_stopping={"data": service.data("test.parquet")}).status == 201


@pytest.mark.parametrize(
    ("fields", "files"),
    [
        ({}, {}),
        ({"job": b"{}"}, {}),
        ({"job": b"{}", "more": b""}, {"model": b"x"}),
        ({"job": b"{"}, {"model": b"x"}),
        ({}, {"model": b"x"}),
        ({}, {"model": b"x", "job": b"{}"}),
        ({"job": b"x" * (2 << 20)}, {}),
        ({f"f{place}": b"" for place in range(50)}, {}),
    ],
    ids=range(8),
)
def test_a_malformed_form_is_refused(service: JobService, fields: dict[str, bytes], files: dict[str, bytes]) -> None:
    assert service.send_form("ann", fields, files).status in (413, 422)


def test_an_unknown_part_of_a_form_is_named(service: JobService) -> None:
    job = json.dumps({"rule": "agn", "data": service.data("train.parquet")}).encode()
    answer = service.send_form("ann", {"job": job} | {f"part-{place}": b"" for place in range(10)}, {"model": b"x"})
    assert answer.status == 422
    assert detail_of(answer)["field"].startswith("part-")


def test_a_model_that_is_too_large_is_refused(service: JobService) -> None:
    answer = service.submit("ann", b"x" * ((1 << 20) + 1))
    assert (answer.status, detail_of(answer)["field"]) == (422, "model")
    head = f"POST {PREFIX}/jobs HTTP/1.1\nHost: x\nContent-Length: {8 << 20}\n"
    assert b" 413 " in raw(service, f"{head}Authorization: Bearer {service.tokens['ann']}\n\n")


def raw(service: JobService, head: str, sent: bytes = b"") -> bytes:
    with socket.create_connection(("127.0.0.1", service.port), patience(20)) as sock:
        sock.sendall(head.replace("\n", "\r\n").encode() + sent)
        return sock.recv(4096)


def test_a_model_is_refused_if_the_disk_has_no_room_for_it(
    folder: Path, model: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room is measured with the model on the disk, so that the reserve stays free however many arrive at once."""
    with JobService(folder, reserve=1 << 17) as service:

        def free(files: JobFiles) -> int:
            return (1 << 17) + len(model) - 1 - sum(path.stat().st_size for path in files.root.rglob("sent.keras"))

        monkeypatch.setattr(JobFiles, "free", free)
        answer = service.submit("ann", model)
        assert (answer.status, detail_of(answer)["type"]) == (507, "StorageError")
        assert not list(service.files.root.rglob("sent.keras"))
        monkeypatch.setattr(JobFiles, "free", lambda files: free(files) + 1)
        assert service.submit("ann", model).status == 201


def test_credentials_that_a_browser_sends_by_itself_grant_no_access(service: JobService) -> None:
    """A foreign page can make a browser send cookies, a password and forms, but no header of its own."""
    token = service.tokens["ann"]
    basic = base64.b64encode(f"ann:{token}".encode()).decode()
    for headers in (
        {"Cookie": f"token={token}; Authorization=Bearer {token}"},
        {"Authorization": f"Basic {basic}"},
        {"X-Authorization": f"Bearer {token}", "Origin": "http://elsewhere"},
    ):
        for method, path in (("GET", "/jobs"), ("POST", "/tokens"), ("POST", "/jobs")):
            answer = service.call(method, f"{path}?token={token}&access_token={token}", headers=headers, body=b"{}")
            assert answer.status == 401
            assert "Access-Control-Allow-Origin" not in answer.headers


def test_no_token_is_logged(service: JobService, model: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """This includes a request that fails with an unexpected error."""
    token = service.tokens["ann"]
    secret = token.split("_", 2)[2]  # The letters of the token may themselves be "_".
    job = service.submit("ann", model).json["id"]
    for method, path in (("GET", f"/jobs/{job}"), ("GET", "/jobs?limit=x"), ("PUT", "/jobs"), ("GET", f"/{token}")):
        service.call(method, path, "ann")
    service.files.of(job).log.mkdir()
    answer = service.call("GET", f"/jobs/{job}/log", "ann")
    assert answer.status == 500
    assert answer.json["error"]["message"] == "The request failed; the server's log has the error."
    assert "IsADirectoryError" in caplog.text
    assert secret not in caplog.text
    assert secret not in json.dumps(service.call("GET", "/audit?limit=1000", "admin").json)


@pytest.mark.parametrize("text", ["a\u0000b", "a\nb", "\u001b[2J", "\ud800", "a\u0085"])
def test_a_name_with_control_characters_is_refused(service: JobService, model: bytes, text: str) -> None:
    answer = service.submit("ann", model, name=text)
    assert answer.status == 422
    assert service.post("/tokens", "ann", {"note": text}).status == 422


@pytest.mark.parametrize("part", ["x%00", "%00" * 16, "é", "x" * 5000, "%ff%fe"])
def test_an_invalid_token_or_user_is_not_found(service: JobService, part: str) -> None:
    part = quote(part, safe="%")
    assert service.call("DELETE", f"/tokens/{part}", "ann").status == 404
    assert service.call("DELETE", f"/users/{part}", "admin").status == 404


def test_the_number_of_queries_for_a_list_does_not_depend_on_its_length(folder: Path, model: bytes) -> None:
    """No query reads a column that the list does not show, such as a description of a megabyte."""
    seen: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_more: Any) -> None:
        seen.append(statement)

    with JobService(folder) as service:
        for _ in range(5):
            service.submit("ben", model)
        event.listen(service.engine, "before_cursor_execute", note)
        counts = []
        for limit in (1, 5):
            seen.clear()
            assert len(service.call("GET", f"/jobs?limit={limit}", "ben").json["jobs"]) == limit
            counts.append(len(seen))
            assert not any("distkeras_jobs.description" in statement for statement in seen)
    assert counts == [2, 2]  # One query finds the token's user, and the other one the page.


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", JSON, 422),
        (b"[]", JSON, 422),
        (b'{"note": 3}', JSON, 422),
        (b'{"days": 1e999}', JSON, 422),
        (b'{"days": -1}', JSON, 422),
        (b'{"other": 1}', JSON, 422),
        (b"{}", "text/plain", 422),
        (b"{}", "application/x-www-form-urlencoded", 422),
        (b"[" * 60_000, JSON, 422),
    ],
    ids=range(9),
)
def test_a_malformed_body_is_refused(service: JobService, body: bytes, kind: str, status: int) -> None:
    answer = service.call("POST", "/tokens", "ann", body=body, headers={"Content-Type": kind})
    assert answer.status == status
    assert detail_of(answer)["type"]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=1e2", "state=x", "before=x", "limit="])
def test_the_error_of_an_invalid_query_names_its_field(service: JobService, query: str) -> None:
    answer = service.call("GET", f"/jobs?{query}", "ann")
    assert (answer.status, detail_of(answer)["field"]) == (422, query.partition("=")[0])


def test_each_page_has_the_cursor_of_the_next(service: JobService, model: bytes) -> None:
    ids = [service.submit("ben", model).json["id"] for _ in range(3)]
    first = service.call("GET", "/jobs?limit=2", "ben").json
    second = service.call("GET", f"/jobs?limit=2&before={first['next']}", "ben").json
    assert [job["id"] for job in first["jobs"] + second["jobs"]] == ids[::-1]
    assert second["next"] is None


@pytest.mark.parametrize("job", ["x", "%2e%2e", "..%2f..%2fjobs.sqlite", "f" * 32, "F" * 32, "f" * 33])
@pytest.mark.parametrize("part", ["", "/log", "/model"])
def test_an_unknown_job_is_not_found(service: JobService, job: str, part: str) -> None:
    assert service.call("GET", f"/jobs/{job}{part}", "ann").status == 404


def test_fetching_a_result_that_does_not_exist_yet_is_a_conflict(service: JobService, model: bytes) -> None:
    job = service.submit("ann", model).json["id"]
    for part in ("model", "history", "commits"):
        answer = service.call("GET", f"/jobs/{job}/{part}", "ann")
        assert (answer.status, detail_of(answer)["type"]) == (409, "StateError")
    assert service.call("DELETE", f"/jobs/{job}", "ann").status == 409
    assert service.call("GET", f"/jobs/{job}/log", "ann").json == {"text": "", "next": 0}
    assert service.call("GET", f"/jobs/{job}/metrics", "ann").json == {"rows": [], "next": 0}


def test_a_log_can_be_read_from_either_end(service: JobService, model: bytes) -> None:
    job = service.submit("ann", model).json["id"]
    service.files.of(job).log.write_bytes(b"one\ntwo\n")
    for offset, text in ((0, "one\ntwo\n"), (4, "two\n"), (-4, "two\n"), (-99, "one\ntwo\n"), (99, "")):
        assert service.call("GET", f"/jobs/{job}/log?offset={offset}", "ann").json == {"text": text, "next": 8}


def test_every_answer_has_the_security_headers(service: JobService) -> None:
    for path, who in (("/jobs", "ann"), ("/jobs", None), ("/nothing", "ann")):
        headers = service.call("GET", path, who).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cache-Control"] == "no-store"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "Access-Control-Allow-Origin" not in headers
        assert "Set-Cookie" not in headers
        assert "waitress" not in headers.get("Server", "")


def test_an_unsupported_method_is_refused(service: JobService) -> None:
    answer = service.call("PUT", "/jobs", "ann")
    assert answer.status == 405
    assert "GET" in answer.headers["Allow"]
    assert service.call("OPTIONS", "/jobs", "ann").status == 405


def test_failed_logins_of_an_address_are_limited_but_not_its_valid_requests(folder: Path) -> None:
    with JobService(folder, failures=FailureLimit(most=3)) as service:
        statuses = [service.call("GET", "/me", "nobody").status for _ in range(5)]
        assert statuses == [401, 401, 401, 429, 429]
        assert service.call("GET", "/me", "nobody").headers["Retry-After"] == "60"
        assert service.call("GET", "/me", "ann").status == 200


def test_the_record_of_failed_logins_expires_and_is_bounded() -> None:
    now = [0.0]
    limit = FailureLimit(most=2, seconds=60.0, clock=lambda: now[0])
    assert [limit.add("a"), limit.add("a"), limit.add("a"), limit.add("b")] == [False, False, True, False]
    now[0] = 60.0
    assert not limit.add("a")
    for place in range(20_000):
        limit.add(str(place))
    assert not limit.add("a")


def test_actions_are_recorded_in_the_audit_log(service: JobService, model: bytes) -> None:
    job = service.submit("ann", model).json["id"]
    service.call("POST", f"/jobs/{job}/cancel", "ann")
    service.call("GET", "/me", "dk_nothing")
    entries = service.call("GET", "/audit?limit=3", "admin").json["entries"]
    assert [entry["action"] for entry in entries] == ["refused", "cancel", "submit"]
    assert [entry["user"] for entry in entries] == ["", "ann", "ann"]
    assert {entry["address"] for entry in entries} == {"127.0.0.1"}
    assert entries[1]["subject"] == job


def test_the_description_covers_every_endpoint_and_is_served(service: JobService) -> None:
    app = create_app(service.services)
    description = service.call("GET", "/openapi.json", prefix="").json
    operations = {(method.upper(), path) for path, found in description["paths"].items() for method in found}
    served = {
        (method, re.sub(r"<(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in present(rule.methods) - {"HEAD", "OPTIONS"}
    }
    assert operations == {(method, path) for method, path in served if path.startswith(PREFIX)}
    names = [operation["operationId"] for found in description["paths"].values() for operation in found.values()]
    assert len(set(names)) == len(names)


def test_a_browser_is_led_to_the_page(service: JobService) -> None:
    answer = service.call("GET", "/", prefix="")
    assert (answer.status, answer.headers["Location"]) == (302, "/dashboard")
