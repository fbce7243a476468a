"""The user's cache folder."""

import os
from pathlib import Path


def user_cache() -> Path:
    """The folder, `$XDG_CACHE_HOME/kvrelay` or `~/.cache/kvrelay`; perhaps not there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrelay"
