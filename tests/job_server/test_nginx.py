"""Tests of the guide's reverse proxy: nginx with TLS in front of the server."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.job_server import nginx
from support.job_server.service import JobService
from support.patience import patience

from distkeras.job_server import Client
from distkeras.job_server.errors import QuotaError
from distkeras.keras_model import archive
from distkeras.ps.errors import ServerLostError

pytestmark = [pytest.mark.slow, nginx.needs_nginx]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobService]:
    with JobService(tmp_path_factory.mktemp("service"), trusted_proxy="127.0.0.1") as service:
        yield service


@pytest.fixture(scope="module")
def gateway(service: JobService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    with nginx.gateway(tmp_path_factory.mktemp("nginx"), [service.port]) as gateway:
        yield gateway


def ask(gateway: tuple[int, Path], path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
    """Send a request from another address than the proxy's."""
    context = ssl.create_default_context(cafile=str(gateway[1]))
    connection = http.client.HTTPSConnection(
        "127.0.0.1", gateway[0], timeout=patience(20), context=context, source_address=("127.0.0.7", 0)
    )
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def test_a_job_passes_through_the_proxy(
    service: JobService, gateway: tuple[int, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import keras

    monkeypatch.setenv("SSL_CERT_FILE", str(gateway[1]))
    client = Client(f"https://127.0.0.1:{gateway[0]}", service.tokens["ann"])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    job = client.submit(model, "agn", data=service.data("x"), name="train")
    service.finish(job.id)
    job.wait(patience(60), progress=False).save_model(tmp_path / "model.keras")
    assert (tmp_path / "model.keras").read_bytes() == service.files.of(job.id).sent_model.read_bytes()
    assert archive.from_bytes((tmp_path / "model.keras").read_bytes()).count_params() == model.count_params()


def test_a_certificate_of_an_unknown_authority_is_refused(
    service: JobService, gateway: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(ServerLostError, match="certificate"):
        Client(f"https://127.0.0.1:{gateway[0]}", service.tokens["ann"]).job("x")


def test_the_server_receives_the_clients_address_and_scheme(service: JobService, gateway: tuple[int, Path]) -> None:
    """The address that a client claims in its own headers is ignored."""
    headers = {"Authorization": "Bearer dk_nothing", "X-Forwarded-For": "6.6.6.6", "X-Forwarded-Proto": "http"}
    answer = ask(gateway, "/api/v1/me", headers)
    assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert answer.headers["Strict-Transport-Security"]
    entry: Any = service.call("GET", "/audit?limit=1", "admin").json["entries"][0]
    assert (entry["action"], entry["address"]) == ("refused", "127.0.0.7")


def begun(gateway: tuple[int, Path], head: bytes) -> ssl.SSLSocket:
    """Send the beginning of a request."""
    context = ssl.create_default_context(cafile=str(gateway[1]))
    plain = socket.create_connection(("127.0.0.1", gateway[0]), patience(20))
    sock = context.wrap_socket(plain, server_hostname="127.0.0.1")
    sock.sendall(head)
    return sock


_HEAD = b"POST /api/v1/%s HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n%s\r\n" + b"x" * 100


@pytest.mark.parametrize("path", [b"jobs", b"predictions"])
@pytest.mark.parametrize("token", [b"", b"Authorization: Bearer dk_x\r\n"])
def test_a_strangers_large_body_is_refused_at_its_header(gateway: tuple[int, Path], path: bytes, token: bytes) -> None:
    with begun(gateway, _HEAD % (path, token)) as sock:
        assert b" 401 " in sock.recv(4096).partition(b"\r\n")[0]


def test_a_large_body_elsewhere_is_refused(gateway: tuple[int, Path]) -> None:
    with begun(gateway, b"POST /api/v1/tokens HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n") as sock:
        assert b" 413 " in sock.recv(4096).partition(b"\r\n")[0]


def test_slow_and_unfinished_connections_do_not_keep_others_out(service: JobService, gateway: tuple[int, Path]) -> None:
    """More of them than an address may have: the next address is still served."""
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(begun(gateway, b"GET /api/v1/me HTTP/1.1\r\nHost: x\r\n"))
        for _ in range(3):
            answer = ask(gateway, "/api/v1/me", {"Authorization": f"Bearer {service.tokens['ann']}"})
            assert answer.status == 200


def test_only_so_many_uploads_arrive_at_once(service: JobService, gateway: tuple[int, Path]) -> None:
    token = f"Authorization: Bearer {service.tokens['ann']}\r\n".encode()
    with contextlib.ExitStack() as stack:
        uploads = [stack.enter_context(begun(gateway, _HEAD % (b"jobs", token))) for _ in range(9)]
        ready, _, _ = select.select(uploads, [], [], patience(20))
        assert b" 503 " in ready[0].recv(4096).partition(b"\r\n")[0]
        assert len(ready) == 1
    assert ask(gateway, "/api/v1/me", {"Authorization": f"Bearer {service.tokens['ann']}"}).status == 200


def test_a_body_that_is_too_large_is_a_typed_error(
    service: JobService, gateway: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(gateway[1]))
    client = Client(f"https://127.0.0.1:{gateway[0]}", service.tokens["ann"])
    with pytest.raises((QuotaError, ServerLostError)):  # The connection may be closed before the body is read.
        client.send("/jobs", {"rule": "agn", "data": service.data("x")}, bytes(4 << 20))
