"""A request end to end, router -> prefill -> link -> decode in separate processes, against transformers."""

import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from kvrelay.client import Client, Completion
from support.checkpoints import ARCHITECTURES, WITH_EXPERTS, make_checkpoint
from support.processes import PATIENCE, ProcessCluster, process_cluster, wait_until
from support.wrong_costs import COSTS, MODULE, TURNS

BLOCK = 16
CHUNK = 64
OUT = 20
ENDLESS = 12_000
"""Tokens that take seconds on a fast machine, too. A worker reports what it has every half a second."""
# One below, at and above the borders of blocks and of chunks, and several chunks long.
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 215)

ONCE = ("mistral",)
"""Architectures in `make test`: one with a window; `test_recovery.py` has one without."""


@dataclass
class Road:
    """A running pair and the same model in transformers."""

    cluster: ProcessCluster
    oracle: PreTrainedModel
    vocab_size: int
    kv_bytes_per_token: int
    """2 x layers x kv_heads x head_dim x dtype."""

    def transfer_bytes(self, tokens: int, have: int = 0) -> int:
        """KV bytes that a prompt's hand-off takes: all that the decode worker doesn't have; of layers with a window,
        from the block on whose tokens the next token sees."""
        config = self.oracle.config
        window = getattr(config, "sliding_window", None)
        usual = "sliding_attention" if window else "full_attention"
        kinds = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
        seen = {"full_attention": have}
        if window:
            seen["sliding_attention"] = max(have, max(0, tokens - window + 1) // BLOCK * BLOCK)
        return sum(tokens - seen[kind] for kind in kinds) * self.kv_bytes_per_token // len(kinds)

    def prompt(self, length: int, seed: int) -> list[int]:
        return random.Random(f"{length} {seed}").choices(range(self.vocab_size), k=length)

    def expected(self, prompt: list[int], count: int) -> list[int]:
        greedy = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            # Without a mask, transformers takes every pad token in the prompt for padding.
            whole = self.oracle.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
            return whole[0, len(prompt) :].tolist()

    def complete(self, prompt: list[int], count: int = OUT) -> Completion:
        with Client(self.cluster.router) as client:
            return client.complete(prompt, max_tokens=count, temperature=0, ignore_eos=True, timeout=60)


@contextmanager
def road_of(folder: Path, architecture: str, **cluster: Any) -> Iterator[Road]:
    """A cluster of such a model, with these options of `process_cluster`."""
    checkpoint = make_checkpoint(folder / "model", architecture, max_position_embeddings=2**14)
    oracle = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    oracle.generation_config.eos_token_id = None  # a None that `generate` is given means this one
    config = oracle.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    engine = {"block_size": BLOCK, "max_batch_tokens": CHUNK, "kv_memory_bytes": 24 * 2**20, "threads": 1}
    cluster = {"worker": {"engine": engine}, "supervisor": PATIENCE, **cluster}
    with process_cluster(folder / "cluster", checkpoint, **cluster) as running:
        yield Road(
            running,
            oracle,
            config.vocab_size,
            kv_bytes_per_token=2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4,
        )


@pytest.fixture(
    scope="module",
    params=[
        name if name in ONCE else pytest.param(name, marks=pytest.mark.more) for name in (*ARCHITECTURES, *WITH_EXPERTS)
    ],
)
def road(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    with road_of(tmp_path_factory.mktemp(request.param), request.param) as found:
        yield found


def test_greedy_tokens_equal_transformers(road: Road) -> None:
    for length in LENGTHS:
        prompt = road.prompt(length, seed=0)
        completion = road.complete(prompt)
        assert list(completion.token_ids) == road.expected(prompt, OUT), f"prompt of {length} tokens"
        assert completion.finish_reason == "length"
        assert completion.usage.prompt_tokens == length
        assert completion.usage.completion_tokens == OUT
    road.cluster.wait_idle()


def test_sixteen_concurrent_mixed_requests(road: Road) -> None:
    shared = road.prompt(3 * BLOCK, seed=1)
    prompts = [road.prompt(length, seed=2) for length in (3, 17, 40, 64, 65, 90, 130, 200)]
    prompts += [shared + road.prompt(length, seed=3) for length in (1, 5, 16, 31, 32, 50, 64, 100)]
    counts = [1, 2, 5, 11, OUT, 7, 30, 3] * 2
    with ThreadPoolExecutor(len(prompts)) as pool:
        completions = list(pool.map(road.complete, prompts, counts))
    for prompt, count, completion in zip(prompts, counts, completions, strict=True):
        assert list(completion.token_ids) == road.expected(prompt, count)
    road.cluster.wait_idle()


def test_prefix_cache_hits_change_no_token(road: Road) -> None:
    prompt = road.prompt(5 * BLOCK + 3, seed=4)
    first = road.complete(prompt)
    again = road.complete(prompt)
    longer = road.complete(prompt + road.prompt(20, seed=5))
    assert first.usage.cached_tokens == 0
    # The logits behind the last token are always computed.
    assert again.usage.cached_tokens == len(prompt) - 1
    assert longer.usage.cached_tokens == len(prompt)
    assert first.token_ids == again.token_ids
    assert list(first.token_ids) == road.expected(prompt, OUT)
    assert list(longer.token_ids) == road.expected(prompt + road.prompt(20, seed=5), OUT)
    # The decode worker keeps finished blocks as well: of them only the last, partial one crosses the link again.
    assert again.timeline.transfer_bytes == road.transfer_bytes(len(prompt), have=5 * BLOCK)


def test_the_kv_crosses_the_link_and_decode_never_computes_the_prompt(road: Road) -> None:
    for length in (1, BLOCK, 3 * CHUNK + 5):
        prompt = road.prompt(length, seed=6)
        road.cluster.wait_idle()
        before = {name: road.cluster.load_now(name).computed_tokens for name in ("prefill-0", "decode-0")}
        completion = road.complete(prompt)
        assert completion.timeline.transfer_bytes == road.transfer_bytes(length)
        assert completion.timeline.prefill_worker == "prefill-0"
        assert completion.timeline.decode_worker == "decode-0"
        computed = {name: road.cluster.load_now(name).computed_tokens - before[name] for name in before}
        # Token 0 is prefill's; each further one takes decode one step, the last one none.
        assert computed == {"prefill-0": length, "decode-0": OUT - 1}


READER = f"""
import sys
from kvrelay.client import Client

with Client(sys.argv[1]) as client:
    for number, chunk in enumerate(client.generate([5] * 100, max_tokens={ENDLESS}, temperature=0, ignore_eos=True)):
        if number == 3:
            print("streaming", flush=True)
"""


def test_a_killed_client_frees_its_blocks(road: Road) -> None:
    before = road.cluster.load_now("decode-0").computed_tokens
    client = subprocess.Popen([sys.executable, "-c", READER, road.cluster.router], stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline() == "streaming\n"
        wait_until(lambda: road.cluster.member("decode-0").load.blocks.held, "decode at work", seconds=30)
    finally:
        client.kill()
        client.communicate(timeout=10)
    road.cluster.wait_idle(seconds=60)
    assert road.cluster.load_now("decode-0").computed_tokens - before < ENDLESS - 1, "it has not run to its end"


def by_cost(costs: float) -> dict[str, Any]:
    """A cluster whose placement is by these costs of `support.wrong_costs`."""
    modules = dict.fromkeys(("prefill", "decode"), MODULE)
    router = {"placement": "predicted"}
    return {"prefill": 2, "decode": 2, "modules": modules, "variables": {COSTS: str(costs)}, "router": router}


def test_the_next_turn_extends_the_answer_where_it_is(tmp_path: Path) -> None:
    with road_of(tmp_path, "llama", **by_cost(TURNS)) as road:
        text = road.prompt(215, seed=9)
        first = road.complete(text, 90)
        assert first.timeline.way == "pair"
        for number in range(3):
            text += [*first.token_ids, *road.prompt(20, seed=number)]
            second = road.complete(text, 90)
            assert list(second.token_ids) == road.expected(text, 90)
            assert (second.timeline.way, second.timeline.decode_worker) == ("in place", first.timeline.decode_worker)
            # The last token of an answer has no KV.
            assert second.usage.cached_tokens == len(text) - 20 - 1
            first = second
        road.cluster.wait_idle()


@pytest.mark.more
def test_with_costs_drawn_at_random_every_token_is_still_equal(tmp_path: Path) -> None:
    with road_of(tmp_path, "llama", **by_cost(1.0)) as road, ThreadPoolExecutor(8) as pool:
        prompts = [road.prompt(length, seed=number) for number in range(4) for length in LENGTHS]
        ways = set()
        for _ in range(2):  # the second turns after the first ones
            done = list(pool.map(road.complete, prompts))
            for prompt, completion in zip(prompts, done, strict=True):
                assert list(completion.token_ids) == road.expected(prompt, OUT)
                assert completion.timeline.retries == 0
            ways |= {completion.timeline.way for completion in done}
            prompts = [
                [*prompt, *completion.token_ids, *road.prompt(9, seed=number)]
                for number, (prompt, completion) in enumerate(zip(prompts, done, strict=True))
            ]
        assert ways == {"pair", "in place"}
        road.cluster.wait_idle()
