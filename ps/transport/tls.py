"""Encryption with a pinned certificate: a job's clients accept the one certificate that was made for it.

The certificate is sent with the key, in Spark's task closure, so no certificate authority and no host name is checked:
the holder of this certificate's private key is the server. Clients are authenticated by the job's key, as without TLS.
"""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from distkeras.ps.errors import ConfigurationError

#: The largest difference between the clocks of two machines.
_SKEW = datetime.timedelta(days=1)
_LIFE = datetime.timedelta(days=365)


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its private key, both PEM."""

    certificate: str
    private_key: str = field(repr=False)


def make_certificate() -> Certificate:
    """Return a new certificate of one job (ECDSA over P-256, not a CA); ConfigurationError without ``cryptography``."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError:
        raise ConfigurationError(
            "`tls` needs the package cryptography: pip install 'distkeras[tls]'. Received: no such package"
        ) from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "distkeras")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certificate(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())


def server_context(certificate: Certificate) -> ssl.SSLContext:
    """Return a server's TLS context; raise ConfigurationError unless the certificate and the private key match."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no session resumption: each connection has a full handshake
    with tempfile.TemporaryDirectory() as folder:  # readable by this user only
        path = Path(folder, "server.pem")
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(certificate.private_key + "\n" + certificate.certificate)
        try:
            context.load_cert_chain(path)
        except (ssl.SSLError, OSError) as error:
            raise ConfigurationError(
                f"`certificate` must be a certificate and its private key, in PEM. Received: {error}"
            ) from None
    return context


def client_context(certificate: str) -> ssl.SSLContext:
    """Return a client's TLS context, which accepts only ``certificate``; raise ConfigurationError unless it is PEM."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the pinned certificate is a stronger check than a host name
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError, TypeError) as error:
        raise ConfigurationError(f"`certificate` must be a certificate in PEM. Received: {error}") from None
    return context
