"""The credentials of a process on internal connections, and how it checks its callers.

Every internal call carries the join token. With mutual TLS both ends show a certificate of their part as well, and a
server refuses parts that have no business with the method (`rpc.security.CALLERS`).

Certificates are read again when they change: a server takes the new ones for each connection that it accepts, and a
client makes a channel for each stream. Open connections stay as they are.
"""

import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import grpc

from kvrelay.rpc.certificates import CertificateFiles, KeyPair, dns_name, part_files, parts_named
from kvrelay.rpc.identity import join
from kvrelay.rpc.options import Option, channel_options, ping_seconds, server_options
from kvrelay.rpc.security import CALLERS, HEALTH, PARTS, Part, SecurityConfig

logger = logging.getLogger(__name__)

TOKEN_KEY = "kvrelay-join-token"
"""Key of the join token in the metadata of a call."""
LOG_SECONDS = 1.0
"""Least seconds between two log lines about refused calls."""
_KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

Metadata = tuple[tuple[str, str], ...]


class Credentials:
    """The join token of one process, and the certificates of its part."""

    def __init__(self, part: Part, token: str, certificates: CertificateFiles | None = None) -> None:
        self.part = part
        self.certificates = certificates
        """Certificate files; None without TLS."""
        self._token = token

    @classmethod
    def of(cls, part: Part, config: SecurityConfig) -> "Credentials":
        """The credentials that `config` names.

        Raises:
            ValueError: there is no token, a certificate can't be used, or the environment's KVRELAY_PING_SECONDS.
        """
        ping_seconds()
        if config.tls == "off":
            return cls(part, config.token())
        if not config.certificates:
            raise ValueError("security.certificates is ''; allowed: a folder, as security.tls is mutual")
        return cls(part, config.token(), part_files(Path(config.certificates), part))

    @property
    def metadata(self) -> Metadata:
        """The gRPC metadata of every internal call."""
        return ((TOKEN_KEY, self._token),)

    def check(self) -> None:
        """Warns in the log before the certificate ends. To be called now and then."""
        if self.certificates is not None:
            self.certificates.check()

    def channel(self, address: str, to: Part) -> grpc.aio.Channel:
        """A channel to a process that must be the part `to`; for one stream: the next may have new certificates."""
        if self.certificates is None:
            return grpc.aio.insecure_channel(address, options=channel_options())
        return grpc.aio.secure_channel(address, _client(self.certificates.current()), options=_expecting(to))

    def blocking_channel(self, address: str, to: Part) -> grpc.Channel:
        """A channel like that of `channel`, for calls that block."""
        if self.certificates is None:
            return grpc.insecure_channel(address, options=channel_options())
        return grpc.secure_channel(address, _client(self.certificates.current()), options=_expecting(to))

    def server(self) -> grpc.aio.Server:
        """A server of internal services. It refuses calls without the join token, or of the wrong part."""
        guard = Guard(self._token, tls=self.certificates is not None)
        return grpc.aio.server(interceptors=[guard], options=server_options())

    def bind(self, server: grpc.aio.Server, host: str, port: int) -> int:
        """Binds one of `server`'s servers, as `kvrelay.rpc.credentials.bind`."""
        return bind(server, host, port, "port", self.certificates)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Refuses calls without the join token (UNAUTHENTICATED), or of a part that may not make them (PERMISSION_DENIED).

    The refusal comes before any message of the call is read.
    """

    def __init__(self, token: str, tls: bool) -> None:
        """`tls`: callers have shown certificates, which name their part."""
        self._token = token.encode()
        self._tls = tls
        self._logged_at = -LOG_SECONDS

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any]":
        method = str(handler_call_details.method)
        given = [value for key, value in handler_call_details.invocation_metadata or () if key == TOKEN_KEY]
        token = given[0] if len(given) == 1 else ""
        # In constant time, so that the time of a refusal tells nothing about the token.
        if not hmac.compare_digest(token.encode() if isinstance(token, str) else token, self._token):
            return self._refusal(method, grpc.StatusCode.UNAUTHENTICATED, "the join token is missing or wrong")
        handler = await continuation(handler_call_details)
        if not self._tls or handler is None:
            return handler
        return self._checked(method, handler)

    def _checked(self, method: str, handler: "grpc.RpcMethodHandler[Any, Any]") -> "grpc.RpcMethodHandler[Any, Any]":
        """`handler`, for callers whose certificate allows it."""
        kind = next(kind for kind in _KINDS if getattr(handler, kind) is not None)
        serve = getattr(handler, kind)
        allowed = frozenset(PARTS) if method.startswith(HEALTH) else CALLERS.get(method, frozenset())

        async def checked(request: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> Any:
            parts = caller_parts(context) or frozenset()
            if not parts & allowed:
                who = " or ".join(sorted(parts)) or "nobody"
                text = f"the certificate is of {who}; allowed: {', '.join(sorted(allowed)) or 'nobody'}"
                self._log(method, context, text)
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)
            return await serve(request, context)

        replaced: grpc.RpcMethodHandler[Any, Any] = handler._replace(**{kind: checked})  # type: ignore[attr-defined]  # a namedtuple
        return replaced

    def _refusal(self, method: str, code: grpc.StatusCode, text: str) -> "grpc.RpcMethodHandler[Any, Any]":
        async def refuse(_: Any, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
            self._log(method, context, text)
            await context.abort(code, text)

        # A stream of requests needs none of them, so this serves calls of every kind.
        return grpc.stream_stream_rpc_method_handler(refuse)

    def _log(self, method: str, context: "grpc.aio.ServicerContext[Any, Any]", reason: str) -> None:
        if time.monotonic() - self._logged_at >= LOG_SECONDS:
            self._logged_at = time.monotonic()
            logger.warning("call refused", extra={"method": method, "caller": context.peer(), "reason": reason})


def caller_parts(context: "grpc.aio.ServicerContext[Any, Any]") -> frozenset[Part] | None:
    """The parts that the caller's certificate names; None without TLS."""
    shown = context.auth_context()
    if shown.get("transport_security_type") != [b"ssl"]:
        return None
    return parts_named([name.decode(errors="replace") for name in shown.get("peer_dns", ())])


def bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    option: str,
    certificates: CertificateFiles | None,
    clients: Literal["none", "required"] = "required",
) -> int:
    """Binds `server`, with TLS if there are certificates, and returns its port; `port` 0 takes a free one.

    Args:
        option: the port's name in the configuration.
        clients: whether clients must show certificates of the files' authority.

    Raises:
        OSError: the port can't be bound; the text names `option`.
    """
    try:
        if certificates is None:
            return server.add_insecure_port(join(host, port))

        used = certificates.current()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """The new certificates, if there are any; gRPC asks for those of each connection.

            gRPC must not get the same ones again: it would replace those that handshakes on its other threads are
            using, and the process would end when many clients connect at once.
            """
            nonlocal used
            if (pair := certificates.current()) is used:
                return None
            used = pair
            return _server(pair)

        fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", changed)  # the type stubs don't know None
        secured = grpc.dynamic_ssl_server_credentials(_server(used), fetch, clients == "required")
        return server.add_secure_port(join(host, port), secured)
    except RuntimeError as error:
        raise OSError(f"{option} {port}: already in use, or not to be bound, on {host}") from error


def _client(pair: KeyPair) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pair.ca, pair.key, pair.certificate)


def _server(pair: KeyPair) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], pair.ca)


def _expecting(to: Part) -> Sequence[Option]:
    """Options of a channel whose other end must show the certificate of `to`, whatever its address is."""
    return *channel_options(), ("grpc.ssl_target_name_override", dns_name(to))
