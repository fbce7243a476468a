"""Runs one router in the foreground: `python -m kvrelay.router --config FILE`."""

import asyncio
import gc
import sys

from kvrelay.router.config import RouterConfig
from kvrelay.router.doors.sockets import raise_limit
from kvrelay.router.server import RouterServer
from kvrelay.rpc.serve import fast_loop, main

GC_THRESHOLDS = 10_000, 20, 20
"""Each message of a stream makes some objects that the collector counts, and hardly any cycles."""


class RouterProcess(RouterServer):
    """A router that has its process to itself."""

    async def start(self) -> int:
        port = await super().start()
        # All present objects, such as the tokenizer, stay until the end, so the collector needn't look at them again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self._warming = asyncio.create_task(self.warm(), name="lanes")
        return port


def run() -> int:
    """Serves until a signal; returns the exit code."""
    raise_limit()
    about = "The router: takes requests over gRPC and HTTP and places them on workers."
    return main(RouterConfig, RouterProcess, about, loop=fast_loop())


if __name__ == "__main__":
    sys.exit(run())
