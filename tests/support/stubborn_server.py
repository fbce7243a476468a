"""Servers that don't stop as they should: `python -m support.stubborn_server --config FILE`."""

import asyncio
import sys
import threading
import time
from dataclasses import dataclass

from kvrelay.rpc.serve import main


@dataclass(frozen=True, slots=True)
class StubbornConfig:
    """Ways to go wrong, each with its length in seconds."""

    load_seconds: float = 0.0
    """Seconds for which a thread of `start` runs, like a model that loads."""
    stop_seconds: float = 0.0
    """Seconds for which `stop` goes on after its grace."""
    thread_seconds: float = 0.0
    """Seconds for which a thread outlives `start`, like a step of an engine that hangs."""
    blocked_seconds: float = 0.0
    """Seconds for which `stop` blocks the event loop."""
    fails: bool = False
    """Whether the server fails once it has started."""
    drain_seconds: float = 0.5


class StubbornServer:
    """Serves nothing."""

    address = "127.0.0.1:1"

    def __init__(self, config: StubbornConfig) -> None:
        self.config = config

    async def start(self) -> None:
        print("starting", file=sys.stderr, flush=True)
        await asyncio.to_thread(time.sleep, self.config.load_seconds)
        threading.Thread(target=time.sleep, args=(self.config.thread_seconds,)).start()

    async def stop(self, grace: float) -> None:
        print(f"stop with {grace:g} s", file=sys.stderr, flush=True)
        time.sleep(self.config.blocked_seconds)  # noqa: ASYNC251  # it blocks the loop on purpose
        await asyncio.sleep(self.config.stop_seconds)

    async def failed(self) -> BaseException:
        if not self.config.fails:
            await asyncio.Event().wait()
        return RuntimeError("the engine failed")


if __name__ == "__main__":
    sys.exit(main(StubbornConfig, StubbornServer, "A server that doesn't stop.", stop_seconds=1.0))
