"""The main function of a server in the foreground: `python -m kvrelay.<part> --config FILE`.

Every stop has a deadline. A process whose server doesn't stop in time, or whose threads don't end (a model that loads,
a step of the engine that hangs), ends by `os._exit`.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from kvrelay.machine.options import Mistake
from kvrelay.rpc import log
from kvrelay.rpc.metrics.metric_set import MetricSet

ConfigT = TypeVar("ConfigT")
STOP_GRACE_SECONDS = 5.0
"""Seconds for requests to finish, where the configuration has no `drain_seconds`."""
FAILED_GRACE_SECONDS = 0.5
"""Seconds for requests to be given back by a server that can't go on."""
STOP_SECONDS = 5.0
"""Seconds for a server to stop, beyond the time for its requests."""
EXIT_SECONDS = 1.0
"""Seconds for the interpreter to end when the server has stopped: it waits for threads."""
FAILED_CODE = 1
USAGE_CODE = 2
"""A mistake in the configuration or the environment: another try would fail as well."""


class Server(Protocol):
    """A server that a process runs: a worker, a router or the supervisor."""

    @property
    def address(self) -> str:
        """host:port, valid after `start`."""

    @property
    def metrics(self) -> MetricSet:
        """The metrics that the server records."""

    async def start(self) -> Any:
        """Binds and serves.

        Raises:
            ValueError, OSError: a mistake in the configuration or the environment; the text is one line.
        """

    async def stop(self, grace: float) -> None: ...

    async def failed(self) -> BaseException:
        """Returns when the server can't continue, with the reason."""


SWITCH_SECONDS = 0.001
"""Seconds for which a process's event loop, or its engine, waits for another thread that computes in Python; Python's
own are 5 ms."""

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def fast_loop() -> LoopFactory | None:
    """The loop factory of uvloop; None if it isn't installed (some platforms have no wheel), for asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return None
    return cast("LoopFactory", uvloop.new_event_loop)


def main(
    kind: type[ConfigT],
    make: Callable[[ConfigT], Server],
    description: str,
    stop_seconds: float = STOP_SECONDS,
    loop: LoopFactory | None = None,
) -> int:
    """Reads the configuration and serves until SIGTERM or SIGINT; returns the exit code, 2 for a user's mistake.

    Prints one JSON line, {"address": "host:port"}, to stdout when the server listens. A configuration with
    `drain_seconds` says how long requests may take to finish when the process is to end; `stop_seconds` is the time for
    the server itself. `loop` makes the event loop; None: asyncio's.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, required=True, help="JSON file with the process's options")
    path = parser.parse_args().config
    try:
        config = TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError as error:
        for problem in error.errors():
            print(f"{path}: {Mistake.of(problem)}", file=sys.stderr)
        return USAGE_CODE
    except OSError as error:
        print(f"--config {path}: {error.strerror}", file=sys.stderr)
        return USAGE_CODE
    try:
        server = make(config)
    except (ValueError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return USAGE_CODE
    log.configure(part=kind.__name__.removesuffix("Config").lower(), name=str(getattr(config, "name", "")))
    return run(server, float(getattr(config, "drain_seconds", STOP_GRACE_SECONDS)), stop_seconds, loop)


def run(server: Server, grace: float, stop_seconds: float, loop: LoopFactory | None) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit code: 0 stopped, 1 failed, 2 a mistake of the user.

    The process ends at most `grace` + `stop_seconds` + EXIT_SECONDS after a signal; a server that hasn't started yet
    gets no `grace`.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    deadline = ExitDeadline()
    code = FAILED_CODE
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            code = runner.run(_serve(server, grace, stop_seconds, deadline))
    except (ValueError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        code = USAGE_CODE
    finally:
        deadline.set(EXIT_SECONDS, code)
    return code


class ExitDeadline:
    """Ends this process when the time is over, whatever its threads do."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            before: called right before the process ends.
        """
        self._before = before
        self._timer: threading.Timer | None = None

    def set(self, seconds: float, code: int, message: str = "") -> None:
        """Sets the time, in place of an earlier one: in `seconds` from now the process ends with `code`."""
        self.cancel()
        self._timer = threading.Timer(seconds, self._exit, (code, message))
        self._timer.daemon = True
        self._timer.start()

    def cancel(self) -> None:
        """Cancels the deadline."""
        if self._timer is not None:
            self._timer.cancel()

    def _exit(self, code: int, message: str) -> None:
        if message:
            print(message, file=sys.stderr, flush=True)
        self._before()
        os._exit(code)


async def _serve(server: Server, grace: float, stop_seconds: float, deadline: ExitDeadline) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    stopping = asyncio.create_task(stop.wait())
    serving = asyncio.create_task(_start(server))
    code = FAILED_CODE
    left = 0.0
    try:
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises what `start` raised
            left = grace
            failing = asyncio.create_task(server.failed())
            await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                left = min(grace, FAILED_GRACE_SECONDS)
                print(f"{failing.result()}", file=sys.stderr)
                return code
            failing.cancel()
        code = 0
        return code
    except (ValueError, OSError):
        code = USAGE_CODE
        raise
    finally:
        for task in (stopping, serving):
            task.cancel()
        seconds = left + stop_seconds
        deadline.set(seconds, code or FAILED_CODE, f"did not stop within {seconds:g} s")
        await server.stop(left)
        # `asyncio.run` waits for the threads of `to_thread`: a model that loads.
        deadline.set(EXIT_SECONDS, code)


async def _start(server: Server) -> None:
    await server.start()
    print(json.dumps({"address": server.address}), flush=True)
