"""The record of the cluster that was started from this machine; `status`, `generate` and `down` read it.

`cluster.json` holds its addresses. The process that owns the cluster locks the file `lock` as long as it lives, so a
record that a killed process left behind is recognized even if another process has its pid now.
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

DEFAULT_TARGET = "127.0.0.1:50051"
"""host:port of a router, for calls where no cluster is recorded."""
LOCK_SECONDS = 0.3
"""Longest time in seconds to try: a process that only tests the lock holds it for a moment."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The addresses of a cluster; empty before they are known."""

    pid: int | None
    """Process id of the `kvrelay up` that owns it; None for one that was left detached on a shared Ray cluster."""
    namespace: str
    """Namespace of its Ray actors."""
    ray_address: str = ""
    """host:port of Ray's GCS."""
    supervisor: str = ""
    """host:port of the supervisor's gRPC."""
    router: str = ""
    """host:port of the public gRPC of each router, with commas between."""
    http: str = ""
    """host:port of the HTTP of each router, with commas between; empty without it."""
    page: bool = False
    """Whether HTTP has the page at `/`."""
    dashboard: str = ""
    """URL of Ray's dashboard."""
    join_token_path: str = ""
    """File with the join token of its internal calls."""
    certificates: str = ""
    """Folder of its certificates; empty without TLS."""
    router_tls: bool = False
    """Whether the public gRPC and HTTP use TLS."""
    drain_seconds: float = 30.0
    """Time that requests are given to finish when it ends."""
    trouble: str = ""
    """Reason why the cluster was lost, while it is started anew."""
    missing: str = ""
    """Processes of Ray's that have ended and that serving doesn't need, with commas between."""


def folder() -> Path:
    """$KVRELAY_STATE_DIR, or kvrelay in $XDG_STATE_HOME, or ~/.local/state/kvrelay; created if missing.

    Raises:
        RunError: it can't be created, or used by this user.
    """
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(os.environ.get("KVRELAY_STATE_DIR") or Path(base) / "kvrelay")
    advice = "KVRELAY_STATE_DIR names the folder for the record of this machine's cluster"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}; {advice}") from None
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise RunError(f"{path}: not this user's to write; {advice}")
    return path


@contextmanager
def owned() -> Iterator[None]:
    """Locks the state folder for a cluster that ends with this process; removes the record at the end.

    Raises:
        RunError: another process has locked it.
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
    """Writes the record. Only this user can read it, since it says where the cluster is reached."""
    write_private(folder() / "cluster.json", json.dumps(asdict(state)).encode())


def write_private(path: Path, data: bytes) -> None:
    """Replaces a file in one step; only this user can read it."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    fresh.replace(path)


def forget() -> None:
    """Removes the record."""
    (folder() / "cluster.json").unlink(missing_ok=True)


def record() -> Path:
    """The file with the supervisor's record of a cluster on this machine, from which a cluster that is started anew
    continues."""
    return folder() / "supervisor.json"


def keep_logs(path: Path | None) -> None:
    """Notes where the logs of a cluster on this machine are, for the time after its end too; None for one elsewhere."""
    link = folder() / "logs"
    link.unlink(missing_ok=True)
    if path is not None:
        link.symlink_to(path)


def logs() -> Path | None:
    """The folder with the logs of the latest cluster from here; None if that was on a shared Ray cluster."""
    link = folder() / "logs"
    return link if link.is_symlink() else None


def current() -> ClusterState | None:
    """The recorded cluster; the record of an owner that has died is removed."""
    state = _read()
    if state is None or state.pid is None:
        return state
    with (folder() / "lock").open("a") as lock:
        if not _try_lock(lock.fileno()):
            return state
        forget()
        return None


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
        path.unlink(missing_ok=True)  # not a record, or one of another version
        return None
