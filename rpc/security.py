"""Who may call kvrelay's internal gRPC: the options, the parts of a cluster, and the table of calls."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kvrelay.machine.options import Options

Part = Literal["supervisor", "router", "worker", "operator"]
"""Kind of a process in a cluster. The operator is the command line, which asks for the status and gives commands."""

PARTS: tuple[Part, ...] = get_args(Part)

TOKEN_VARIABLE = "KVRELAY_JOIN_TOKEN"
TOKEN_CHARACTERS = (16, 4096)

HEALTH = "/grpc.health.v1.Health/"

CALLERS: Mapping[str, frozenset[Part]] = {
    "/kvrelay.internal.v1.SupervisorService/Attend": frozenset({"router", "worker"}),
    "/kvrelay.internal.v1.SupervisorService/GetStatus": frozenset({"operator"}),
    "/kvrelay.internal.v1.SupervisorService/Describe": frozenset({"operator"}),
    "/kvrelay.internal.v1.SupervisorService/Scale": frozenset({"operator"}),
    "/kvrelay.internal.v1.SupervisorService/Drain": frozenset({"operator"}),
    "/kvrelay.internal.v1.SupervisorService/SetRole": frozenset({"operator"}),
    "/kvrelay.internal.v1.SupervisorService/Upgrade": frozenset({"operator"}),
    "/kvrelay.internal.v1.SupervisorService/Restart": frozenset({"operator"}),
    "/kvrelay.internal.v1.WorkerService/Relay": frozenset({"router"}),
    "/kvrelay.internal.v1.HandoffService/Control": frozenset({"worker"}),
}
"""The parts that may make each internal call. Every part may ask for the health."""


@dataclass(frozen=True, slots=True)
class SecurityConfig(Options):
    """Who may call the internal gRPC of supervisor and workers, and how it is protected on the network."""

    join_token_path: str = ""
    """File with the join token, 16 characters or more, which every internal call carries. Empty takes the environment
    variable KVRELAY_JOIN_TOKEN; `kvrelay up` makes a token where there is neither."""

    tls: Literal["off", "mutual"] = "off"
    """mutual: every internal connection uses TLS, and both ends show a certificate of their role. off: whoever can read
    the network between the cluster's machines learns the join token and reads requests and tokens."""

    certificates: str = ""
    """Folder with ca.crt and, for each role that runs there (supervisor, router, worker, operator), ROLE.crt and
    ROLE.key; read again when they change. `kvrelay certificates` makes them. Empty with tls mutual: `kvrelay up` makes
    them for a cluster on one machine."""

    def token(self) -> str:
        """The join token.

        Raises:
            ValueError: there is none, or it can't be read, or it is too short.
        """
        token, source = os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
        if self.join_token_path:
            source = f"join_token_path {self.join_token_path}"
            try:
                token = Path(self.join_token_path).read_text().strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{source}: {getattr(error, 'strerror', None) or 'not text'}") from None
        if not token:
            raise ValueError(
                f"no join token: set {TOKEN_VARIABLE}, or security.join_token_path to a file with it; the other "
                "processes of the cluster need the same one"
            )
        low, high = TOKEN_CHARACTERS
        if not (low <= len(token) <= high and token.isascii() and token.isprintable() and " " not in token):
            raise ValueError(f"{source}: not a join token; allowed: {low} to {high} ASCII characters without spaces")
        return token
