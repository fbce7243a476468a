"""Makes the secrets of a cluster for `kvrelay up`: the join token, and certificates."""

import os
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from kvrelay.cluster import certificates, state
from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cluster.errors import UsageError
from kvrelay.rpc.security import TOKEN_VARIABLE

TOKEN_BYTES = 32
CERTIFICATE_DAYS = 730
"""Validity in days of the certificates for one machine; each `kvrelay up` makes new ones."""


@dataclass(frozen=True, slots=True)
class Secured:
    """A configuration whose secrets exist."""

    config: ClusterConfig
    token: str
    """The join token, for members that can't read it from a file of `config`; else empty."""
    token_path: str
    """File with the join token on this machine."""


def prepare(config: ClusterConfig) -> Secured:
    """Makes the join token and the certificates that `config` leaves to `kvrelay up`, in the state folder.

    Raises:
        UsageError: the token can't be read, or certificates are missing that can't be made here.
    """
    security = config.security
    if security.tls == "mutual" and not security.certificates:
        if not config.local:
            raise UsageError(
                f"security.certificates is ''; allowed: a folder on every node, as ray.address is {config.ray.address}"
            )
        folder = state.folder() / "certificates"
        certificates.make(folder, CERTIFICATE_DAYS, keep_authority=False)
        security = replace(security, certificates=str(folder))
    if security.certificates and config.local:
        security = replace(security, certificates=str(Path(security.certificates).absolute()))
    try:
        if security.join_token_path:
            security.token()
            path = Path(security.join_token_path).absolute()
            security = replace(security, join_token_path=str(path))
            return Secured(config.model_copy(update={"security": security}), "", str(path))
        token = security.token() if os.environ.get(TOKEN_VARIABLE) else secrets.token_urlsafe(TOKEN_BYTES)
    except ValueError as error:
        raise UsageError(f"security: {error}") from None
    path = state.folder() / "join_token"
    state.write_private(path, token.encode())
    return Secured(config.model_copy(update={"security": security}), token, str(path))
