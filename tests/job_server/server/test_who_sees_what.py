"""Tests of access to every route of the application by a stranger, another user, and an administrator.

The application lists its routes. A route that is missing from `ROUTES` fails until it is entered there with its
owner.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass

import pytest
from support.job_server.service import JSON, JobService
from support.present import present

from distkeras.job_server.errors import JobState
from distkeras.job_server.server.app import PUBLIC, create_app

#: What a route accesses: something public; an object of a user, named in its path; a list of the caller's objects; the
#: creation of such an object; or something that only administrators may use.
PUBLIC_ONE, THING, LIST, MAKES, ADMIN = "public", "thing", "list", "makes", "admin"
ROUTES = {
    "GET /": PUBLIC_ONE,
    "GET /openapi.json": PUBLIC_ONE,
    "GET /dashboard": PUBLIC_ONE,
    "GET /healthz": PUBLIC_ONE,
    "GET /metrics": ADMIN,
    "POST /api/v1/jobs": MAKES,
    "POST /api/v1/predictions": MAKES,
    "GET /api/v1/jobs": LIST,
    "GET /api/v1/jobs/{job}": THING,
    "POST /api/v1/jobs/{job}/cancel": THING,
    "POST /api/v1/jobs/{job}/resubmit": THING,
    "DELETE /api/v1/jobs/{job}": THING,
    "GET /api/v1/jobs/{job}/metrics": THING,
    "GET /api/v1/jobs/{job}/log": THING,
    "GET /api/v1/jobs/{job}/stream": THING,
    "GET /api/v1/jobs/{job}/page": THING,
    "GET /api/v1/jobs/{job}/model": THING,
    "GET /api/v1/jobs/{job}/history": THING,
    "GET /api/v1/jobs/{job}/commits": THING,
    "GET /api/v1/me": LIST,
    "GET /api/v1/tokens": LIST,
    "POST /api/v1/tokens": MAKES,
    "DELETE /api/v1/tokens/{token}": THING,
    "GET /api/v1/users": ADMIN,
    "POST /api/v1/users": ADMIN,
    "DELETE /api/v1/users/{user}": ADMIN,
    "POST /api/v1/users/{user}/reinstate": ADMIN,
    "GET /api/v1/audit": ADMIN,
}
#: A named part of a path, as Flask writes it.
PART = re.compile(r"<(?:\w+:)?(\w+)>")
OTHERS = [route for route, kind in ROUTES.items() if kind != PUBLIC_ONE]


@dataclass
class Things:
    """The objects of ann, as parts of paths."""

    job: str
    token: str
    user: str

    def path(self, route: str) -> str:
        return re.sub(r"{(\w+)}", lambda found: str(getattr(self, found[1])), route.partition(" ")[2])


@pytest.fixture(scope="module")
def things(service: JobService, model: bytes) -> Things:
    job = service.submit("ann", model).json["id"]
    assert service.finish(job) is JobState.DONE
    assert service.finish(service.predict("ann", None, job=job).json["id"]) is JobState.DONE
    return Things(job, service.tokens["ann"].split("_")[1], "ann")


def send(service: JobService, route: str, path: str, who: str | None, model: bytes) -> tuple[int, bytes]:
    """Send a request that would be valid if the owner sent it."""
    method = route.partition(" ")[0]
    match route:
        case "POST /api/v1/jobs":
            answer = service.submit(who, model)
        case "POST /api/v1/predictions":
            answer = service.predict(who, model)
        case _ if method == "POST":
            headers = {"Content-Type": JSON}
            body = json.dumps({"name": "eve"} if route.endswith("/users") else {}).encode()
            answer = service.call(method, path, who, body=body, headers=headers, prefix="")
        case _:
            answer = service.call(method, path, who, prefix="")
    return answer.status, answer.body


def test_every_route_is_public_or_an_administrators_or_has_an_owner(service: JobService) -> None:
    found = {
        f"{method} " + PART.sub(r"{\1}", rule.rule): rule.endpoint
        for rule in create_app(service.services).url_map.iter_rules()
        for method in present(rule.methods) - {"HEAD", "OPTIONS"}
    }
    assert found.keys() == ROUTES.keys()
    admins = {route for route, name in found.items() if name.startswith("admin.") or name == "server.show_metrics"}
    assert admins == {route for route, kind in ROUTES.items() if kind == ADMIN}
    assert {route for route, kind in ROUTES.items() if kind == PUBLIC_ONE} == {f"GET {path}" for path in PUBLIC}
    assert {route for route, kind in ROUTES.items() if kind == THING} == {
        route for route in OTHERS if "{" in route and ROUTES[route] != ADMIN
    }


@pytest.mark.parametrize("route", OTHERS)
@pytest.mark.parametrize("who", [None, "", "nonsense", "dk_0123456789abcdef_" + "A" * 43])
def test_a_stranger_is_refused(service: JobService, things: Things, route: str, who: str | None, model: bytes) -> None:
    status, body = send(service, route, things.path(route), who, model)
    assert status == 401
    assert things.job.encode() not in body


@pytest.mark.parametrize("route", OTHERS)
def test_removed_users_and_revoked_tokens_are_refused(
    service: JobService, things: Things, route: str, model: bytes
) -> None:
    revoked, gone = service.accounts.add_token("ben"), f"gone-{len(service.accounts.users())}"
    service.accounts.revoke(present(service.accounts.authenticate(revoked)), revoked.split("_")[1])
    service.accounts.add_user(gone)
    token = service.accounts.add_token(gone)
    service.accounts.remove_user(gone)
    for who in (revoked, token):
        assert send(service, route, things.path(route), who, model)[0] == 401


@pytest.mark.parametrize("path", ["", "/", "/nothing", "/jobs/../users", "/jobs/x/y/z"])
def test_a_stranger_does_not_learn_which_objects_exist(service: JobService, path: str) -> None:
    assert service.call("GET", path).status == 401
    assert service.call("GET", path, "ann").status == 404


@pytest.mark.parametrize("route", OTHERS)
def test_another_user_sees_none_of_the_objects(service: JobService, things: Things, route: str, model: bytes) -> None:
    """An object does not exist for other users, lists omit it, and administrators' routes are forbidden."""
    status, body = send(service, route, things.path(route), "ben", model)
    if ROUTES[route] == ADMIN:
        assert status == 403
    elif ROUTES[route] == THING:
        assert status == 404
        gone = Things("f" * 32, "f" * 16, "nobody")
        absent, absent_body = send(service, route, gone.path(route), "ben", model)
        assert absent == 404
        assert nameless(absent_body, gone) == nameless(body, things)
        return
    else:
        assert status in (200, 201)
    assert things.job.encode() not in body
    assert b"ann" not in body


