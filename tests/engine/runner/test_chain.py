"""A draft model's chain, which is one native call, has the tokens of single steps whose parts are called one by one."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.runner.cpu import CpuRunner, build_cpu_runner
from kvrelay.engine.sampling.sampler import draws_of, sample

OPTIONS = EngineConfig(kv_memory_bytes=8 * 2**20, threads=1, max_sequences=64)
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=4),
    SamplingParams(seed=5, temperature=1.5, top_k=9),
    SamplingParams(seed=2**64 - 1, top_p=0.8, min_p=0.01),
)
WIDTH = 12
"""Blocks of a row."""


def plan_of(lengths: list[int], starts: list[int] | None = None, sample: list[bool] | None = None) -> StepPlan:
    rows = len(lengths)
    return StepPlan(
        0,
        tuple(range(rows)),
        (np.arange(sum(lengths)) * 7 % 200).astype(np.int32),
        np.array(starts or [0] * rows, np.int32),
        np.array(lengths, np.int32),
        np.random.default_rng(rows).permutation(rows * WIDTH).astype(np.int32).reshape(rows, WIDTH),
        np.array(sample or [True] * rows),
        tuple([SAMPLINGS[row % len(SAMPLINGS)] for row in range(rows)]),
        np.zeros(rows, np.int32),
    )


def by_steps(runner: CpuRunner, plan: StepPlan, count: int) -> list[list[int]]:
    """Layers, head and torch's sampler, one after the other; of the rows that sample."""
    rows = np.flatnonzero(plan.sample)
    found: list[list[int]] = [[] for _ in rows]
    for _ in range(count):
        with torch.inference_mode():
            hidden = runner.forward(plan)
            logits = runner.model.logits(hidden[torch.from_numpy(plan.lengths.cumsum()[rows] - 1)])
            tokens, nonfinite = sample(logits, draws_of(plan, rows))
        assert nonfinite == []
        for row, token in zip(found, tokens, strict=True):
            row.append(token)
        plan = dataclasses.replace(
            plan,
            tokens=np.array(tokens, np.int32),
            starts=plan.starts + plan.lengths,
            lengths=np.ones(plan.num_rows, np.int32),
        )
    return found


@pytest.mark.parametrize(
    ("architecture", "options", "config"),
    [
        ("llama", {}, {}),
        ("llama", {"threads": 2}, {"tie_word_embeddings": True}),
        ("qwen3", {"kv_dtype": "int8"}, {}),
        ("qwen2", {"quantization": "int8", "threads": 2}, {}),
        ("llama", {"quantization": "int4", "kv_dtype": "int8"}, {}),
        ("llama", {"quantization": "w8a8"}, {}),
        ("mistral", {"block_size": 8}, {"sliding_window": 11}),
        ("cohere", {}, {}),
        ("mixtral", {"threads": 2}, {}),
        ("glm4_moe", {}, {}),
    ],
    ids=[
        *["bf16", "tied, two threads", "8-bit KV, norms", "int8, two threads", "int4, 8-bit KV", "w8a8", "window"],
        *["an MLP beside attention", "experts, two threads", "a dense layer and experts"],
    ],
)
@pytest.mark.some(3)
def test_a_chain_has_the_tokens_of_its_steps(
    model_of: Callable[..., Path], architecture: str, options: dict[str, Any], config: dict[str, Any]
) -> None:
    """The chains begin behind parts of prompts, whose KV is not there yet, and behind single tokens; rows get more."""
    folder = model_of(architecture, dtype="bfloat16", **config)
    runner = build_cpu_runner(folder, "auto", dataclasses.replace(OPTIONS, **options), slides=False)
    for lengths in ([1], [3], [1, 1], [5, 33, 16, 1], [1] * 9, [70, 2, 2, 31]):
        plan = plan_of(lengths)
        for count in (1, 12):
            chains = runner.chain(plan, count)
            assert chains == by_steps(runner, plan, count)
            assert [len(chain) for chain in chains] == [count] * len(lengths)


def test_a_step_has_the_same_tokens_in_one_call(model_of: Callable[..., Path]) -> None:
    """The step has rows that don't sample between rows that do."""
    runner = build_cpu_runner(model_of("llama"), "auto", OPTIONS)
    sampled = [False, True, False, True, True]
    for lengths in ([5, 33, 16, 1, 1], [1] * 5):
        plan = plan_of(lengths, sample=sampled)
        out = runner.launch(plan).result()
        assert [[token] for token in out.tokens if token is not None] == by_steps(runner, plan, 1)
        assert [token is not None for token in out.tokens] == sampled


def test_the_last_layer_computes_only_what_a_token_is_chosen_behind(model_of: Callable[..., Path]) -> None:
    runner = build_cpu_runner(model_of("mixtral"), "auto", OPTIONS)
    for sampled in ([False, True, False], [True] * 3, [False] * 3):
        before = runner.expert_loads.totals.sum(1)
        runner.launch(plan_of([5, 33, 1], sample=sampled)).result()
        *others, last = (runner.expert_loads.totals.sum(1) - before).tolist()
        assert others == [2 * 39] * len(others)
        assert last == 2 * sum(sampled)


@pytest.mark.parametrize("native", [True, False])
def test_a_chain_ends_where_logits_are_not_finite(
    model_of: Callable[..., Path], native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain ends behind the first token that is not 0 here: the embeddings of all others are NaN."""
    if not native:
        monkeypatch.setattr("kvrelay.engine.runner.threads.library", lambda: None)
    folder = model_of("llama", vocab_size=300, tie_word_embeddings=False)
    runner = build_cpu_runner(folder, "auto", OPTIONS)
    plan = dataclasses.replace(plan_of([4, 3]), tokens=np.zeros(7, np.int32))
    whole = runner.chain(plan, 12)
    embedding = runner.model.embedding
    used = next(step for step, pair in enumerate(zip(*whole, strict=True)) if any(pair))
    with torch.inference_mode():
        embedding[1:] = torch.nan
    assert runner.chain(plan, 12) == [chain[: used + 1] for chain in whole]


@pytest.mark.parametrize(("threads", "calls"), [(2, 100), (3, 30), pytest.param(2, 300, marks=pytest.mark.more)])
def test_threads_agree_on_the_last_pass_of_each_call(model_of: Callable[..., Path], threads: int, calls: int) -> None:
    """The next call follows at once, while a thread may still be leaving the one before."""
    tiny = model_of("llama", dtype="bfloat16")
    alone, together = (
        build_cpu_runner(tiny, "auto", dataclasses.replace(OPTIONS, threads=count).on("cpu")) for count in (1, threads)
    )
    plan = plan_of([1, 1])
    expected = [alone.chain(plan, count) for count in (1, 2, 3)]
    for call in range(calls):
        assert together.chain(plan, call % 3 + 1) == expected[call % 3]
        assert together.launch(plan).result().tokens == tuple([tokens[0] for tokens in expected[0]])
