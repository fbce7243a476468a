"""Where the lines come from: files of this machine, or Ray's log service for a cluster on several nodes."""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvrelay.cluster.errors import RunError
from kvrelay.cluster.logs.entry import Entry, Parser

POLL_SECONDS = 0.25
RAY_PATTERN, PLAIN_PATTERN = "worker-*.err", "*.log"
"""Standard error of Ray's actors; logs of plain processes, in a folder without the former."""
RAY_TIMEOUT_SECONDS = 30
MOST_ACTORS = 1000


class Source(Protocol):
    """A place with logs."""

    def read(self) -> list[Entry]:
        """All that is there, in the order of time.

        Raises:
            RunError: it can't be read.
        """

    def follow(self) -> Iterator[Entry]:
        """What is there in the order of time, then what comes, without end.

        Raises:
            RunError: it can't be read.
        """


@dataclass(slots=True)
class _File:
    path: Path
    parser: Parser
    offset: int = 0

    def fresh(self) -> list[Entry]:
        """What was written since the last call."""
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
    _files: dict[Path, _File] = field(default_factory=dict)

    def read(self) -> list[Entry]:
        self._find()
        found = [entry for file in self._files.values() for entry in file.fresh() if entry.name]
        return sorted(found, key=lambda entry: entry.time)

    def follow(self) -> Iterator[Entry]:
        while True:
            yield from self.read()
            time.sleep(POLL_SECONDS)

    def _find(self) -> None:
        if not self.folder.is_dir():
            raise RunError(f"there is no folder {self.folder} with logs any more")
        for path in sorted(self.folder.glob(RAY_PATTERN)) or sorted(self.folder.glob(PLAIN_PATTERN)):
            if path not in self._files:
                self._files[path] = _File(path, Parser())


@dataclass(frozen=True, slots=True)
class RayActors:
    """The actors of a cluster on Ray, by the log service of Ray's dashboard."""

    address: str
    """host:port of Ray's GCS."""
    namespace: str
    """Of the actors."""

    def read(self) -> list[Entry]:
        found = [entry for name, actor in self._actors() for entry in self._lines(name, actor, follow=False)]
        return sorted(found, key=lambda entry: entry.time)

    def follow(self) -> Iterator[Entry]:
        """One thread for each actor that there is now; the threads end with the process."""
        lines: queue.Queue[Entry | RunError] = queue.Queue()

        def pump(name: str, actor: str) -> None:
            try:
                for entry in self._lines(name, actor, follow=True):
                    lines.put(entry)
            except RunError as error:
                lines.put(error)

        for name, actor in self._actors():
            threading.Thread(target=pump, args=(name, actor), name=f"logs of {name}", daemon=True).start()
        while True:
            entry = lines.get()
            if isinstance(entry, RunError):
                raise entry
            yield entry

    def _actors(self) -> list[tuple[str, str]]:
        """Name and id of each actor of the cluster, those that have ended too."""
        from kvrelay.cluster import rayenv

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
        return [(str(actor.name), str(actor.actor_id)) for actor in listed]

    def _lines(self, name: str, actor: str, *, follow: bool) -> Iterator[Entry]:
        from ray.exceptions import RayError
        from ray.util.state import get_log
        from ray.util.state.exception import RayStateApiException

        parser = Parser(name)
        try:
            for text in get_log(
                address=self.address,
                actor_id=actor,
                suffix="err",
                tail=-1,
                follow=follow,
                timeout=RAY_TIMEOUT_SECONDS,
            ):
                yield from parser.take(text)
        except (RayStateApiException, RayError, OSError, ValueError) as error:
            raise RunError(f"the log of {name} from the log service of Ray at {self.address}: {_line(error)}") from None
        yield from parser.end()


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
