"""The join token and certificates of a cluster under test, in files."""

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.cluster import certificates
from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.security import Part, SecurityConfig


@dataclass(frozen=True)
class Secrets:
    """What a cluster's processes prove themselves with."""

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
