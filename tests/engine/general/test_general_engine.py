"""Engines that transformers' code runs: the tokens of its own forward pass, whatever shares a step."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig, ModelPath, SpeculationConfig
from kvrelay.engine.request import Request, SamplingParams
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.general import greedy
from support.serving import run
from support.tiny_models import VOCAB_SIZE as SMALL_VOCAB
from support.tiny_models import save

PROMPTS = ([5, 9, 7, 11, 300], list(range(3, 26)), [(7 * n) % 311 for n in range(45)])
COMPLETION = 12
GREEDY = {"temperature": 0.0, "max_tokens": COMPLETION}


def expected(folder: Path, prompts: Sequence[list[int]] = PROMPTS) -> dict[str, list[int]]:
    """Greedy tokens by whole forward passes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return {str(number): greedy(model, prompt, COMPLETION)[0] for number, prompt in enumerate(prompts)}


def requests(prompts: Sequence[list[int]] = PROMPTS, **sampling: object) -> list[Request]:
    return [
        Request(str(number), 1, tuple(prompt), len(prompt), SamplingParams(**{**GREEDY, **sampling}))
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("kv_memory_bytes", [2**18, 2**22], ids=["little memory", "enough"])
@pytest.mark.parametrize("method", ["off", "ngram"])
@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text", "cohere2"])
@pytest.mark.some(2)
def test_the_fast_path_frees_what_falls_out_of_a_window(
    architecture: str, method: Literal["off", "ngram"], kv_memory_bytes: int, tmp_path: Path
) -> None:
    """Windows of 11 tokens: each sequence gives up blocks, with guesses, preemptions and prefixes that are cached."""
    folder = make_checkpoint(tmp_path, architecture, sliding_window=11)
    options = EngineConfig(
        kv_memory_bytes=kv_memory_bytes,
        threads=1,
        max_batch_tokens=16,
        block_size=8,
        device="cpu",
        speculation=SpeculationConfig(method=method),
    )
    engine, runner = build_engine(folder, "float32", options)
    assert [group.window for group in runner.cache_layout.side_groups] == [11]
    tokens = expected(folder)
    for _ in range(2):
        assert run(engine, requests()) == tokens
        engine.scheduler.check_integrity(idle=True)
        (side,) = engine.scheduler.prefix.sides
        assert not side.pool.held
        assert not side.live


@pytest.mark.parametrize(
    "model_type",
    ["gemma3_text", "mamba2", *(pytest.param(name, marks=pytest.mark.more) for name in ("qwen3_next", "deepseek_v3"))],
)
@pytest.mark.some(1)
def test_the_next_turn_goes_on_where_the_answer_ended(model_type: str, tmp_path: Path) -> None:
    """With full layers and windows of 11 tokens, states, latents: no token is computed a second time."""
    folder = save(model_type, tmp_path)
    options = EngineConfig(kv_memory_bytes=2**24, threads=1, max_batch_tokens=32, block_size=8, device="cpu")
    engine, _ = build_engine(folder, "float32", options)
    prompts = [[(7 * n) % (SMALL_VOCAB - 3) + 3 for n in range(length)] for length in (5, 23, 45)]
    for turn in range(3):
        before, found = engine.computed_tokens, run(engine, requests(prompts))
        assert found == expected(folder, prompts)
        again = len(prompts) * (3 + COMPLETION - 1) if turn else sum(map(len, prompts)) + 3 * (COMPLETION - 1)
        assert engine.computed_tokens - before == again
        prompts = [[*prompt, *found[str(number)], 5, 4 + turn] for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("path", "memory"),
    [("fast", 2**22), *(pytest.param("general", memory, marks=pytest.mark.more) for memory in (0, 2**22))],
    ids=["fast", "general, a share of the memory", "general"],
)
def test_a_draft_model_that_is_the_model_is_nearly_always_right(path: ModelPath, memory: int, tmp_path: Path) -> None:
    """Also where the guesses are behind a window of 11."""
    folder = make_checkpoint(tmp_path, "mistral", sliding_window=11)
    options = EngineConfig(
        model_path=path,
        kv_memory_bytes=memory,
        memory_share=0.01,
        threads=1,
        max_batch_tokens=16,
        device="cpu",
        speculation=SpeculationConfig("draft", str(folder), max_tokens=3, adaptive=False),
    )
    engine, _ = build_engine(folder, "float32", options)
    assert run(engine, requests()) == expected(folder)
    counts = engine.scheduler.speculation.counts
    assert counts.accepted > 0.9 * counts.proposed > 0
    engine.scheduler.check_integrity(idle=True)


def test_a_draft_of_another_architecture_changes_no_token(tmp_path: Path) -> None:
    """Wrong guesses of a model with latents are taken back; one with states is refused, because they can't be."""
    folder, tokens = make_checkpoint(tmp_path / "target", "llama"), ["deepseek_v3", "mamba"]
    latents, states = (save(name, tmp_path / name, vocab_size=VOCAB_SIZE) for name in tokens)
    options = EngineConfig(kv_memory_bytes=2**22, threads=1, max_batch_tokens=16, device="cpu")
    draft = SpeculationConfig("draft", str(latents), max_tokens=3, adaptive=False)
    engine, _ = build_engine(folder, "float32", replace(options, speculation=draft))
    assert run(engine, requests()) == expected(folder)
    counts = engine.scheduler.speculation.counts
    assert counts.proposed > counts.accepted
    with pytest.raises(ValueError, match=r"draft_model is mamba; allowed: .* without states, .* MambaForCausalLM"):
        build_engine(folder, "float32", replace(options, speculation=replace(draft, draft_model=str(states))))


@pytest.mark.parametrize(
    "model_type",
    ["mamba2", *(pytest.param(name, marks=pytest.mark.more) for name in ("qwen3_next", "falcon_h1", "lfm2", "rwkv"))],
)
@pytest.mark.parametrize("method", ["ngram", pytest.param("draft", marks=pytest.mark.more)])
def test_a_state_goes_back_to_the_last_right_guess(
    model_type: str, method: Literal["ngram", "draft"], tmp_path: Path
) -> None:
    """Prompts that repeat themselves have guesses, some of which are right; behind one with most tokens there are
    some. Snapshots of prefixes are made beside."""
    prompts = [[(n % period) * 7 % (SMALL_VOCAB - 3) + 3 for n in range(40)] for period in (3, 5)]
    prompts.append(random.Random(0).sample(range(3, SMALL_VOCAB), 230))
    folder, draft = save(model_type, tmp_path / "target"), save("llama", tmp_path / "draft")
    options = EngineConfig(
        kv_memory_bytes=2**24,
        threads=1,
        max_batch_tokens=32,
        max_sequences=12,
        block_size=8,
        device="cpu",
        speculation=SpeculationConfig(
            method, str(draft) if method == "draft" else "", max_tokens=3, shortest_match=1, adaptive=False
        ),
    )
    engine, runner = build_engine(folder, "float32", options)
    assert runner.spec.way.startswith("flat, transformers ")
    tokens = expected(folder, prompts)
    for _ in range(2):
        assert run(engine, requests(prompts)) == tokens
        engine.scheduler.check_integrity(idle=True)
    counts = engine.scheduler.speculation.counts
    assert counts.proposed > counts.accepted
