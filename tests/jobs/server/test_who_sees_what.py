"""Every endpoint, as a stranger, as another user, as an administrator: the table of endpoints is gone through."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from support.job_service import JSON, JobService
from support.present import present

from distkeras.jobs.server.app import PUBLIC, create_app
from distkeras.jobs.server.endpoints import ENDPOINTS, PREFIX, Endpoint
from distkeras.jobs.states import JobState

#: What an endpoint about a thing answers to whom that does not belong.
HIDDEN = 404


@dataclass
class Things:
    """What ann has: parts of paths."""

    job: str
    token: str
    user: str

    def path(self, endpoint: Endpoint) -> str:
        return re.sub(r"{(\w+)}", lambda found: str(getattr(self, found[1])), endpoint.path)


@pytest.fixture(scope="module")
def things(service: JobService, model: bytes) -> Things:
    job = service.submit("ann", model).json["id"]
    assert service.finish(job) is JobState.DONE
    return Things(job, service.tokens["ann"].split("_")[1], "ann")


def send(service: JobService, endpoint: Endpoint, path: str, who: str | None, model: bytes) -> tuple[int, bytes]:
    if endpoint.upload:
        answer = service.submit(who, model)
    elif endpoint.body is not None:
        answer = service.call(endpoint.method, path, who, body=b'{"name": "eve"}', headers={"Content-Type": JSON})
    else:
        answer = service.call(endpoint.method, path, who)
    return answer.status, answer.body


NAMES = [f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS]


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=NAMES)
@pytest.mark.parametrize("who", [None, "", "nonsense", "dk_0123456789abcdef_" + "A" * 43])
def test_a_stranger_is_refused(
    service: JobService, things: Things, endpoint: Endpoint, who: str | None, model: bytes
) -> None:
    status, body = send(service, endpoint, things.path(endpoint), who, model)
    assert status == 401
    assert things.job.encode() not in body


@pytest.mark.parametrize("path", ["", "/", "/nothing", "/jobs/../users", "/jobs/x/y/z"])
def test_a_stranger_does_not_learn_what_is_there(service: JobService, path: str) -> None:
    assert service.call("GET", path).status == 401
    assert service.call("GET", path, "ann").status == 404


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=NAMES)
def test_another_user_sees_nothing_of_it(service: JobService, things: Things, endpoint: Endpoint, model: bytes) -> None:
    """What belongs to somebody is not there for others; lists leave it out; what is for administrators says so."""
    if endpoint.upload:
        return  # it makes a thing of one's own
    status, body = send(service, endpoint, things.path(endpoint), "ben", model)
    if endpoint.admin:
        assert status == 403
    elif "{" in endpoint.path:
        assert status == HIDDEN
        gone = Things("f" * 32, "f" * 16, "nobody")
        absent, told = send(service, endpoint, gone.path(endpoint), "ben", model)
        assert absent == HIDDEN
        assert told.replace(gone.job.encode(), b"X").replace(gone.token.encode(), b"X") == body.replace(
            things.job.encode(), b"X"
        ).replace(things.token.encode(), b"X")
    else:
        assert status in (200, 201, 422)
        assert things.job.encode() not in body
        assert b"ann" not in body


def test_the_owner_sees_it_and_an_administrator_too(service: JobService, things: Things) -> None:
    for who in ("ann", "admin"):
        assert service.call("GET", f"/jobs/{things.job}", who).json["user"] == "ann"
        assert things.job in [job["id"] for job in service.call("GET", "/jobs", who).json["jobs"]]
        for part in ("metrics", "log", "model"):
            assert service.call("GET", f"/jobs/{things.job}/{part}", who).status == 200
    assert service.call("GET", "/users", "admin").status == 200


def test_a_cursor_of_another_users_job_is_none(service: JobService, things: Things) -> None:
    assert service.call("GET", f"/jobs?before={things.job}", "ben").status == HIDDEN
    assert service.call("GET", f"/jobs?before={things.job}", "ann").status == 200


def test_a_user_makes_no_token_for_another(service: JobService) -> None:
    assert service.post("/tokens", "ann", {"user": "admin"}).status == 403
    assert service.post("/tokens", "admin", {"user": "ann"}).status == 201


def test_there_is_no_route_beside_the_table(service: JobService) -> None:
    app = create_app(service.services)
    routes = {
        (method, re.sub(r"<(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in present(rule.methods) - {"HEAD", "OPTIONS"}
    }
    listed = {(endpoint.method, PREFIX + endpoint.path) for endpoint in ENDPOINTS}
    assert routes == listed | {("GET", path) for path in PUBLIC}


@pytest.mark.parametrize("path", sorted(PUBLIC))
def test_what_is_public_says_nothing_of_the_server(service: JobService, things: Things, path: str) -> None:
    answer = service.call("GET", path, prefix="")
    assert answer.status == 200
    for secret in (things.job, "ann", str(service.files.root)):
        assert secret.encode() not in answer.body.replace(b"annot", b"")
    for method in ("POST", "DELETE", "PUT", "OPTIONS"):
        assert service.call(method, path, prefix="").status == 401
