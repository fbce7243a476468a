"""Fixtures of the tests of the command line: a state folder of their own, and a router to ask."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from capital_router import CapitalRouter, serving


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRELAY_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def router() -> CapitalRouter:
    return CapitalRouter()


@pytest.fixture
def target(router: CapitalRouter) -> Iterator[str]:
    with serving(router) as address:
        yield address
