"""The record that a supervisor keeps for its successor: in a file, or in Ray's internal KV.

On a Ray cluster with fault tolerance of the GCS the internal KV is in Redis, so the record outlives the head node.
"""

import asyncio
import json
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from google.protobuf import json_format

from kvrelay.internal.v1.supervisor_pb2 import SupervisorRecord

logger = logging.getLogger(__name__)

SAVE_SECONDS = 2.0
"""Longest time in seconds that a membership waits for its record before it is sent without."""


class Store(Protocol):
    """Keeps one record. Both methods block."""

    def load(self) -> SupervisorRecord | None:
        """The record that was saved last; None if there is none.

        Raises:
            ValueError: there is something else in its place.
        """

    def save(self, record: SupervisorRecord) -> None:
        """Returns when the record outlives this process and this machine's power.

        Raises:
            OSError: it can't be written now.
        """


class FileStore:
    """Keeps the record in a file (JSON), which is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ValueError: the file's folder doesn't exist.
        """
        self._path = path
        if not path.absolute().parent.is_dir():
            raise ValueError(f"state_path is {path}; its folder doesn't exist")

    def load(self) -> SupervisorRecord | None:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"state_path {self._path}: {error}") from None
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise ValueError("not a JSON object")  # an empty list would pass for an empty record
            return json_format.ParseDict(values, SupervisorRecord(), ignore_unknown_fields=True)
        except (ValueError, json_format.ParseError) as error:
            raise ValueError(f"state_path {self._path} isn't a supervisor's record: {error}") from None

    def save(self, record: SupervisorRecord) -> None:
        fresh = self._path.with_name(f"{self._path.name}.new")
        with fresh.open("w") as file:
            file.write(json_format.MessageToJson(record))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
        folder = os.open(self._path.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name itself
        finally:
            os.close(folder)


class Recorder:
    """Writes records in order, in a thread. A store that fails or hangs costs SAVE_SECONDS, and never the service."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, "record")
        self._writing: Future[None] | None = None
        self._saved: SupervisorRecord | None = None
        self._well = True

    async def save(self, record: SupervisorRecord) -> bool:
        """Saves the record; False if it has to be tried again."""
        if record == self._saved:
            return True
        try:
            async with asyncio.timeout(SAVE_SECONDS):
                if self._writing is not None:  # one that took too long, and may have failed since
                    await asyncio.gather(asyncio.shield(asyncio.wrap_future(self._writing)), return_exceptions=True)
                self._saved = None  # a write that fails or is given up may still have changed the record
                self._writing = self._thread.submit(self._store.save, record)
                await asyncio.shield(asyncio.wrap_future(self._writing))
        except (OSError, TimeoutError) as error:
            if self._well:
                reason = str(error) or f"it takes longer than {SAVE_SECONDS:g} s"
                logger.error("the supervisor's record can't be saved", extra={"reason": reason})
            self._well = False
            return False
        if not self._well:
            logger.warning("the supervisor's record is saved again")
        self._well = True
        self._saved = SupervisorRecord()
        self._saved.CopyFrom(record)
        return True

    def close(self) -> None:
        """Takes nothing more; a write that hangs is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)
