"""A pod that is to end: its members finish their requests first. `python -m kvrelay.cluster.ray.node_drain SECONDS`.

The hook that Kubernetes calls before it stops a container (preStop) and the members in that container share a folder,
KVRELAY_DRAIN_DIR. No network and no right is needed for it.

    NAME        a member that lives there; has its pid. Removed when it has drained
    requested   made by the hook: every member there is to drain

A replacement that Ray places there meanwhile ends at once, and is tried again after a while, elsewhere by then.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

VARIABLE = "KVRELAY_DRAIN_DIR"
REQUESTED = "requested"
POLL_SECONDS = 0.2


class Registration:
    """A member's entry in the folder, if there is one."""

    def __init__(self, name: str) -> None:
        folder = os.environ.get(VARIABLE)
        self._folder = None if not folder else Path(folder)
        self._name = name
        self._asked = False
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / name).write_text(str(os.getpid()))

    @property
    def requested(self) -> bool:
        """Whether this container is to end, or another one that the member has a part in."""
        return self._asked or (self._folder is not None and (self._folder / REQUESTED).exists())

    def ask(self) -> None:
        """Asks this member alone to drain."""
        self._asked = True

    async def wait(self) -> None:
        """Returns when this container is to end, or this member is asked."""
        while not self.requested:  # noqa: ASYNC110  # another process makes it
            await asyncio.sleep(POLL_SECONDS)

    def done(self) -> None:
        """Notes that the member has drained."""
        if self._folder is not None:
            (self._folder / self._name).unlink(missing_ok=True)


def drain(folder: Path, seconds: float) -> list[str]:
    """Asks the members to drain; returns the names of those that haven't within `seconds`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REQUESTED).touch()
    deadline = time.monotonic() + seconds
    while (left := _members(folder)) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return left


def _members(folder: Path) -> list[str]:
    """Members that live and haven't drained."""
    entries = {path.name: path for path in sorted(folder.iterdir()) if path.name != REQUESTED}
    return [name for name, path in entries.items() if _lives(path)]


def _lives(entry: Path) -> bool:
    try:
        os.kill(int(entry.read_text()), 0)
    except (ProcessLookupError, FileNotFoundError, ValueError):
        return False
    return True


def main() -> None:
    """Exit code 1 if a member didn't drain in time."""
    left = drain(Path(os.environ[VARIABLE]), float(sys.argv[1]))
    if left:
        sys.exit(f"not drained: {', '.join(left)}")


if __name__ == "__main__":
    main()
