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

    @property
    def begun(self) -> bool:
        """Whether `follow` may be called: not before this process has launched them."""
        ...

    def follow(self) -> None:
        """Queues what the calling thread launches on the device from here on behind them. Waits for nothing."""

    def then(self, call: Callable[[], object]) -> None:
        """Calls `call` once, on some thread, when they have ended. `call` must return soon."""


class Written:
    """Implements `KVWrites`: the writes have ended."""

    begun = ended = True

    def follow(self) -> None:
        """Does nothing: the writes have ended."""

    def then(self, call: Callable[[], object]) -> None:
        call()


WRITTEN = Written()


class StepWrites:
    """Implements `KVWrites` for a step of which nothing is known yet: whether other ranks have ended it, at rank 0, or,
    at another rank, whether this rank will begin it soon.
    """

    def __init__(self, step: int, own: KVWrites = WRITTEN) -> None:
        """
        Args:
            step: number of its plan.
            own: writes of rank 0, at rank 0. What reads another rank's KV goes by that rank's `RankWrites`.
        """
        self.step = step
        self.own = own
        self._lock = threading.Lock()
        self._known: KVWrites | None = None
        self._calls: list[Callable[[], object]] = []

    @property
    def begun(self) -> bool:
        return self._known is not None

    @property
    def ended(self) -> bool:
        return self._known is not None and self._known.ended

    def follow(self) -> None:
        if self._known is not None:
            self._known.follow()

    def then(self, call: Callable[[], object]) -> None:
        with self._lock:
            known = self._known
            if known is None:
                self._calls.append(call)
        if known is not None:
            known.then(call)

    def become(self, writes: KVWrites) -> None:
        """Sets the actual writes, once they are known. Any thread; called once."""
        with self._lock:
            self._known = writes
            calls, self._calls = self._calls, []
        for call in calls:
            writes.then(call)


class RankWrites:
    """The KV writes of the steps of a rank other than 0. Rank 0 may ask for KV of a step that this rank hasn't begun,
    because its stage of the pipeline is a later one. Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = -1
        self._steps: dict[int, StepWrites] = {}
        """Steps that may go on, and those that were asked for and haven't begun."""

    def launched(self, step: int, writes: KVWrites) -> None:
        """Notes that a step was launched. Steps come in order of their numbers."""
        with self._lock:
            self._newest = step
            self._steps = {number: each for number, each in self._steps.items() if not each.ended}
            launched = self._steps.setdefault(step, StepWrites(step))
        launched.become(writes)

    def of(self, step: int) -> KVWrites:
        """The writes of a step; of a forgotten step, writes that have ended."""
        with self._lock:
            if step > self._newest:
                return self._steps.setdefault(step, StepWrites(step))
            return self._steps.get(step, WRITTEN)


class Event(Protocol):
    """The part of `torch.cuda.Event` that a waiter uses; tests stand in for it."""

    def synchronize(self) -> None:
        """Returns when all that was queued before the event has ended; sleeps meanwhile if the event is a blocking one.

        Raises:
            RuntimeError: the device failed.
        """


class EventWaiter:
    """Waits for events on a thread of its own, in the order in which they were given, and makes a call after each.

    The thread starts with the first one. It is a daemon, because an event of a device that hangs never comes.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Event | None, Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def then(self, event: Event | None, call: Callable[[], object]) -> None:
        """Calls `call` on the waiter's thread after any `event`, also if the device has failed. Never after `close`."""
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
                if event is not None:
                    event.synchronize()
            try:
                call()
            except Exception:  # the calls of other links and requests must still be made
                logger.exception("%s: a call failed", self._name)
            del item, event, call  # they may hold the device's memory
