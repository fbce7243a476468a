"""The router's tests run on uvloop's event loop, and on asyncio's own, which runs where uvloop isn't installed.

`make test` has uvloop's, which servers use; `make test-all` asyncio's.
"""

import asyncio
from collections.abc import Iterator

import pytest
import uvloop

from support.scenes import is_coroutine_function


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if is_coroutine_function(metafunc.function):
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
