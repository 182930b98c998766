"""Encrypted connections: training is the same, only the pinned certificate is accepted, and secrets are not exposed."""

from __future__ import annotations

import builtins
import contextlib
import select
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.patience import PATIENT, brief, patience, until
from support.present import present
from support.ps.hostile_peers import (
    RULE,
    HonestWorker,
    assert_every_step_committed_once,
    connect_unauthenticated,
    read_to_eof,
    send_unless_closed,
)
from support.ps.running_server import KEY, socket_of

from distkeras.ps.errors import (
    AuthenticationError,
    ConfigurationError,
    DeadlineError,
    RemoteProtocolError,
    ServerLostError,
)
from distkeras.ps.protocol.framing import Connection
from distkeras.ps.protocol.messages import Heartbeat
from distkeras.ps.server.process import ServerProcess
from distkeras.ps.server.server import ParameterServer
from distkeras.ps.settings import ServerSettings
from distkeras.ps.transport.client import (
    Address,
    Certificate,
    Channel,
    client_context,
    dial,
    make_certificate,
    server_context,
)
from distkeras.ps.transport.driver_client import DriverClient
from distkeras.ps.world.streams import TcpStream

pytest.importorskip("cryptography")

SIZE = 70_001  # This needs many TLS records, and is not a multiple of one.
BRIEF = replace(PATIENT, connect=brief(1), handshake=brief(0.5))


@pytest.fixture(scope="module")
def certificate() -> Certificate:
    return make_certificate()


@pytest.fixture
def server(certificate: Certificate) -> Iterator[ParameterServer]:
    settings = ServerSettings(RULE, workers=1, deadlines=PATIENT)
    with ParameterServer(settings, KEY, context=server_context(certificate)) as server:
        yield server


@pytest.fixture
def impatient(server: ParameterServer) -> ParameterServer:
    """Return the server with a short deadline for handshakes."""
    server.deadlines = BRIEF
    return server


def refusal(server: ParameterServer) -> str:
    until(lambda: server.admission.refusals)  # Its thread may record the refusal after the peer received the answer.
    return server.admission.refusals[0].reason  # A client whose connection was reset has dialed again.


def test_training_over_tls_gives_bitwise_the_same_result() -> None:
    with ServerProcess(ServerSettings(RULE, workers=1, deadlines=PATIENT), tls=True) as process:
        assert process.address.certificate.startswith("-----BEGIN CERTIFICATE-----")
        driver = DriverClient(process.address, PATIENT)
        driver.publish(np.zeros(SIZE, np.float32), model=b"the model")
        sock = socket_of(present(driver.channel))
        assert isinstance(sock, ssl.SSLSocket)
        assert sock.version() == "TLSv1.3"
        worker = HonestWorker(process.address, SIZE, PATIENT)
        assert_every_step_committed_once(worker, driver)  # It compares with a plain server.
        driver.close()


def test_a_vector_that_takes_many_records_arrives_whole(server: ParameterServer, certificate: Certificate) -> None:
    driver = DriverClient(Address(*server.address, KEY, certificate.certificate), PATIENT)
    vector = np.random.default_rng(0).normal(size=1_000_003).astype(np.float32)
    driver.publish(vector)
    np.testing.assert_array_equal(driver.center().center, vector)
    driver.close()


class TestRefusals:
    def test_another_certificate_is_refused_even_with_the_right_key(self, server: ParameterServer) -> None:
        other = make_certificate().certificate
        with pytest.raises(AuthenticationError, match="does not have the job's certificate"):
            DriverClient(Address(*server.address, KEY, other), PATIENT).publish(np.zeros(3, np.float32))
        assert server.center is None

    def test_another_key_is_refused_even_with_the_right_certificate(
        self, server: ParameterServer, certificate: Certificate
    ) -> None:
        with pytest.raises(AuthenticationError, match="does not hold this job's key"):
            DriverClient(Address(*server.address, b"x" * 32, certificate.certificate), PATIENT).center()

    def test_a_plain_client_is_refused(self, impatient: ParameterServer) -> None:
        with pytest.raises((DeadlineError, ServerLostError), match="handshake"):
            dial(impatient.address, KEY, BRIEF)

    def test_a_plain_client_that_sends_first_is_refused(self, server: ParameterServer) -> None:
        with connect_unauthenticated(server.address) as sock:
            send_unless_closed(sock, b"DKPS" + bytes(60))
            read_to_eof(sock)
        assert "must speak TLS 1.3" in refusal(server)

    def test_an_older_tls_version_is_refused(self, server: ParameterServer, certificate: Certificate) -> None:
        context = client_context(certificate.certificate)
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
        with pytest.raises(RemoteProtocolError, match=r"TLS 1\.3"):
            dial(server.address, KEY, PATIENT, context=context)
        assert "must speak TLS 1.3" in refusal(server)

    def test_the_deadline_of_the_handshake_ends_silence_and_half_a_greeting(self, impatient: ParameterServer) -> None:
        with connect_unauthenticated(impatient.address) as silent, connect_unauthenticated(impatient.address) as half:
            send_unless_closed(half, bytes.fromhex("16030100c8010000c4"))
            assert read_to_eof(silent) == b""
            read_to_eof(half)

    def test_a_plain_server_is_refused(self, certificate: Certificate) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve() -> None:
                sock, _ = listener.accept()
                channel = Channel(TcpStream(sock), Connection(server=True, key=KEY), frame=PATIENT.frame)
                with pytest.raises((RemoteProtocolError, AuthenticationError, OSError)):
                    channel.handshake(PATIENT.handshake)
                channel.close()

            serving = threading.Thread(target=serve, daemon=True)
            serving.start()
            with pytest.raises(RemoteProtocolError, match=r"must speak TLS 1\.3"):
                dial(listener.getsockname(), KEY, PATIENT, context=client_context(certificate.certificate))
            serving.join(patience(10))


