"""Values of files that are read again when they change."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")


class Watched(Generic[ValueT]):
    """The value of some files. If they can't be used after a change, the last value stays in use. Any thread."""

    def __init__(self, what: str, files: Sequence[Path], read: Callable[[], ValueT]) -> None:
        """
        Args:
            what: names the value in the log.
            read: makes the value from the files; raises a ValueError that says why it can't.

        Raises:
            ValueError: as `read`.
        """
        self._what = what
        self._files = files
        self._read = read
        self._lock = threading.Lock()
        # Before the files are read: a change in between is noticed by the next look.
        self._seen = self._state()
        self._refused = self._seen
        self._value = read()

    def current(self) -> ValueT:
        """The value now. Files that can't be used are logged once, and tried again by the next look."""
        with self._lock:
            state = self._state()
            if state != self._seen:
                fields = {"files": [str(path) for path in self._files]}
                try:
                    self._value = self._read()
                    self._seen = state
                    logger.info(f"{self._what} read again", extra=fields)
                except ValueError as error:
                    if state != self._refused:
                        self._refused = state
                        text = f"{self._what} not read again; the last one stays in use"
                        logger.error(text, extra={**fields, "reason": str(error)})
            return self._value

    def _state(self) -> list[tuple[int, int, int] | None]:
        """Modification state of each file, to be compared with an earlier one; None for a missing file."""
        return [file_state(path) for path in self._files]


def file_state(path: Path) -> tuple[int, int, int] | None:
    """Modification state of a file, to be compared with an earlier one; None if the file is missing."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
