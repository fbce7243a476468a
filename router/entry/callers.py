"""Who calls the router: the tenant of each call, by its API key or by its client's certificate.

    router.api_keys          the key of the call's `authorization: Bearer KEY`; it wins where both are set
    router.tls_client_ca     the common name of the client's certificate
    neither                  nobody is authenticated, and all calls are the empty tenant's

A key may be granted less than everything, see `ApiKeys`; a certificate's tenant has no limits of its own.

A tenant is never taken from a message: its caller could name another one, and learn from its prefix cache.
"""

import asyncio
import hashlib
import hmac
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvrelay.router.config import DEFAULT_CLASS, RouterOptions, Service
from kvrelay.router.entry.limits import NO_LIMITS, Limits
from kvrelay.router.errors import Forbidden, InvalidRequest, Unauthenticated, shorten
from kvrelay.router.placing.queue import Claim
from kvrelay.rpc.certificates import CertificateFiles, file_state

logger = logging.getLogger(__name__)

AUTHORIZATION = "authorization"
SCHEME = "bearer"
"""Scheme of the `authorization` header, in any case of letters, by RFC 9110."""
TENANT_CHARACTERS = 128
_LINE = re.compile(
    rf"(?P<tenant>[!-~]{{1,{TENANT_CHARACTERS}}})\s+(?P<digest>[0-9a-f]{{64}})(?P<options>(\s+[a-z_]+=[!-~]+)*)"
)
_LOOKED_UP = 16
"""Digits of a digest by which a key is found. All digits are then compared in constant time."""
LOOK_SECONDS = 0.25
"""Seconds between two looks at the file of API keys."""
SWAP_SECONDS = 0.5
"""Seconds for which keys stay valid while their file is being swapped: it is gone, or can't be read."""
MAX_WEIGHT = 1000.0
MAX_COUNT = 10**12


@dataclass(frozen=True, slots=True)
class Grant:
    """Permissions of a caller."""

    tenant: str = ""
    key: str = ""
    """Digest of the caller's API key; empty without one."""
    classes: frozenset[str] | None = None
    """Classes of service that the caller may ask for; None for all."""
    weight: float = 1.0
    """Share of the workers for the caller's tenant, relative to the other tenants that wait."""
    limits: Limits = NO_LIMITS


class ApiKeys:
    """The API keys in a file, read again when it changes. Any thread.

    A line is a tenant, the SHA-256 of one of its keys in hexadecimal, and options of the form name=value: `classes`
    (with commas between), `weight`, `requests_per_minute`, `tokens_per_minute`, `concurrent`. Empty lines and those
    that begin with # don't count. The file doesn't have the keys themselves. They are drawn at random, so a hash
    without salt protects them.

    A key that was removed by any edit is refused within a second, if somebody looks as often as LOOK_SECONDS. Lines
    that can't be read grant nothing, and a file that is empty or gone grants nothing at all: nobody may call then. An
    editor or a mount that swaps the file gets SWAP_SECONDS before that.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: the file can't be used now; the text says why.
        """
        self._path = path
        self._lock = threading.Lock()
        self._seen = file_state(path)
        self._grants, mistakes = self._read()
        if mistakes:
            raise ValueError(mistakes[0])
        self._found_at: float | None = None
        """Monotonic time when the mistakes of a changed file were first seen; None without a change to be applied."""
        self.mistakes = 0
        """Lines that can't be read and grant nothing; 1 for a file that is gone, or holds no key."""

    def grant(self, key: str) -> Grant | None:
        """The permissions of a key; None if it is not known."""
        self.look()
        digest = hashlib.sha256(key.encode()).hexdigest()
        found = self._grants.get(digest[:_LOOKED_UP], Grant())
        return found if hmac.compare_digest(found.key, digest) else None

    def look(self) -> None:
        """Reads the file again if it has changed."""
        with self._lock:
            state = file_state(self._path)
            if state == self._seen:
                self._found_at = None
                return
            grants, mistakes = self._read()
            now = time.monotonic()
            if mistakes and now - (self._found_at or now) < SWAP_SECONDS:
                self._found_at = self._found_at or now
                return
            self._seen, self._grants, self._found_at, self.mistakes = state, grants, None, len(mistakes)
        fields = {"file": str(self._path), "keys": len(grants)}
        if mistakes:
            text = "API keys read again; what can't be read grants nothing"
            logger.error(text, extra={**fields, "mistakes": len(mistakes), "reason": mistakes[0]})
        else:
            logger.info("API keys read again", extra=fields)

    def _read(self) -> tuple[Mapping[str, Grant], Sequence[str]]:
        """The permissions of all keys that can be read, and a sentence for each mistake."""
        try:
            lines = self._path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            return {}, [f"api_keys {self._path}: {getattr(error, 'strerror', None) or 'not text'}"]
        grants, mistakes = {}, []
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line)
            if match is None:
                allowed = f"a tenant of up to {TENANT_CHARACTERS} characters, and a SHA-256 in 64 hexadecimal digits"
                mistakes.append(f"api_keys {self._path}: line {number}; allowed: {allowed}, and options name=value")
                continue
            try:
                grant = _grant(match["tenant"], match["digest"], match["options"].split())
            except ValueError as error:
                mistakes.append(f"api_keys {self._path}: line {number}: {error}")
                continue
            grants[grant.key[:_LOOKED_UP]] = grant
        if not grants:
            mistakes.append(f"api_keys {self._path}: holds no key, so nobody could call")
        return grants, mistakes


