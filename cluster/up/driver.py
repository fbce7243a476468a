"""The Ray driver of a cluster that `kvrelay up` owns: `python -m kvrelay.cluster.up.driver`, a child of that process.

stdin    one line of JSON, Orders; its end means that the owner has ended, and this process ends with all of Ray's
stdout   one line of JSON for each Event
SIGTERM  the cluster is to end
"""

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from kvrelay.cluster.config.options import ClusterConfig
from kvrelay.cluster.errors import ClusterError, RunError
from kvrelay.cluster.fleet.keepers import MemberStart
from kvrelay.cluster.processes import processes
from kvrelay.cluster.ray import environment as rayenv
from kvrelay.cluster.secrets import Secured
from kvrelay.cluster.signals import Interrupted, Signals
from kvrelay.cluster.state import ClusterState

BEAT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Orders:
    """Orders of an owner to its driver."""

    config: dict[str, Any]
    """The ClusterConfig as JSON."""
    token: str
    token_path: str
    resume: bool
    """Whether a cluster that runs on the joined Ray already is this one."""

    @property
    def secured(self) -> Secured:
        """The configuration, and its secrets."""
        return Secured(ClusterConfig.model_validate(self.config), self.token, self.token_path)


@dataclass(frozen=True, slots=True)
class Event:
    """Message of a driver to its owner. One without any field only says that the driver lives."""

    phase: str = ""
    """The present step of the whole cluster."""
    progress: Sequence[dict[str, Any]] | None = None
    """One MemberStart for each member."""
    state: dict[str, Any] | None = None
    """The ClusterState, without the owner."""
    ready: dict[str, str] | None = None
    """The cluster serves; the Addresses of Ray's processes."""
    error: Sequence[str] | None = None
    """The cluster can't be started, or go on: one line for each reason."""
    code: int | None = None
    """The exit code of such an error."""


class EventWriter:
    """Tells the owner what happens. Any thread may call it."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def tell(self, event: Event) -> None:
        """Writes an event. An owner that has ended reads none; the end of stdin says so."""
        line = json.dumps({name: value for name, value in asdict(event).items() if value not in (None, "")})
        with self._lock:
            print(line, file=self._out, flush=True)

    def phase(self, text: str) -> None:
        """The present step of the whole cluster."""
        self.tell(Event(phase=text))

    def progress(self, members: Sequence[MemberStart]) -> None:
        """The progress of each member."""
        self.tell(Event(progress=[asdict(member) for member in members]))

    def save(self, state: ClusterState) -> None:
        """Tells the owner that the cluster's addresses have changed."""
        self.tell(Event(state=asdict(state)))


def main() -> int:
    """Starts the cluster, and ends it at a signal; returns the exit code."""
    line = sys.stdin.readline()
    if not line:
        return RunError.code  # the owner has ended
    # Ray's processes get another stdout, whose readers are others.
    events = EventWriter(os.fdopen(os.dup(sys.stdout.fileno()), "w"))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    orders = Orders(**json.loads(line))
    threading.Thread(target=_end_with_owner, name="owner", daemon=True).start()
    threading.Thread(target=_beat, args=(events,), name="beats", daemon=True).start()
    secured = orders.secured
    rayenv.prepare(local=secured.config.local)
    from kvrelay.cluster.up import launch  # imports Ray

    signals = Signals()
    signals.install()
    with launch.quiet():
        cluster = launch.Cluster(secured, events, signals, events.save, resume=orders.resume)
        try:
            cluster.start()
            events.tell(Event(ready=asdict(cluster.addresses)))
            cluster.wait()
        except ClusterError as error:
            events.tell(Event(error=error.lines, code=error.code))
            cluster.stop()
            return error.code
        except Interrupted as interrupted:
            cluster.stop()
            return interrupted.code
        cluster.stop()
    return 0


def _beat(events: EventWriter) -> None:
    while True:
        events.tell(Event())
        time.sleep(BEAT_SECONDS)


def _end_with_owner() -> None:
    """Waits for the owner's end, and ends this process and its Ray, wherever they are."""
    sys.stdin.read()
    processes.kill_descendants()
    os._exit(RunError.code)


if __name__ == "__main__":
    code = main()
    # Everything has ended. Threads of Ray's may crash an interpreter that is torn down around them.
    sys.stderr.flush()
    os._exit(code)
