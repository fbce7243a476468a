"""Writes one call's messages, each within a time limit: a client that stops reading blocks a write for ever."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from kvrelay.router.errors import SlowReader
from kvrelay.router.session.alarm import Alarm

MessageT = TypeVar("MessageT")


class Writer(Generic[MessageT]):
    """Writes messages one after another, from any number of tasks."""

    def __init__(
        self,
        write: Callable[[MessageT], Awaitable[object]],
        limit: float,
        gone: tuple[type[Exception], ...],
    ) -> None:
        """
        Args:
            limit: seconds that one write may take.
            gone: what `write` raises if the client dies meanwhile.
        """
        self._write = write
        self._limit = limit
        self._gone = gone
        self._alarm = Alarm(self._cancel_write)
        self._writing: asyncio.Task[None] | None = None
        self._late = False
        self._turn = asyncio.Lock()

    async def write(self, message: MessageT) -> None:
        """
        Raises:
            SlowReader: the write took longer than the limit.
            asyncio.CancelledError: the client is gone.
        """
        async with self._turn:
            self._writing = asyncio.current_task()
            self._alarm.set(time.monotonic() + self._limit)
            try:
                await self._write(message)
            except asyncio.CancelledError:
                # `_cancel_write` has cancelled this task, unless another cancellation came as well.
                if self._late and self._writing is not None and not self._writing.uncancel():
                    raise SlowReader(f"no message was read for {self._limit:g} s") from None
                raise
            except self._gone as error:
                raise asyncio.CancelledError from error
            finally:
                self._writing = None
                self._alarm.set(math.inf)

    def close(self) -> None:
        self._alarm.close()

    def _cancel_write(self) -> None:
        if self._writing is not None:
            self._late = True
            self._writing.cancel()
