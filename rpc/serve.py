"""The main function of a server in the foreground: `python -m kvrelay.<part> --config FILE`."""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from kvrelay.rpc import log

ConfigT = TypeVar("ConfigT")
STOP_GRACE_SECONDS = 5.0


class Server(Protocol):
    """A server that a process runs: a worker, a router or the supervisor."""

    @property
    def address(self) -> str:
        """host:port, valid after `start`."""

    async def start(self) -> Any:
        """Binds and serves.

        Raises:
            ValueError, OSError: a mistake in the configuration or the environment; the text is one line.
        """

    async def stop(self, grace: float) -> None: ...

    async def failed(self) -> BaseException:
        """Returns when the server can't continue, with the reason."""


def main(kind: type[ConfigT], make: Callable[[ConfigT], Server], description: str) -> int:
    """Reads the configuration and serves until SIGTERM or SIGINT; returns the exit code, 2 for a user's mistake.

    Prints one JSON line, {"address": "host:port"}, to stdout when the server listens.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, required=True, help="JSON file with the process's options")
    path = parser.parse_args().config
    try:
        config = TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError as error:
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"])
            print(f"{path}: {where or 'file'}: {problem['msg']}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"--config {path}: {error.strerror}", file=sys.stderr)
        return 2
    try:
        server = make(config)
    except (ValueError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 2
    return run(server, part=kind.__name__.removesuffix("Config").lower(), name=str(getattr(config, "name", "")))


def run(server: Server, **fields: str) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit code; each log line carries `fields`."""
    log.configure(**fields)
    try:
        return asyncio.run(_serve(server))
    except (ValueError, OSError) as error:
        print(f"{error}", file=sys.stderr)
        return 2


async def _serve(server: Server) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    failing: asyncio.Task[BaseException] | None = None
    try:
        await server.start()
        print(json.dumps({"address": server.address}), flush=True)
        stopping = asyncio.create_task(stop.wait())
        failing = asyncio.create_task(server.failed())
        await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if failing.done():
            print(f"{failing.result()}", file=sys.stderr)
            return 1
        return 0
    finally:
        if failing is not None:
            failing.cancel()
        await server.stop(STOP_GRACE_SECONDS)
