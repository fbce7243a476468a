"""Runs tests that are coroutine functions, and starts what they need in their event loop. A plugin of pytest."""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest

from support.router_fakes import FakeCluster, FakeWorker, fake_cluster, run

SECONDS = 120.0
"""Longest time in seconds that a test takes which has no marker `timeout`; with one, it is 10 s less than that."""


def is_coroutine_function(test: Callable[..., Any]) -> bool:
    """Whether a test is a coroutine function, also one with hypothesis' `given`."""
    return inspect.iscoroutinefunction(test.hypothesis.inner_test if hasattr(test, "hypothesis") else test)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine function in an event loop of its own, in which what it has entered into `stack` ends, too. With
    `given`, each example has an event loop.

    Tests with the marker `anyio` run in that plugin's loop, which their asynchronous fixtures share.
    """
    if not is_coroutine_function(pyfuncitem.obj) or pyfuncitem.get_closest_marker("anyio") is not None:
        return None
    if hasattr(pyfuncitem.obj, "hypothesis"):
        example: Callable[..., Awaitable[None]] = pyfuncitem.obj.hypothesis.inner_test
        pyfuncitem.obj.hypothesis.inner_test = wraps(example)(lambda **drawn: run(partial(example, **drawn), SECONDS))
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def test() -> None:
        async with pyfuncitem.funcargs.get("stack") or AsyncExitStack():
            await pyfuncitem.obj(**arguments)

    marker = pyfuncitem.get_closest_marker("timeout")
    run(test, SECONDS if marker is None else marker.args[0] - 10)
    return True


@pytest.fixture
def stack() -> AsyncExitStack:
    """Asynchronous contexts that end with a test."""
    return AsyncExitStack()


class Serve:
    """Starts routers over scripted workers, which end with the test."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._started = 0

    async def __call__(self, *workers: FakeWorker, **config: Any) -> FakeCluster:
        """Starts a router with both faces, which has reached the workers.

        Args:
            config: options of the router.
        """
        self._started += 1
        folder = self._folder / f"model-{self._started}"
        return await self._stack.enter_async_context(fake_cluster(folder, *workers, **{"http_port": 0, **config}))


@pytest.fixture
def serve(tmp_path: Path, stack: AsyncExitStack) -> Serve:
    return Serve(tmp_path, stack)
