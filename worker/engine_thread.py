"""The thread that owns the engine.

    queue      producer                             consumer
    commands   any thread (`post`, `call`)          the engine thread, between two steps
    progress   the engine thread, once a step       `on_step`, on the engine thread

Scheduler, block pool and prefix index are touched by this thread only, so none of them needs a lock.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvrelay.engine.engine import Engine
from kvrelay.engine.progress import Progress

logger = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[], object]


class EngineThread:
    """Steps an engine for as long as it has work, and runs commands between the steps.

    An exception out of a step leaves the engine in no known state: the thread ends and `on_failure` is told, which
    must end the process. So does one out of a posted command; one out of a called command goes to its caller.
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
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Ends the thread after the step in flight; whether it ended within `timeout` seconds."""
        self._commands.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def post(self, command: Command) -> None:
        """Runs `command` on the engine thread before its next step."""
        self._commands.put(command)

    async def call(self, command: Callable[[], T]) -> T:
        """Runs `command` on the engine thread before its next step and returns what it returned or raised."""
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

        self.post(run)
        return await result

    def _run(self) -> None:
        # A step without progress had no work, or only work that waits for blocks that a command will free.
        stalled = True
        try:
            while self._run_commands(block=stalled):
                progress = self._engine.step() if self._engine.has_work else []
                if progress:
                    self._on_step(progress)
                stalled = not progress
        except BaseException as error:  # whatever it was, the process must learn of it
            logger.exception("the engine failed")
            self._on_failure(error)

    def _run_commands(self, *, block: bool) -> bool:
        """Runs what is queued, with `block` waiting for a first one; False when told to end."""
        while True:
            try:
                command = self._commands.get(block)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            block = False