class TestChannel:
    @pytest.fixture
    def pair(self, certificate: Certificate) -> Iterator[tuple[Channel, Channel]]:
        """Yield the server's and the client's end of one connection."""
        ends: list[Channel] = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            context = server_context(certificate)

            def serve() -> None:
                sock, _ = listener.accept()
                ends.append(
                    Channel(TcpStream(sock), Connection(server=True, key=KEY), frame=PATIENT.frame, context=context)
                )
                ends[0].handshake(PATIENT.handshake)

            serving = threading.Thread(target=serve, daemon=True)
            serving.start()
            client = dial(listener.getsockname(), KEY, PATIENT, context=client_context(certificate.certificate))
            serving.join(patience(10))
        yield ends[0], client
        ends[0].close()
        client.close()

    def test_a_channel_detects_that_the_peer_has_hung_up(self, pair: tuple[Channel, Channel]) -> None:
        server, client = pair
        assert not server.hung_up()
        assert not client.hung_up()
        client.close()
        socket_of(server).settimeout(patience(5))
        assert socket_of(server).recv(1) == b""
        assert server.hung_up()

    def test_a_broken_connection_is_not_the_end_of_the_stream(self, pair: tuple[Channel, Channel]) -> None:
        server, client = pair
        client.send(Heartbeat())
        until(lambda: select.select([socket_of(server)], [], [], 0)[0])
        server.close()  # Unread bytes turn the close into a reset.
        with pytest.raises(ConnectionResetError):
            client.receive(patience(10), "anything")

    def test_a_blocked_call_returns_when_another_thread_hangs_up(self, pair: tuple[Channel, Channel]) -> None:
        server, _ = pair
        received: list[object] = []
        reading = threading.Thread(
            target=lambda: received.append(server.receive(patience(20), "anything")), daemon=True
        )
        reading.start()
        server.hang_up()
        reading.join(patience(10))
        assert not reading.is_alive()

    def test_a_closed_channel_raises_an_os_error(self, pair: tuple[Channel, Channel]) -> None:
        server, client = pair
        server.close()
        with pytest.raises(OSError):
            server.receive(1, "anything")
        client.close()


class TestSecrets:
    def test_a_server_process_does_not_expose_its_secrets(self) -> None:
        with ServerProcess(ServerSettings(RULE, workers=1), tls=True) as process:
            private = present(process._request.certificate).private_key  # noqa: SLF001 - the test needs the secret
            assert private.startswith("-----BEGIN PRIVATE KEY-----")
            secrets = [process.address.key.hex().encode(), *(line.encode() for line in private.split("\n")[1:-2])]
            shown = [repr(process).encode(), repr(process.address).encode()]
            for name in ("cmdline", "environ"):
                shown.append(Path(f"/proc/{process.pid}/{name}").read_bytes())
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # It was closed meanwhile.
                    assert descriptor.readlink().suffix != ".pem"
        assert len(secrets) > 2
        assert not [secret for secret in secrets for text in shown if secret in text]

    def test_the_private_key_is_on_disk_only_while_it_is_loaded_and_only_for_its_owner(
        self, certificate: Certificate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        modes: list[int] = []
        load = ssl.SSLContext.load_cert_chain

        def record_modes(context: ssl.SSLContext, path: Path, *rest: Any) -> None:
            modes.extend(place.stat().st_mode & 0o777 for place in (path, path.parent))
            return load(context, path, *rest)

        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", record_modes)
        server_context(certificate)
        assert modes == [0o600, 0o700]
        assert list(tmp_path.iterdir()) == []

    def test_the_private_key_stays_out_of_the_repr(self, certificate: Certificate) -> None:
        assert certificate.private_key not in repr(certificate)
        assert "PRIVATE" not in repr(certificate)


@pytest.mark.parametrize("text", ["", "nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"])
def test_an_invalid_certificate_is_a_configuration_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match="in PEM"):
        client_context(text)
    with pytest.raises(ConfigurationError, match="in PEM"):
        server_context(Certificate(text, ""))


def test_a_private_key_of_another_certificate_is_a_configuration_error(certificate: Certificate) -> None:
    with pytest.raises(ConfigurationError, match="its private key"):
        server_context(Certificate(certificate.certificate, make_certificate().private_key))


def test_the_error_for_a_missing_package_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.split(".")[0] == "cryptography":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigurationError, match=r"pip install 'distkeras\[tls\]'"):
        make_certificate()
