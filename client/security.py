"""Credentials: how a client proves who it is to a router, and the router to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

Option = tuple[str, int | str]


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS to a router.

    >>> Client("router.example:50051", tls=Tls(), api_key="...")
    """

    ca: Path | str | None = None
    """File with the authorities, in PEM, that may have signed the router's certificate; None takes gRPC's own."""
    certificate: Path | str | None = None
    """File with this client's own certificate, for a router that asks for one."""
    key: Path | str | None = None
    """File with the certificate's key."""
    server_name: str | None = None
    """The name in the router's certificate, where it isn't the host that is called."""

    def credentials(self) -> grpc.ChannelCredentials:
        """
        Raises:
            OSError: a file can't be read.
        """
        files = self.ca, self.key, self.certificate
        ca, key, certificate = (None if path is None else Path(path).read_bytes() for path in files)
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def options(self, options: Sequence[Option]) -> Sequence[Option]:
        """`options` of a channel, with those that the certificate's name needs."""
        name = self.server_name
        return (*options, *(() if name is None else (("grpc.ssl_target_name_override", name),)))


def metadata(api_key: str | None) -> tuple[tuple[str, str], ...] | None:
    """The gRPC metadata of each call; None without an API key."""
    return None if api_key is None else (("authorization", f"Bearer {api_key}"),)
