"""Certificates in files: read again when they change, checked before they are used.

A part's certificate names the part as `PART.kvrelay.internal` in its subject alternative names. Both ends of an
internal connection check the other's: a client the part that it wants to reach, a server the part that may call.
"""

import logging
import ssl
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from kvrelay.rpc.security import PARTS, Part

logger = logging.getLogger(__name__)

WARN_DAYS = 30
"""Days before the end of a certificate from which on each day has a warning in the log."""
CHECK_SECONDS = 60.0
"""Seconds between two looks at the files, where nothing else asks for them."""
WARN_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate with its key, as PEM."""

    certificate: bytes
    """Certificate, with the intermediate certificates behind it."""
    key: bytes
    ca: bytes | None
    """Certificates of the authorities whose certificates the other end may show; None if it needs to show none."""
    expires: datetime


class CertificateFiles:
    """A key pair in files, read again when they change. Thread-safe."""

    def __init__(self, certificate: Path, key: Path, ca: Path | None = None, part: Part | None = None) -> None:
        """`part`: the certificate must name it.

        Raises:
            ValueError: a file can't be used now; the text says which and why.
        """
        self._certificate, self._key, self._ca, self._part = certificate, key, ca, part
        self._files = [path for path in (certificate, key, ca) if path is not None]
        self._lock = threading.Lock()
        # Before the files are read: a change in between is noticed by the next look.
        self._seen = self._refused = [file_state(path) for path in self._files]
        self._pair = self._warned = self._read()
        self._checked_at = time.monotonic()
        self._warned_at = -WARN_SECONDS
        self._warn(self._pair)

    @property
    def paths(self) -> tuple[Path, Path]:
        """The files of the certificate and of its key."""
        return self._certificate, self._key

    def current(self) -> KeyPair:
        """The certificate and key in the files; if they can't be used now, the last ones that could.

        Files that can't be used are logged once, and tried again by the next look.
        """
        self._checked_at = time.monotonic()
        with self._lock:
            state = [file_state(path) for path in self._files]
            if state != self._seen:
                fields = {"files": [str(path) for path in self._files]}
                try:
                    self._pair = self._read()
                    self._seen = state
                    logger.info("certificate read again", extra=fields)
                except ValueError as error:
                    if state != self._refused:
                        self._refused = state
                        text = "certificate not read again; the last one stays in use"
                        logger.error(text, extra={**fields, "reason": str(error)})
            pair = self._pair
        self._warn(pair)
        return pair

    def check(self) -> None:
        """Looks at the files if nobody has for a while, so that the end of a certificate is announced in the log."""
        if time.monotonic() - self._checked_at >= CHECK_SECONDS:
            self.current()

    def _warn(self, pair: KeyPair) -> None:
        now = time.monotonic()
        left = pair.expires - datetime.now(UTC)
        if left < timedelta(days=WARN_DAYS) and (pair is not self._warned or now - self._warned_at >= WARN_SECONDS):
            self._warned, self._warned_at = pair, now
            shown = {"file": str(self._certificate), "expires": pair.expires.isoformat()}
            logger.warning("certificate ends soon", extra={**shown, "days": round(left / timedelta(days=1), 1)})

    def _read(self) -> KeyPair:
        pem, key = _bytes(self._certificate), _bytes(self._key)
        ca = None if self._ca is None else _bytes(self._ca)
        leaf = _certificates(self._certificate, pem)[0]
        if self._ca is not None and ca is not None:
            _certificates(self._ca, ca)
        try:
            public = load_pem_private_key(key, None).public_key()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self._key}: not a private key in PEM without a password: {error}") from None
        if public != leaf.public_key():
            raise ValueError(f"{self._key}: not the key of the certificate {self._certificate}")
        if self._part is not None and self._part not in parts_of(leaf):
            allowed = dns_name(self._part)
            raise ValueError(f"{self._certificate}: names {_names(leaf) or 'nobody'}; allowed: {allowed}")
        if leaf.not_valid_after_utc < datetime.now(UTC):
            raise ValueError(f"{self._certificate}: expired at {leaf.not_valid_after_utc.isoformat()}")
        return KeyPair(pem, key, ca, leaf.not_valid_after_utc)


def server_context(files: CertificateFiles, *, clients_required: bool) -> ssl.SSLContext:
    """TLS of a server that isn't gRPC's, with what the files hold at each connection's beginning."""
    made: dict[KeyPair, ssl.SSLContext] = {}

    def current() -> ssl.SSLContext:
        pair = files.current()
        if pair not in made:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*files.paths)
            if clients_required and pair.ca is not None:
                context.load_verify_locations(cadata=pair.ca.decode())
                context.verify_mode = ssl.CERT_REQUIRED
            made.clear()
            made[pair] = context
        return made[pair]

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = current()

    first = current()
    first.sni_callback = choose
    return first


def part_files(folder: Path, part: Part) -> CertificateFiles:
    """The files of one part in a folder of certificates.

    Raises:
        ValueError: as `CertificateFiles`.
    """
    return CertificateFiles(folder / f"{part}.crt", folder / f"{part}.key", folder / "ca.crt", part)


def dns_name(part: Part) -> str:
    """The name of a part in its certificate."""
    return f"{part}.kvrelay.internal"


def parts_of(certificate: x509.Certificate) -> frozenset[Part]:
    """The parts that a certificate names."""
    return parts_named(_names(certificate))


def parts_named(names: list[str]) -> frozenset[Part]:
    """The parts among the DNS names of a certificate."""
    return frozenset(part for part in PARTS if dns_name(part) in names)


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return extension.value.get_values_for_type(x509.DNSName)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"certificate: {path}: {error.strerror}") from None


def _certificates(path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ValueError(f"{path}: not certificates in PEM: {error}") from None


def file_state(path: Path) -> tuple[int, int, int] | None:
    """Modification state of a file, to be compared with an earlier one; None if the file is missing."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
