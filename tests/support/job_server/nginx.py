"""The guide's reverse proxy: nginx with TLS in front of servers on loopback."""

from __future__ import annotations

import datetime
import ipaddress
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from support.patience import patience, until

#: A running nginx: its port and its certificate.
Gateway = AbstractContextManager[tuple[int, Path]]
needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="no nginx is installed")
PAGE = Path(__file__).parents[3] / "docs" / "guide" / "gateway.md"
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


@contextmanager
def gateway(folder: Path, ports: Sequence[int]) -> Iterator[tuple[int, Path]]:
    """Start nginx with the guide's configuration in front of servers; yield its port and its certificate."""
    folder.mkdir(exist_ok=True)
    certificate = _make_certificate(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (lines,) = re.findall(r"^```nginx\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    servers = "; server ".join(f"127.0.0.1:{other}" for other in ports)
    for given, real in (("8443", str(port)), ("/etc/ssl", str(folder)), ("127.0.0.1:8571", servers)):
        assert given in lines
        lines = lines.replace(given, real)
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


def _make_certificate(folder: Path) -> Path:
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
