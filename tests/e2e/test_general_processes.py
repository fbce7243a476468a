"""Models that transformers' code runs, in a cluster of processes; `tests/engine/general` has more, in one."""

import itertools
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from kvrelay.client import Client
from kvrelay.client.messages import completion
from support.general import greedy
from support.processes import process_cluster, wait_until
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
STOPPED = "decode.after_commit,attempt=1:stop"
KILLS, LONG = 60, 96
"""Kills, and tokens of each completion that is killed: less than a prompt has."""


@pytest.mark.more
@pytest.mark.parametrize("name", ["BambaForCausalLM", "DeepseekV32ForCausalLM"])
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
        (killed,) = wait_until(
            lambda: [name for name, process in cluster.workers.items() if process.popen.poll() is not None],
            "the process of a worker has ended",
        )
        again = {one: ask(prompt) for one, prompt in PROMPTS.items()}
        assert {one: list(answer.token_ids) for one, answer in again.items()} == expected
        assert again["three"].usage.cached_tokens >= ROLES["prefill"]["engine"]["block_size"]
        cluster.wait_idle(but=[killed])


def stopped(pid: int) -> bool:
    """Whether a process has got SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hybrid_goes_on_from_its_last_snapshot_through_sixty_kills_in_mid_stream(tmp_path: Path) -> None:
    """A decode worker stops behind each first hand-off, which shows whom to kill some tokens later. Prefill then
    computes what was generated, and of the prompt at most what is behind the last border of blocks before its end,
    where it has a snapshot."""
    name, size, draw = "BambaForCausalLM", ROLES["prefill"]["engine"]["block_size"], random.Random(0)
    folder = save(classes()[name], tmp_path / "model")
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    model = tiny_model(classes()[name])
    worker = {"transfer": {"transport": "auto"}}
    variables = {"KVRELAY_FAILPOINTS": STOPPED}
    with (
        process_cluster(tmp_path, folder, decode=2, worker=worker, roles=ROLES, variables=variables) as cluster,
        Client(cluster.router, timeout=60) as client,
    ):
        decodes = [name for name in cluster.workers if name.startswith("decode")]
        computed = cluster.load_now("prefill-0").computed_tokens
        for _ in range(KILLS):
            prompt = [draw.randrange(3, 250) for _ in range(draw.randrange(LONG + size, 150))]
            stream = client.generate(prompt, max_tokens=LONG, temperature=0, ignore_eos=True)
            (killed,) = wait_until(lambda: [name for name in decodes if stopped(cluster.processes[name].pid)], "stops")
            os.kill(cluster.processes[killed].pid, signal.SIGCONT)
            chunks = list(itertools.islice(stream, draw.randrange(1, LONG // 3)))
            os.kill(cluster.processes[killed].pid, signal.SIGKILL)
            answer = completion([*chunks, *stream])
            assert list(answer.token_ids) == greedy(model, prompt, LONG)[0]
            assert answer.timeline.retries == 1
            cluster.wait_idle(but=[killed])
            cluster.replace(killed)
            behind = len(prompt) - (len(prompt) - 1) // size * size
            before, computed = computed, cluster.load_now("prefill-0").computed_tokens
            assert len(prompt) < computed - before < len(prompt) + behind + LONG
