"""Environment variables that Ray reads when it is imported; call `prepare` before that import."""

import os
from pathlib import Path


def prepare(*, local: bool = False) -> None:
    """Uses the token of a Ray cluster that asks for one, as Ray's own commands do; sends no usage reports.

    A Ray cluster that this process starts gives its actors the priority of other programs; Ray's default is a niceness
    of 15, with which a busy neighbour takes nearly all of a core from a router or a worker on CPUs.

    Variables that are already set stay. A cluster without authentication accepts a client that has a token.

    Args:
        local: whether this process starts a Ray cluster of this machine only. All of Ray's processes then listen on
            127.0.0.1; otherwise Ray takes the address of a network interface, and listens on all of them.
    """
    if local:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # so named, but read on Linux, too
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if "RAY_AUTH_MODE" not in os.environ and ("RAY_AUTH_TOKEN" in os.environ or token.is_file()):
        os.environ["RAY_AUTH_MODE"] = "token"
