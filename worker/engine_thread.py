"""The thread that owns the engine.

    queue      producer                             consumer
    commands   any thread (`post`, `call`)          the engine thread, between two steps
    progress   the engine thread, once a step       `on_step`, on the engine thread

Only this thread changes sequences. It holds the engine's lock whenever it uses scheduler, block pool or prefix index,
so that blocks can be reserved on another thread while a step computes.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvrelay.engine.engine import Engine
from kvrelay.engine.scheduling.progress import Progress

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[], object]

SLOW_DECAY = 0.999
"""Factor by which a slow step counts less with every later one."""
STALL_SECONDS = 0.05
"""Time after which requests that lack blocks are looked at again, should nobody tell that some are free: the offer for
which room was made may be gone."""


class EngineEndedError(RuntimeError):
    """The engine thread has ended, so it runs no more commands."""


class EngineThread:
    """Steps an engine as long as it has work, and runs commands between the steps.

    An exception in a step, or in a posted command, leaves the engine in an unknown state: the thread ends and
    `on_failure` is called, which must end the process. An exception in a called command goes to its caller.
    """

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[Sequence[Progress]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._on_failure = on_failure
        # A command, and what to do instead if the thread ends first. None tells the thread to end.
        self._commands: queue.SimpleQueue[tuple[Command, Command | None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self._step_began: float | None = None
        # The slowest of the recent steps, and the next one: seconds.
        self._slowest_steps = (0.0, 0.0)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ends the thread after the step in flight; whether it ended within `timeout` seconds."""
        self._commands.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def ended(self) -> bool:
        """Whether the thread runs no more commands."""
        return self._ended

    @property
    def step_age(self) -> float:
        """Seconds since the running step started; 0 if none runs. Any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def slow_step(self) -> float:
        """Seconds of the second slowest of the recent steps: a slow one once may be a pause of the whole process. 0
        before the second step. Any thread.
        """
        return self._slowest_steps[1]

    async def call(self, command: Callable[[], T]) -> T:
        """Runs `command` on the engine thread before its next step and returns its result.

        Raises:
            EngineEndedError: the thread has ended, or ends before it runs the command.
            Exception: the one that `command` raised.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if result.cancelled():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)  # type: ignore[arg-type]  # T may itself be None

        def run() -> None:
            try:
                value = command()
            except Exception as error:  # noqa: BLE001  # the caller gets it
                loop.call_soon_threadsafe(settle, None, error)
            else:
                loop.call_soon_threadsafe(settle, value, None)

        def fail() -> None:
            loop.call_soon_threadsafe(settle, None, EngineEndedError("the engine has ended"))

        self.post(run, fail)
        return await result

    def post(self, command: Command, instead: Command | None = None) -> None:
        """Runs `command` on the engine thread before its next step; `instead`, on any thread, if that has ended."""
        with self._lock:
            if not self._ended:
                self._commands.put((command, instead))
                return
        if instead is not None:
            instead()

    def _run(self) -> None:
        # A step without progress had no work, or only work that waits for blocks that a command will free.
        stalled = True
        failure: BaseException | None = None
        engine = self._engine
        try:
            while self._run_commands(block=stalled):
                stalled = True
                if not engine.has_work:
                    continue
                began = self._step_began = time.monotonic()
                before = engine.steps, engine.scheduler.preemptions
                progress = engine.step()
                stalled = not progress
                # Also without progress: a step whose sequences have all been cancelled has freed their blocks, and so
                # has one that preempted all for an offer. But never where nothing was freed: an offer that waits for
                # blocks asks again after each report, which wakes this thread.
                if (engine.steps, engine.scheduler.preemptions) != before:
                    with engine.lock:
                        self._on_step(progress)
                    slowest, second = (SLOW_DECAY * seconds for seconds in self._slowest_steps)
                    _, second, slowest = sorted((slowest, second, time.monotonic() - began))
                    self._slowest_steps = slowest, second
                self._step_began = None
                del progress  # while the thread is idle, it keeps no sequence, hold or hidden states
        except BaseException as error:  # whatever it was, the process must learn of it
            logger.exception("the engine failed")
            failure = error
        self._end()
        if failure is not None:
            self._on_failure(failure)

    def _run_commands(self, *, block: bool) -> bool:
        """Runs the queued commands; with `block`, waits for a first one, for STALL_SECONDS while requests wait. False
        if the thread must end."""
        while True:
            try:
                item = self._commands.get(block, STALL_SECONDS if self._engine.has_work else None)
            except queue.Empty:
                return True
            if item is None:
                return False
            command, _ = item
            with self._engine.lock:
                command()
            block = False

    def _end(self) -> None:
        """Fails the calls that wait; later ones fail at once."""
        self._step_began = None
        with self._lock:
            self._ended = True
        while not self._commands.empty():
            item = self._commands.get_nowait()
            if item is not None and item[1] is not None:
                item[1]()
