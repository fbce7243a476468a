"""When the KV that a launched step writes is in the pool, for threads that are to read it. No torch.

A runner whose steps run by themselves hands a step's writes out with its launch, so that the reading of a chunk can be
queued behind the chunk's computation, before the host has seen its end:

    device    ... the chunk's last layer | mark | logits, sampling ...        the engine's stream
                                            '--> copy to the link's buffer    a stream that was told to `follow`
    host      sleeps until the mark (`then`); the frame is announced when its copy has ended

A runner that computes a step within `launch` hands out `WRITTEN`.
"""

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

logger = logging.getLogger(__name__)


class KVWrites(Protocol):
    """The KV writes of one step. All methods may be called on any thread."""

    @property
    def ended(self) -> bool:
        """Whether they have ended, so that every later access sees them. Never false again after true, and true as
        soon as it is for a later step of the same runner.
        """
        ...

    def follow(self) -> None:
        """Queues what the calling thread launches on the device from here on behind them. Waits for nothing."""

    def then(self, call: Callable[[], object]) -> None:
        """Calls `call` once, on some thread, when they have ended. `call` must return soon."""


class Written:
    """Implements `KVWrites`: the writes have ended."""

    ended = True

    def follow(self) -> None:
        """Nothing is left to wait for."""

    def then(self, call: Callable[[], object]) -> None:
        call()


WRITTEN = Written()


class Event(Protocol):
    """The part of `torch.cuda.Event` that a waiter uses; tests stand in for it."""

    def synchronize(self) -> None:
        """Returns when all that was queued before the event has ended; sleeps meanwhile if the event is a blocking one.

        Raises:
            RuntimeError: the device failed.
        """


class EventWaiter:
    """Waits for events on a thread of its own, in the order in which they were given, and makes a call after each.

    The thread starts with the first event. It is a daemon, because an event of a device that hangs never comes.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Event, Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def then(self, event: Event, call: Callable[[], object]) -> None:
        """Calls `call` on the waiter's thread after `event`, also if the device has failed. After `close`, never."""
        with self._lock:
            if self._closed:
                return
            self._queue.put((event, call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends the thread after the events that it has. Never blocks; idempotent."""
        with self._lock:
            self._closed = True
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, call = item
            with suppress(RuntimeError):  # whoever uses the device next gets the same error
                event.synchronize()
            try:
                call()
            except Exception:  # the calls of other links and requests must still be made
                logger.exception("%s: a call behind an event failed", self._name)
