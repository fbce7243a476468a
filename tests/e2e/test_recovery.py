"""Losing a worker costs time, not tokens; a co-located worker gives the tokens that a pair gives."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay.client import Client, Completion
from support.checkpoints import make_checkpoint
from support.processes import ProcessCluster, process_cluster, wait_until

PROMPT = [7, 11, 13, 17, 19, 23] * 20
ENGINE = {"engine": {"max_batch_tokens": 64, "kv_memory_bytes": 24 * 2**20, "threads": 1}}
# A second of work on a fast machine, too: a worker reports what it has every half a second.
SAMPLED = {"max_tokens": 8000, "temperature": 0.9, "top_p": 0.95, "seed": 4, "ignore_eos": True, "timeout": 60}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama", "llama", max_position_embeddings=2**14)


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Completion:
    """A co-located worker's completion of the prompt, which nothing has disturbed."""
    folder = tmp_path_factory.mktemp("colocated")
    with (
        process_cluster(folder, checkpoint, prefill=0, decode=0, colocated=1, worker=ENGINE) as cluster,
        Client(cluster.router) as client,
    ):
        completion = client.complete(PROMPT, **SAMPLED)
        assert completion.timeline.transfer_bytes == 0
        assert completion.timeline.prefill_worker == completion.timeline.decode_worker == "colocated-0"
        return completion


@pytest.fixture
def cluster(checkpoint: Path, tmp_path: Path) -> Iterator[ProcessCluster]:
    with process_cluster(tmp_path, checkpoint, prefill=1, decode=2, worker=ENGINE) as cluster:
        yield cluster


def test_a_killed_decode_worker_loses_no_token(cluster: ProcessCluster, undisturbed: Completion) -> None:
    with Client(cluster.router) as client:
        assert client.complete(PROMPT, **SAMPLED).token_ids == undisturbed.token_ids
        stream = client.generate(PROMPT, **SAMPLED)
        chunks = list(itertools.islice(stream, 20))
        names = ("decode-0", "decode-1")
        serving = wait_until(
            lambda: [name for name in names if cluster.member(name).load.requests.running], "one decodes", seconds=5
        )
        cluster.processes[serving[0]].popen.kill()
        cluster.processes.pop(serving[0]).popen.communicate(timeout=10)
        chunks += list(stream)
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == undisturbed.token_ids
        assert "".join(chunk.text for chunk in chunks) == undisturbed.text
        timeline = chunks[-1].timeline
        assert timeline is not None
        assert timeline.retries == 1
        assert timeline.decode_worker in {"decode-0", "decode-1"} - set(serving)
    cluster.wait_idle()
