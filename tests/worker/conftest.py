"""The workers here."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvrelay.worker.server import WorkerServer
from support.checkpoints import make_checkpoint
from support.relays import worker


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("worker") / "llama", "llama")


@pytest.fixture
async def server(checkpoint: Path) -> AsyncIterator[WorkerServer]:
    """A co-located worker."""
    async with worker(checkpoint) as server:
        yield server
