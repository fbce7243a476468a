"""The router's tests run on uvloop's event loop, and on asyncio's own, which runs where uvloop isn't installed.

`make test` has uvloop's, which servers use; `make test-all` asyncio's. The marker `both_loops` is for tests that are no
coroutines themselves.
"""

import asyncio
import inspect
from collections.abc import Iterator

import pytest
import uvloop


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    both = metafunc.definition.get_closest_marker("both_loops") is not None
    if both or inspect.iscoroutinefunction(metafunc.function):
        other = pytest.param("asyncio", marks=pytest.mark.more)
        metafunc.parametrize("event_loop_kind", ["uvloop", other], indirect=True)


@pytest.fixture(autouse=True)
def event_loop_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes all event loops that a test starts in its own process, in any thread, of the kind that it returns."""
    kind: str = getattr(request, "param", "uvloop")
    before = asyncio.get_event_loop_policy()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy() if kind == "uvloop" else asyncio.DefaultEventLoopPolicy())
    yield kind
    asyncio.set_event_loop_policy(before)