def nameless(body: bytes, things: Things) -> bytes:
    """Return an answer without the name that was requested."""
    return body.replace(things.job.encode(), b"X").replace(things.token.encode(), b"X")


def test_the_owner_and_an_administrator_see_the_objects(service: JobService, things: Things) -> None:
    for who in ("ann", "admin"):
        assert service.call("GET", f"/jobs/{things.job}", who).json["user"] == "ann"
        assert things.job in [job["id"] for job in service.call("GET", "/jobs", who).json["jobs"]]
        for part in ("metrics", "log", "model"):
            assert service.call("GET", f"/jobs/{things.job}/{part}", who).status == 200
    assert service.call("GET", "/users", "admin").status == 200


def test_a_cursor_of_another_users_job_is_invalid(service: JobService, things: Things) -> None:
    assert service.call("GET", f"/jobs?before={things.job}", "ben").status == 404
    assert service.call("GET", f"/jobs?before={things.job}", "ann").status == 200


def test_a_user_cannot_create_a_token_for_another_user(service: JobService) -> None:
    assert service.post("/tokens", "ann", {"user": "admin"}).status == 403
    assert service.post("/tokens", "admin", {"user": "ann"}).status == 201


def test_a_token_cannot_create_a_token_that_outlives_it(service: JobService) -> None:
    token = service.accounts.add_token("ann", expires=time.time() + 3600.0)
    assert service.post("/tokens", token, {"days": 1.0}).status == 422
    assert service.post("/tokens", token, {}).status == 201
    assert service.post("/tokens", token, {"days": 0.01}).status == 201
    me = present(service.accounts.authenticate(token))
    made = [one for one in service.accounts.tokens(me) if one.created > time.time() - 60.0 and one.expires is not None]
    assert len(made) >= 3
    assert all(present(one.expires) <= present(me.expires) for one in made[-3:])


@pytest.mark.parametrize("path", sorted(PUBLIC))
def test_public_answers_reveal_nothing_about_the_server(service: JobService, things: Things, path: str) -> None:
    answer = service.call("GET", path, prefix="")
    assert answer.status == (302 if path == "/" else 200)  # which leads to the page
    for secret in (things.job, "ann", str(service.files.root)):
        assert re.search(rf"\b{re.escape(secret)}\b", answer.body.decode()) is None
    for method in ("POST", "DELETE", "PUT", "OPTIONS"):
        assert service.call(method, path, prefix="").status == 401
