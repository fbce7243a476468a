"""Secrets of clusters under test: the test process's own, and join tokens and certificates in files."""

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from kvrelay.cluster import certificates
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.security import Part, SecurityConfig


def credentials(part: Part = "operator") -> Credentials:
    return Credentials.of(part, SecurityConfig())


METADATA = credentials().metadata
"""Metadata for calls of internal services."""


@dataclass(frozen=True)
class Secrets:
    """Secrets with which a cluster's processes prove that they belong to it."""

    folder: Path
    token: str
    options: dict[str, Any]
    """The `security` section."""

    def credentials(self, part: Part) -> Credentials:
        return Credentials.of(part, SecurityConfig(**self.options))

    def rotate(self) -> None:
        """Replaces the certificates; the authority stays."""
        certificates.make(self.folder / "certificates", 30, keep_authority=True)


def secrets_in(folder: Path, tls: str, token: str = "") -> Secrets:
    """Makes them in `folder`; certificates only for `mutual`."""
    token = token or secrets.token_urlsafe(32)
    path = folder / "join_token"
    path.write_text(f"{token}\n")
    options: dict[str, Any] = {"join_token_path": str(path), "tls": tls}
    if tls == "mutual":
        certificates.make(folder / "certificates", 365, keep_authority=True)
        options["certificates"] = str(folder / "certificates")
    return Secrets(folder, token, options)


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1 that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "tls.crt", folder / "tls.key"
    paths[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return paths
