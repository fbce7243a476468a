"""The router's tests run on uvloop's event loop, and on asyncio's own, which runs where uvloop isn't installed."""

import asyncio
from collections.abc import Iterator

import pytest
import uvloop


@pytest.fixture(autouse=True, params=["uvloop", "asyncio"])
def event_loop_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes all event loops that a test starts in its own process, in any thread, of the kind that it returns."""
    kind: str = request.param
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy() if kind == "uvloop" else asyncio.DefaultEventLoopPolicy())
    yield kind
    asyncio.set_event_loop_policy(before)
