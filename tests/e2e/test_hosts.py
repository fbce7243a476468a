"""Workers whose ranks are on several hosts: agents on this machine, whose ranks share no memory with those of others.

Their tokens are those of an engine in one process, also after a loss of rank 0.
"""

import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvrelay.client import Client
from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.request import Request, SamplingParams
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.forks import left_of
from support.processes import ProcessCluster, process_cluster, wait_until
from support.serving import token_reports

SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "hidden_size": 64, "num_hidden_layers": 3}
ENGINE: dict[str, Any] = {"block_size": 16, "max_batch_tokens": 64, "kv_memory_bytes": 4 * 2**20, "threads": 1}
LENGTHS = (1, 33, 150)
OUT = 12
ENDED_SECONDS = 4.0
"""Longest time from a loss until no rank is left on any host."""
TENSOR = {"tensor_parallel": 2, "hosts": 2}
STAGES = {"pipeline_parallel": 2, "hosts": 2}
SHAPES: dict[str, dict[str, dict[str, int]]] = {
    "heads over hosts": {"prefill": {}, "decode": TENSOR},
    "a stage on each host": {"prefill": STAGES, "decode": TENSOR | STAGES},
}
"""Degrees of both workers."""

pytestmark = pytest.mark.more


class Scene:
    """A prefill worker, a decode worker over two hosts, and an engine in this process."""

    def __init__(self, cluster: ProcessCluster, engine: Engine) -> None:
        self.cluster = cluster
        self._engine = engine

    def check(self, name: str) -> None:
        """Tokens are those of the engine; prompts follow from the name."""
        dice = random.Random(name)
        prompts = [dice.choices(range(2, VOCAB_SIZE), k=length) for length in LENGTHS]
        with Client(self.cluster.router) as client, ThreadPoolExecutor(len(prompts)) as pool:

            def complete(prompt: list[int]) -> tuple[int, ...]:
                done = client.complete(prompt, max_tokens=OUT, temperature=0, ignore_eos=True, timeout=60)
                return tuple(done.token_ids)

            found = list(pool.map(complete, prompts))
        sampling = SamplingParams(temperature=0.0, max_tokens=OUT)
        requests = [
            Request(f"{name} {number}", 1, tuple(prompt), len(prompt), sampling)
            for number, prompt in enumerate(prompts)
        ]
        expected = [tuple(report.token for report in each) for each in token_reports(self._engine, requests).values()]
        assert found == expected
        self.cluster.wait_idle()


@pytest.fixture(scope="module", params=SHAPES)
def it(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder: Path = tmp_path_factory.mktemp("hosts")
    make_checkpoint(folder / "model", "llama", **SHAPE)
    roles = {role: {"engine": ENGINE | degrees} for role, degrees in SHAPES[request.param].items()}
    engine = build_engine(folder / "model", "float32", EngineConfig(**ENGINE))[0]
    with process_cluster(folder / "cluster", folder / "model", roles=roles) as cluster:
        yield Scene(cluster, engine)


def test_ranks_of_two_hosts_answer_as_one_process_does(it: Scene) -> None:
    it.check("all well")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_ranks_of_both_hosts_end_with_rank_0_and_the_next_ones_answer_alike(
    it: Scene, number: signal.Signals
) -> None:
    """Losses of other ranks and of the agent: `tests/faults/test_rank_faults.py`."""
    process, (agent,) = it.cluster.processes["decode-0"], it.cluster.agents["decode-0"]
    os.kill(process.pid, number)
    wait_until(
        lambda: not left_of(process.pid) and not left_of(agent.pid),
        lambda: f"left: {left_of(process.pid)}, {left_of(agent.pid)}",
        ENDED_SECONDS,
    )
    for each in (process, agent):  # a frozen one is still there
        each.popen.kill()
    it.cluster.replace("decode-0")
    it.check(f"after {number.name}")
