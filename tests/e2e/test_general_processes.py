"""Models that transformers' code runs, in a cluster of processes; `tests/engine/general` has more, in one."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from kvrelay.client import Client
from support.general import greedy
from support.processes import process_cluster
from support.tiny_models import classes, save, tiny_model
from support.tokenizers import byte_level_tokenizer

OUT = 24
PROMPTS = {"one": [5, 9, 7, 11, 200], "two": list(range(3, 26)), "three": [3 + (7 * n) % 251 for n in range(41)]}
ENGINE = {
    "model_path": "general",
    "device": "cpu",
    "threads": 1,
    "kv_memory_bytes": 24 * 2**20,
    "max_batch_tokens": 16,
    "max_sequences": 4,
}
ROLES = {kind: {"engine": {**ENGINE, "block_size": size}} for kind, size in (("prefill", 16), ("decode", 8))}
KILLED = "decode.after_commit,request=two,attempt=1:kill"


@pytest.mark.more
@pytest.mark.parametrize(
    "name",
    [
        "BambaForCausalLM",
        "DeepseekV32ForCausalLM",
        "Gemma2ForCausalLM",
        "MambaForCausalLM",
        "RoFormerForCausalLM",
        "RwkvForCausalLM",
    ],
)
def test_processes_yield_the_tokens_of_whole_passes_though_one_is_killed(name: str, tmp_path: Path) -> None:
    folder = save(classes()[name], tmp_path / "model")
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    model = tiny_model(classes()[name])
    expected = {one: greedy(model, prompt, OUT)[0] for one, prompt in PROMPTS.items()}
    worker = {"transfer": {"transport": "auto"}}
    variables = {"KVRELAY_FAILPOINTS": KILLED}
    with (
        process_cluster(tmp_path, folder, decode=2, worker=worker, roles=ROLES, variables=variables) as cluster,
        Client(cluster.router, timeout=60) as client,
        ThreadPoolExecutor(len(PROMPTS)) as pool,
    ):
        ask = partial(client.complete, max_tokens=OUT, temperature=0, ignore_eos=True)
        first = {one: pool.submit(ask, prompt, request_id=one) for one, prompt in PROMPTS.items()}
        assert {one: list(answer.result().token_ids) for one, answer in first.items()} == expected
        assert first["two"].result().timeline.retries == 1
        (killed,) = [name for name, process in cluster.workers.items() if process.popen.poll() is not None]
        again = {one: ask(prompt) for one, prompt in PROMPTS.items()}
        assert {one: list(answer.token_ids) for one, answer in again.items()} == expected
        assert again["three"].usage.cached_tokens >= ROLES["prefill"]["engine"]["block_size"]
        cluster.wait_idle(but=[killed])
