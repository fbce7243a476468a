"""Workers of several ranks, each rank in a process of its own, hand KV over and answer as one process does."""

from pathlib import Path

import pytest

from kvrelay.client import Client
from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.request import Request, SamplingParams
from support.checkpoints import make_checkpoint
from support.processes import process_cluster
from support.serving import run

ENGINE = {"max_batch_tokens": 32, "kv_memory_bytes": 4 * 2**20, "threads": 1, "block_size": 8}
PROMPTS = [[token * 7 % 300 for token in range(first, first + count)] for first, count in ((1, 150), (5, 3), (9, 41))]
OUT = 12


def expected_of(checkpoint: Path) -> dict[str, list[int]]:
    engine, _ = build_engine(checkpoint, "float32", EngineConfig(**ENGINE))
    sampling = SamplingParams(temperature=0.0, max_tokens=OUT)
    return run(engine, [Request(str(at), 0, tuple(each), len(each), sampling) for at, each in enumerate(PROMPTS)])


@pytest.mark.parametrize(
    ("prefill", "decode"), [((1, 2), (1, 1)), ((2, 2), (1, 2))], ids=["stages to one rank", "ranks of stages to stages"]
)
def test_a_pair_of_unequal_degrees_answers_as_one_process_does(
    tmp_path: Path, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=3)
    expected = expected_of(checkpoint)
    roles = {
        role: {"engine": {**ENGINE, "threads": 4, "tensor_parallel": tensor, "pipeline_parallel": pipeline}}
        for role, (tensor, pipeline) in {"prefill": prefill, "decode": decode}.items()
    }
    with (
        process_cluster(tmp_path, checkpoint, worker={"dtype": "float32"}, roles=roles) as cluster,
        Client(cluster.router, timeout=60) as client,
    ):
        for number, prompt in enumerate(PROMPTS):
            found = client.complete(prompt, max_tokens=OUT, temperature=0)
            assert list(found.token_ids) == expected[str(number)]
        cluster.wait_idle()
