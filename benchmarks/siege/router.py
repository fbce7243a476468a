"""A router process that also notes how long its event loop is held; `siege.py` starts it.

    python -m siege.router --config FOLDER/NAME.json

Each turn that holds the loop for longer than NOTED_SECONDS is a line of FOLDER/NAME.holds: when it ended, on the
monotonic clock, and for how long the loop was held, both in seconds. The environment variable SIEGE_LOOP names the
event loop: `asyncio`, or the product's.
"""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import TextIO

from kvrelay.router import __main__ as router
from support.clock import Clock

LOOP = "SIEGE_LOOP"
TICK_SECONDS = 0.002
NOTED_SECONDS = 0.005


async def note(holds: TextIO) -> None:
    """Wakes up every TICK_SECONDS. What a wake-up is late is what other turns took, or other threads that held the
    interpreter."""
    clock = Clock()
    while True:
        await asyncio.sleep(TICK_SECONDS)
        held = clock.lap() - TICK_SECONDS
        if held > NOTED_SECONDS:
            holds.write(f"{time.monotonic():.6f} {held:.6f}\n")


class NotingRouter(router.RouterProcess):
    """A router that notes how long its loop is held, once it serves."""

    async def start(self) -> int:
        port = await super().start()
        config = Path(sys.argv[sys.argv.index("--config") + 1])
        self._holds = config.with_suffix(".holds").open("a", buffering=1)
        self._noting = asyncio.create_task(note(self._holds), name="holds")
        return port

    async def stop(self, grace: float) -> None:
        self._noting.cancel()
        self._holds.close()
        await super().stop(grace)


if __name__ == "__main__":
    router.RouterProcess = NotingRouter  # type: ignore[misc]  # what `run` makes
    if os.environ.get(LOOP) == "asyncio":
        router.fast_loop = lambda: None
    sys.exit(router.run())
