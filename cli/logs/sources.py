"""Sources of log lines: files of this machine, or Ray's log service for a cluster on several nodes."""

import codecs
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from kvrelay.cli.logs.entry import Entry, Parser
from kvrelay.cluster.errors import RunError

RAY_PATTERN, PLAIN_PATTERN = "worker-*.err", "*.log"
"""File patterns of the standard error of Ray's actors, and of plain processes' logs in a folder without Ray's."""
RAY_TIMEOUT_SECONDS = 30
MOST_ACTORS = 1000
LIST_SECONDS = 5.0
"""Seconds between two looks for actors that have started, and for logs that can be read again."""
READERS = 8
"""Logs that are fetched at once."""
ACTOR_PREFIX = "kvrelay-"
"""Beginning of the supervisor's name among Ray's actors, which a Ray cluster may list for all namespaces together."""
UTF_8 = codecs.getincrementaldecoder("utf-8")


class Source(Protocol):
    """A place with logs."""

    names: set[str]
    """Names of the members whose logs have been found so far."""

    def read(self) -> list[Entry]:
        """The entries since the last call, in the order of time; the first call returns all there are.

        Raises:
            RunError: nothing can be read.
        """


@dataclass(slots=True)
class _File:
    path: Path
    parser: Parser
    offset: int = 0

    def fresh(self) -> list[Entry]:
        """The entries since the last call."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return []
        # Up to the last whole line, so that no character is cut.
        data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        return list(self.parser.take(data.decode(errors="replace")))


@dataclass(slots=True)
class Files:
    """The log files in one folder, those of ended processes too."""

    folder: Path
    names: set[str] = field(default_factory=set)
    _files: dict[Path, _File] = field(default_factory=dict)

    def read(self) -> list[Entry]:
        self._find()
        found = [entry for file in self._files.values() for entry in file.fresh() if entry.name]
        self.names.update(entry.name for entry in found)
        return sorted(found, key=lambda entry: entry.time)

    def _find(self) -> None:
        if not self.folder.is_dir():
            raise RunError(f"there is no folder {self.folder} with logs any more")
        for path in sorted(self.folder.glob(RAY_PATTERN)) or sorted(self.folder.glob(PLAIN_PATTERN)):
            if path not in self._files:
                self._files[path] = _File(path, Parser())


@dataclass(slots=True)
class _ActorLog:
    """The log of one process of an actor. A restarted actor writes another file."""

    name: str
    actor: str
    live: bool
    parser: Parser
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: UTF_8("replace"))
    nbytes: int = 0
    """Bytes read so far."""
    streaming: bool = False
    """Whether a thread reads it."""
    failed: bool = False
    """Whether the last attempt to read it has failed."""

    def take(self, data: bytes) -> list[Entry]:
        """Entries of the next part of the log."""
        self.nbytes += len(data)
        return list(self.parser.take(self.decoder.decode(data)))


@dataclass(slots=True)
class RayActors:
    """The actors of a cluster on Ray, by the log service of Ray's dashboard.

    The first `read` fetches the whole log of each actor. From the second one on, a thread for each living actor follows
    its log, those of actors that start later too; the threads end with the process.
    """

    address: str
    """host:port of Ray's GCS."""
    namespace: str
    """Ray namespace of the actors."""
    member: str
    """Name of the only actor to read; empty: all actors."""
    warn: Callable[[str], object]
    """Callback that is told why the log of one actor can't be read."""
    names: set[str] = field(default_factory=set)
    _logs: dict[tuple[str, int], _ActorLog] = field(default_factory=dict)
    """Logs by the actor's id and its process."""
    _fresh: "queue.SimpleQueue[list[Entry] | RunError]" = field(default_factory=queue.SimpleQueue)
    _begun: bool = False
    """Whether `read` was called before."""
    _listed: float = -math.inf
    """Monotonic time of the last look for logs to follow."""

    def read(self) -> list[Entry]:
        found: list[Entry] = []
        if not self._begun:
            found = self._read_whole(self._list())
            self._begun = True
        elif time.monotonic() - self._listed >= LIST_SECONDS:
            found = self._read_whole([log for log in self._list() if not log.live])
            self._follow()
            self._listed = time.monotonic()
        while not self._fresh.empty():
            fresh = self._fresh.get()
            if isinstance(fresh, RunError):
                self.warn(str(fresh))
            else:
                found += fresh
        return sorted(found, key=lambda entry: entry.time)

    def _list(self) -> list[_ActorLog]:
        """Finds the actors of the cluster, those that have ended too; returns the logs that are new."""
        from kvrelay.cluster.ray import environment as rayenv

        rayenv.prepare()  # before Ray is imported
        from ray.exceptions import RayError
        from ray.util.state import list_actors
        from ray.util.state.exception import RayStateApiException

        try:
            listed = list_actors(
                address=self.address,
                filters=[("ray_namespace", "=", self.namespace)],
                limit=MOST_ACTORS,
                timeout=RAY_TIMEOUT_SECONDS,
            )
        except (RayStateApiException, RayError, OSError, ValueError) as error:
            raise RunError(f"the log service of Ray at {self.address}: {_line(error)}") from None
        fresh = []
        for actor in listed:
            name, live = str(actor.name).removeprefix(ACTOR_PREFIX), actor.state != "DEAD"
            self.names.add(name)
            if not actor.pid or self.member not in ("", name):
                continue  # an actor that waits for its node has no log yet
            key = str(actor.actor_id), int(actor.pid)
            if key not in self._logs:
                self._logs[key] = _ActorLog(name, key[0], live, Parser(name))
                fresh.append(self._logs[key])
            self._logs[key].live = live
        return fresh

    def _read_whole(self, logs: Sequence[_ActorLog]) -> list[Entry]:
        """
        Raises:
            RunError: none of the logs that there are at first can be read.
        """

        def read(log: _ActorLog) -> list[Entry] | RunError:
            try:
                found = [entry for data in self._data(log, follow=False) for entry in log.take(data)]
            except RunError as error:
                log.failed = True
                return error
            return found if log.live else [*found, *log.parser.end()]

        with ThreadPoolExecutor(READERS) as pool:
            results = list(pool.map(read, logs))
        errors = [result for result in results if isinstance(result, RunError)]
        if not self._begun and errors and len(errors) == len(logs):
            raise errors[0]
        for error in errors:
            self.warn(str(error))
        return [entry for result in results if not isinstance(result, RunError) for entry in result]

    def _follow(self) -> None:
        """Has each living actor's log read by a thread, again where that has failed."""
        for log in self._logs.values():
            if log.live and not log.streaming:
                log.streaming = True
                threading.Thread(target=self._pump, args=(log,), name=f"log of {log.name}", daemon=True).start()

    def _pump(self, log: _ActorLog) -> None:
        """Reads the log until reading fails."""
        known = log.nbytes  # the service sends the file from its beginning
        try:
            for data in self._data(log, follow=True):
                fresh, known = data[known:], max(0, known - len(data))
                self._fresh.put(log.take(fresh))
                log.failed = False
        except RunError as error:
            if not log.failed:
                self._fresh.put(error)
            log.failed = True
        finally:
            log.streaming = False

    def _data(self, log: _ActorLog, *, follow: bool) -> Iterator[bytes]:
        from ray.exceptions import RayError
        from ray.util.state import get_log
        from ray.util.state.exception import RayStateApiException

        try:
            data = get_log(
                address=self.address,
                actor_id=log.actor,
                suffix="err",
                tail=-1,
                follow=follow,
                timeout=RAY_TIMEOUT_SECONDS,
                encoding=None,
            )
            yield from cast("Iterator[bytes]", data)  # which it is without an encoding
        except (RayStateApiException, RayError, OSError, ValueError) as error:
            text = f"the log of {log.name} from the log service of Ray at {self.address}: {_line(error)}"
            raise RunError(text) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
