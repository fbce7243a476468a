"""Who calls the router: the tenant of each call, by its API key or by its client's certificate.

    router.api_keys          the key of the call's `authorization: Bearer KEY`; it wins where both are set
    router.tls_client_ca     the common name of the client's certificate
    neither                  nobody is authenticated, and all calls are the empty tenant's

A tenant is never taken from a message: its caller could name another one, and learn from its prefix cache.
"""

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrelay.router.config import RouterOptions
from kvrelay.router.errors import InvalidRequest, Unauthenticated
from kvrelay.rpc.certificates import CertificateFiles
from kvrelay.rpc.watched import Watched

logger = logging.getLogger(__name__)

AUTHORIZATION = "authorization"
SCHEME = "Bearer "
TENANT_CHARACTERS = 128
_LINE = re.compile(rf"(?P<tenant>[!-~]{{1,{TENANT_CHARACTERS}}})\s+(?P<digest>[0-9a-f]{{64}})")


class ApiKeys:
    """The API keys in a file, read again when it changes. Any thread.

    A line is a tenant and the SHA-256 of one of its keys in hexadecimal; empty lines and those that begin with # don't
    count. The file doesn't have the keys themselves. They are drawn at random, so a hash without salt protects them.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: the file can't be used now; the text says why.
        """
        self._path = path
        self._tenants = Watched("API keys", [path], self._read)

    def tenant(self, key: str) -> str | None:
        """The tenant whose key this is."""
        return self._tenants.current().get(hashlib.sha256(key.encode()).hexdigest())

    def _read(self) -> Mapping[str, str]:
        try:
            lines = self._path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"api_keys {self._path}: {getattr(error, 'strerror', None) or 'not text'}") from None
        tenants = {}
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line)
            if match is None:
                allowed = f"a tenant of up to {TENANT_CHARACTERS} characters, and a SHA-256 in 64 hexadecimal digits"
                raise ValueError(f"api_keys {self._path}: line {number}; allowed: {allowed}")
            tenants[match["digest"]] = match["tenant"]
        if not tenants:
            raise ValueError(f"api_keys {self._path}: holds no key, so nobody could call")
        return tenants


@dataclass(frozen=True, slots=True)
class Identity:
    """What a call shows of its caller."""

    authorizations: Sequence[str] = ()
    """The values of its `authorization` metadata or headers."""
    common_names: Sequence[str] = ()
    """Those of its client's certificate, which the transport has verified."""


class Callers:
    """Tells the tenant of a call."""

    def __init__(self, options: RouterOptions) -> None:
        """
        Raises:
            ValueError: the API keys can't be read.
        """
        self._keys = ApiKeys(Path(options.api_keys)) if options.api_keys else None
        self._certificates = bool(options.tls_client_ca)
        if self._keys is not None and not options.tls_certificate and options.host not in ("127.0.0.1", "::1"):
            logger.warning("API keys come in plaintext, as router.tls_certificate is not set")

    @property
    def authenticated(self) -> bool:
        """Whether a tenant is more than the empty one."""
        return self._keys is not None or self._certificates

    def tenant(self, identity: Identity) -> str:
        """The tenant of a call; empty if nobody is authenticated.

        Raises:
            Unauthenticated: the call has no valid API key, or its certificate names no tenant.
        """
        if self._keys is not None:
            given = identity.authorizations
            if len(given) != 1 or not given[0].startswith(SCHEME):
                raise Unauthenticated("no API key; this router asks for one, as `authorization: Bearer KEY`")
            tenant = self._keys.tenant(given[0].removeprefix(SCHEME).strip())
            if tenant is None:
                raise Unauthenticated("the API key is not known")
            return tenant
        if self._certificates:
            names = identity.common_names
            if len(names) != 1 or not 1 <= len(names[0]) <= TENANT_CHARACTERS:
                raise Unauthenticated("the client's certificate has no common name, which would be its tenant")
            return names[0]
        return ""

    def check_claim(self, claimed: str, tenant: str) -> None:
        """Checks the tenant that a request itself names: it may say no more than is known.

        Raises:
            InvalidRequest: it names another one.
        """
        if claimed in ("", tenant):
            return
        known = f"empty or {tenant!r}, the caller's" if self.authenticated else "empty: this router knows no tenants"
        raise InvalidRequest("tenant", claimed, f"{known}; see router.api_keys")


def public_certificates(options: RouterOptions) -> CertificateFiles | None:
    """Those of the public port; None for plaintext.

    Raises:
        ValueError: a file can't be used; the text says which and why.
    """
    if not options.tls_certificate:
        return None
    authorities = Path(options.tls_client_ca) if options.tls_client_ca else None
    return CertificateFiles(Path(options.tls_certificate), Path(options.tls_key), authorities)
