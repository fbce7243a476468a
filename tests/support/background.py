"""A fake cluster for tests whose own code blocks."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from support.router_fakes import FakeCluster, fake_cluster, pair, until


class Background:
    """A fake cluster whose event loop runs in a thread, for the blocking client."""

    def __init__(self, folder: Path, tokens: Callable[[int], int], **config: Any) -> None:
        """
        Args:
            tokens: the token that the workers send at each index.
            config: options of the router.
        """
        self._folder = folder
        self._tokens = tokens
        self._config = config
        self._stop = asyncio.Event()
        self._ready: Future[FakeCluster] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    def __enter__(self) -> "Background":
        self._thread.start()
        self.cluster = self._ready.result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with fake_cluster(self._folder, *pair(self._tokens), **self._config) as cluster:
            self._ready.set_result(cluster)
            await self._stop.wait()

    def wait(self, condition: Callable[[], Any], seconds: float = 5.0) -> None:
        asyncio.run_coroutine_threadsafe(until(condition, "condition", seconds), self._loop).result(seconds + 5)
