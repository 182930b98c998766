"""Tests of the guide's reverse proxy: nginx with TLS in front of the server."""

from __future__ import annotations

import datetime
import http.client
import ipaddress
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from support.job_server.service import JobService
from support.patience import patience, until

from distkeras.job_server import Client
from distkeras.job_server.errors import QuotaError
from distkeras.keras_model import archive
from distkeras.ps.errors import ServerLostError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx is installed"),
]
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "gateway.md"
REST = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {server}
}}
"""


def make_certificate(folder: Path) -> Path:
    """Make a self-signed certificate for 127.0.0.1, with its key in the same folder."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "gateway.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    (folder / "gateway.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return folder / "gateway.pem"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobService]:
    with JobService(tmp_path_factory.mktemp("service"), trusted_proxy="127.0.0.1") as service:
        yield service


@pytest.fixture(scope="module")
def gateway(service: JobService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Start nginx with the guide's configuration; return its port and its certificate."""
    folder = tmp_path_factory.mktemp("nginx")
    certificate = make_certificate(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (lines,) = re.findall(r"^```nginx\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    for headers, real in (
        ("8443", str(port)),
        ("/etc/ssl", str(folder)),
        ("127.0.0.1:8571", f"127.0.0.1:{service.port}"),
    ):
        assert headers in lines
        lines = lines.replace(headers, real)
    (folder / "nginx.conf").write_text(REST.format(folder=folder, server=lines))
    server = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "log")])

    def listens() -> bool:
        assert server.poll() is None
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(listens)
        yield port, certificate
    finally:
        server.terminate()
        server.wait(patience(20))


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


def test_a_strangers_large_body_is_refused_at_its_header(gateway: tuple[int, Path]) -> None:
    context = ssl.create_default_context(cafile=str(gateway[1]))
    with (
        socket.create_connection(("127.0.0.1", gateway[0]), patience(20)) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as sock,
    ):
        sock.sendall(b"POST /api/v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n" + b"x" * 100)
        assert b" 401 " in sock.recv(4096).partition(b"\r\n")[0]


def test_a_body_that_is_too_large_is_a_typed_error(
    service: JobService, gateway: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(gateway[1]))
    client = Client(f"https://127.0.0.1:{gateway[0]}", service.tokens["ann"])
    with pytest.raises((QuotaError, ServerLostError)):  # The connection may be closed before the body is read.
        client.send("/jobs", {"rule": "agn", "data": service.data("x")}, bytes(4 << 20))
