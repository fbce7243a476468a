"""One pair on a small random Llama, shared by the tests that don't break it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.checkpoints import make_checkpoint
from support.processes import ProcessCluster, process_cluster

ENGINE = {"max_batch_tokens": 64, "kv_memory_bytes": 16 * 2**20, "threads": 1, "block_size": 16}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama")


@pytest.fixture(scope="session")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    folder, router = tmp_path_factory.mktemp("pair"), {"http_port": 0}
    with process_cluster(folder, checkpoint, worker={"engine": ENGINE}, router=router) as cluster:
        yield cluster
