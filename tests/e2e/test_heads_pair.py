"""Heads on a decode worker, behind a real hand-off: they check and keep as many guesses as on a co-located worker."""

from pathlib import Path

import pytest

from kvrelay.client import Client
from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig, SpeculationConfig
from kvrelay.engine.request import Request, SamplingParams
from support.checkpoints import COMMON, VOCAB_SIZE, make_checkpoint
from support.heads import eagle_config, eagle_tensors, medusa_tensors, write_eagle, write_medusa
from support.processes import process_cluster

OUT = 24
LENGTHS = (1, 17, 64, 120)
"""Tokens of the prompts. The longest is read in one go, so there are guesses from the first step on."""
ENGINE = {"block_size": 16, "max_batch_tokens": 64, "kv_memory_bytes": 8 * 2**20, "threads": 1}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_guesses_behind_a_hand_off_are_those_of_a_co_located_worker(tmp_path: Path, method: str) -> None:
    """The workers are processes here; `tests/engine/speculate/test_heads.py` compares the guesses token by token."""
    model = make_checkpoint(tmp_path / "model", "llama", dtype="float32", num_hidden_layers=8)
    hidden = COMMON["hidden_size"]
    tensors = medusa_tensors(3, 1, hidden, VOCAB_SIZE) if method == "medusa" else eagle_tensors(hidden, VOCAB_SIZE, 200)
    heads = tmp_path / "heads"
    if method == "medusa":
        write_medusa(heads, tensors)
    else:
        write_eagle(heads, tensors, eagle_config(tensors, VOCAB_SIZE))
    guesses = {"method": method, "draft_model": str(heads), "max_tokens": 3, "adaptive": False}
    options = EngineConfig(device="cpu", speculation=SpeculationConfig(**guesses), **ENGINE)  # type: ignore[arg-type]  # as in a file
    engine = build_engine(model, "float32", options)[0]
    roles = {"decode": {"engine": {**ENGINE, "speculation": guesses}}}
    with (
        process_cluster(tmp_path / "cluster", model, worker={"engine": ENGINE}, roles=roles) as cluster,
        Client(cluster.router) as client,
    ):
        for length in LENGTHS:
            prompt = [(11 * place + length) % VOCAB_SIZE for place in range(length)]
            greedy = SamplingParams(temperature=0.0, max_tokens=OUT)
            sequence = engine.scheduler.add(Request(f"{length}", 1, tuple(prompt), length, greedy))
            while engine.has_work:
                engine.step()
            done = client.complete(prompt, max_tokens=OUT, temperature=0, ignore_eos=True, timeout=60)
            assert list(done.token_ids) == sequence.tokens[length:]
            assert (done.timeline.proposed_tokens, done.timeline.accepted_tokens) == (
                sequence.proposed,
                sequence.accepted,
            )
            assert done.timeline.proposed_tokens > OUT
