"""What Ray reads from the environment when it is imported; so this comes before."""

import os
from pathlib import Path


def prepare() -> None:
    """Uses the token of a Ray cluster that asks for one, as Ray's own commands do; sends no usage reports.

    What is set already stays. A cluster that asks for no token takes a client that has one.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if "RAY_AUTH_MODE" not in os.environ and ("RAY_AUTH_TOKEN" in os.environ or token.is_file()):
        os.environ["RAY_AUTH_MODE"] = "token"