def _grant(tenant: str, key: str, options: Sequence[str]) -> Grant:
    """
    Raises:
        ValueError: names an option that is not known, and the value of one that is wrong.
    """
    values = dict(option.split("=", 1) for option in options)
    classes = values.pop("classes", None)
    weight = _number("weight", values.pop("weight", "1"), float, MAX_WEIGHT)
    counts = {
        name: int(_number(name, values.pop(name), int, MAX_COUNT))
        for name in ("requests_per_minute", "tokens_per_minute", "concurrent")
        if name in values
    }
    if values:
        known = "classes, weight, requests_per_minute, tokens_per_minute, concurrent"
        raise ValueError(f"option {next(iter(values))}; allowed: {known}")
    return Grant(tenant, key, None if classes is None else frozenset(classes.split(",")), weight, Limits(**counts))


def _number(name: str, text: str, kind: Callable[[str], float], most: float) -> float:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise ValueError(f"{name} is {text!r}; allowed: a number above 0, up to {most:g}")
    return value


@dataclass(frozen=True, slots=True)
class Identity:
    """The proof of identity that a call carries."""

    authorizations: Sequence[str] = ()
    """The values of its `authorization` metadata or headers."""
    common_names: Sequence[str] = ()
    """Common names of the client's certificate, which the transport has verified."""


class Callers:
    """Identifies callers."""

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
    def mistakes(self) -> int:
        """Lines of the API keys' file that can't be read; 1 for a file that is gone, or holds no key."""
        return self._keys.mistakes if self._keys is not None else 0

    async def watch(self) -> None:
        """Looks at the file of API keys again and again, until it is cancelled."""
        while self._keys is not None:
            self._keys.look()
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def authenticated(self) -> bool:
        """Whether a tenant is more than the empty one."""
        return self._keys is not None or self._certificates

    def grant(self, identity: Identity) -> Grant:
        """The permissions of a call's caller; the tenant is empty if nobody is authenticated.

        Raises:
            Unauthenticated: the call has no valid API key, or its certificate names no tenant.
        """
        if self._keys is not None:
            given = identity.authorizations
            scheme, _, key = given[0].strip().partition(" ") if len(given) == 1 else ("", "", "")
            if scheme.lower() != SCHEME:
                raise Unauthenticated("no API key; this router asks for one, as `authorization: Bearer KEY`")
            grant = self._keys.grant(key.strip())
            if grant is None:
                raise Unauthenticated("the API key is not known")
            return grant
        if self._certificates:
            names = identity.common_names
            if len(names) != 1 or not 1 <= len(names[0]) <= TENANT_CHARACTERS or not names[0].isprintable():
                raise Unauthenticated("the client's certificate has no common name, which would be its tenant")
            return Grant(names[0])
        return Grant()

    def check_tenant(self, claimed: str, tenant: str) -> None:
        """Checks the tenant that a request itself names: it may say no more than is known.

        Raises:
            InvalidRequest: it names another one.
        """
        if claimed in ("", tenant):
            return
        known = f"empty or {tenant!r}, the caller's" if self.authenticated else "empty: this router knows no tenants"
        raise InvalidRequest("tenant", claimed, f"{known}; see router.api_keys")


def public_certificates(options: RouterOptions) -> CertificateFiles | None:
    """The certificate files of the public port; None for plaintext.

    Raises:
        ValueError: a file can't be used; the text says which and why.
    """
    if not options.tls_certificate:
        return None
    authorities = Path(options.tls_client_ca) if options.tls_client_ca else None
    return CertificateFiles(Path(options.tls_certificate), Path(options.tls_key), authorities)


def claim_of(
    name: str, priority: int, grant: Grant, holder: str, services: Mapping[str, Service], received: float
) -> Claim:
    """The claim of a request.

    Args:
        name: of the class, as the request has it; empty for DEFAULT_CLASS.
        holder: the tenant, or the client's address where nobody is authenticated; each has its share of the workers.
        services: all classes.
        received: monotonic time of receipt, in seconds.

    Raises:
        InvalidRequest: there is no such class.
        Forbidden: the caller may not use it.
    """
    name = name or DEFAULT_CLASS
    if name not in services:
        raise InvalidRequest("slo_class", name, f"{', '.join(map(repr, services))}, or empty; see router.classes")
    if grant.classes is not None and name not in grant.classes:
        allowed = ", ".join(map(repr, sorted(grant.classes)))
        raise Forbidden(f"slo_class is {shorten(name)}; allowed for this API key: {allowed}")
    service, digest = services[name], xxh3_64_intdigest(holder.encode())
    return Claim(holder, grant.weight, service, priority, received + service.ttft_seconds, digest)
