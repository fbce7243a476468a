"""A prefill and a decode worker on one GPU under load: tokens are the co-located engine's, also with one worker killed.

The pair on CPUs, which is slow to start, shows that the test works where there is no GPU.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvrelay.client import Client
from support.checkpoints import make_checkpoint
from support.processes import ProcessCluster, process_cluster, wait_until

OUT = 24
REQUESTS = 24
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")],
    ),
]


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [rng.choices(range(4, 300), k=rng.randrange(1, 250)) for _ in range(REQUESTS)]


def complete(cluster: ProcessCluster, prompt: list[int]) -> list[int]:
    with Client(cluster.router) as client:
        answer = client.complete(prompt, max_tokens=OUT, temperature=0, ignore_eos=True, timeout=120)
    return list(answer.token_ids)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama")


def options(device: str) -> dict[str, object]:
    # Equal tokens in steps of any size need float32: in 16 bits, two nearly equal logits may change places.
    engine = {
        "device": device,
        "kv_memory_bytes": 16 * 2**20,
        "max_batch_tokens": 128,
        "max_sequences": 16,
        "threads": 1,
    }
    return {"dtype": "float32", "engine": engine}


@pytest.fixture(scope="module")
def expected(device: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of one co-located worker, one prompt at a time."""
    folder = tmp_path_factory.mktemp("colocated")
    with process_cluster(folder, model, prefill=0, decode=0, colocated=1, worker=options(device)) as cluster:
        return [complete(cluster, prompt) for prompt in prompts()]


@pytest.fixture
def cluster(device: str, model: Path, tmp_path: Path) -> Iterator[ProcessCluster]:
    worker = options(device)
    with process_cluster(tmp_path / "pair", model, decode=2, worker=worker) as cluster:
        yield cluster


@pytest.mark.timeout(400)
def test_tokens_under_load_are_the_co_located_engines_and_nothing_leaks(
    cluster: ProcessCluster, expected: list[list[int]]
) -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in range(2):
            assert list(pool.map(lambda prompt: complete(cluster, prompt), prompts())) == expected
    cluster.wait_idle(20)


@pytest.mark.timeout(400)
def test_a_decode_worker_killed_under_load_costs_no_token(cluster: ProcessCluster, expected: list[list[int]]) -> None:
    done: list[int] = []

    def ask(number: int) -> list[int]:
        tokens = complete(cluster, prompts()[number])
        done.append(number)
        return tokens

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(ask, number) for number in range(REQUESTS)]
        wait_until(lambda: len(done) >= 4, "some requests are done", 120)
        cluster.processes["decode-0"].popen.kill()
        assert [each.result(150) for each in running] == expected
    cluster.wait_idle(20, but=["decode-0"])
