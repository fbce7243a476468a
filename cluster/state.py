"""What one machine remembers of the cluster that was started from it, so that `status`, `generate` and `down` find it.

`cluster.json` says where it is; the process that owns the cluster holds `lock` for as long as it lives, so that a file
left behind by a killed process is told from a running one whatever became of its pid.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kvrelay.cluster.errors import RunError

LOCK_SECONDS = 0.3
"""How long to try: who only asks whether the lock is held holds it for a moment."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Where a cluster is; empty where it isn't known yet."""

    pid: int | None
    """Of the `kvrelay up` that owns it; None for one that was left detached on a shared Ray cluster."""

    started: float
    """Unix time."""

    namespace: str
    """Of its Ray actors."""

    ray_address: str = ""
    """host:port of Ray's GCS."""

    supervisor: str = ""
    """host:port of the supervisor's gRPC."""

    router: str = ""
    """host:port of the public gRPC."""

    dashboard: str = ""
    """URL of Ray's dashboard."""


def folder() -> Path:
    """$KVRELAY_STATE_DIR, or kvrelay in $XDG_STATE_HOME, or ~/.local/state/kvrelay; made if it isn't there."""
    chosen = os.environ.get("KVRELAY_STATE_DIR")
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(chosen) if chosen else Path(base) / "kvrelay"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@contextmanager
def owned() -> Iterator[None]:
    """Holds the state folder for a cluster that ends with this process; forgets the cluster on leaving.

    Raises:
        RunError: another process holds it.
    """
    with (folder() / "lock").open("a") as lock:
        deadline = time.monotonic() + LOCK_SECONDS
        while not (mine := _try_lock(lock.fileno())) and time.monotonic() < deadline:
            time.sleep(0.02)
        if not mine:
            state = _read()
            pid = "" if state is None or state.pid is None else f" (pid {state.pid})"
            raise RunError(f"a cluster is already running{pid}; `kvrelay down` ends it")
        try:
            yield
        finally:
            forget()


def save(state: ClusterState) -> None:
    """Remembers the cluster; readable by this user only, as it says where an unauthenticated port is."""
    path = folder() / "cluster.json"
    fresh = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(state), file)
    fresh.replace(path)


def forget() -> None:
    """Drops what is remembered."""
    (folder() / "cluster.json").unlink(missing_ok=True)


def current() -> ClusterState | None:
    """The cluster that is remembered; one whose owner has died is forgotten."""
    state = _read()
    if state is None or state.pid is None:
        return state
    with (folder() / "lock").open("a") as lock:
        if not _try_lock(lock.fileno()):
            return state
        forget()
        return None


def held() -> bool:
    """Whether a process owns a cluster in this state folder."""
    with (folder() / "lock").open("a") as lock:
        return not _try_lock(lock.fileno())


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read() -> ClusterState | None:
    path = folder() / "cluster.json"
    try:
        return ClusterState(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        path.unlink(missing_ok=True)  # not ours, or of another version: it says nothing
        return None
