"""Logits equal those of transformers, however a sequence is cut into chunks and batched with others."""

import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvrelay.engine.attention.base import AttentionInputs
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.models.fast.decoder import Decoder
from kvrelay.engine.models.fast.native import NativeDecoder
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.runner import threads
from kvrelay.engine.runner.cpu import CpuRunner, build_cpu_runner
from kvrelay.engine.runner.gpu import build_gpu_runner
from support.checkpoints import FAMILIES, LLAMA3_ROPE, VOCAB_SIZE, WITH_EXPERTS
from support.paged import PagedSequence, PagedSequences, logits_by

BLOCK = 16
TILE = 64
"""Tokens of a prefill tile of the native kernels."""
TOLERANCE = 1e-4
LENGTH = 300
OPTIONS = EngineConfig(block_size=BLOCK, kv_memory_bytes=8 * 2**20, threads=1, max_context=1024)
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 8.0,
    "truncate": False,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*FAMILIES, *WITH_EXPERTS)},
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": PLAIN_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": LINEAR_ROPE, "num_key_value_heads": 4}),
    "llama-llama3-blend": ("llama", {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 0.1, "factor": 3.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "llama-dynamic": ("llama", {"rope_parameters": LINEAR_ROPE | {"rope_type": "dynamic"}}),
    "phi3-longrope-short": (
        "phi3",
        {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 1024, "sliding_window": 70},
    ),
    "phi3-longrope-long": ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64}),
    "smollm3-windows": ("smollm3", {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 40}),
    "starcoder2-no-biases": ("starcoder2", {"use_bias": False, "sliding_window": None, "intermediate_size": 100}),
    "cohere2-biases": ("cohere2", {"attention_bias": True, "logit_scale": 0.3}),
    "gemma3-linear-rope": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": PLAIN_ROPE}},
    ),
    "mistral-no-window": ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "mistral-window-past-a-tile": ("mistral", {"sliding_window": 150}),
    "qwen2-no-window": ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": False}),
    "qwen3-windows-and-biases": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 33, "max_window_layers": 2, "attention_bias": True},
    ),
}


class Case:
    """A runner and the logits that transformers gives for one long prompt, of which tests take beginnings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runner: CpuRunner = build_cpu_runner(folder, "float32", OPTIONS)
        assert isinstance(self.runner.model, NativeDecoder)
        self.prompts = [random.Random(seed).choices(range(VOCAB_SIZE), k=LENGTH) for seed in range(3)]
        # In float32, the oracle itself is wrong by up to 9e-5.
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
        # torch's grouped products refuse float64.
        oracle.config._experts_implementation = "eager"
        with torch.inference_mode():
            self.expected = [oracle(torch.tensor([prompt])).logits[0] for prompt in self.prompts]

    def check(self, logits: Tensor, prompt: int = 0) -> None:
        """The logits of a beginning of prompt number `prompt` are right."""
        torch.testing.assert_close(logits.double(), self.expected[prompt][: len(logits)], atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def case_of(model_of: Callable[..., Path]) -> Callable[[str], Case]:
    @cache
    def make(variant: str) -> Case:
        architecture, overrides = VARIANTS[variant]
        return Case(model_of(architecture, **overrides))

    return make


@pytest.fixture(params=VARIANTS)
def case(request: pytest.FixtureRequest, case_of: Callable[[str], Case]) -> Case:
    # Whatever was in the pool before must not show.
    case = case_of(request.param)
    for pool in case.runner.pools:
        pool.tensor.fill_(torch.nan)
    return case


LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, TILE - 1, TILE, TILE + 1, 2 * TILE + 1, LENGTH, LENGTH, LENGTH)
PACES = (1, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, TILE, 90, 2 * TILE + 2, LENGTH)
"""Tokens of a sequence in a step: single ones, chunks, and whole prompts."""


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.some(12, more=90)
def test_mixed_batches(case: Case, seed: int) -> None:
    """Sequences come and go, each at its own pace: decode rows, chunks and whole prompts in one step."""
    choose = random.Random(seed)
    sequences = PagedSequences(case.runner, seed)
    waiting = [(number % 3, length) for number, length in enumerate(LENGTHS)]
    choose.shuffle(waiting)
    running: list[tuple[int, PagedSequence, int]] = []
    done: list[tuple[int, PagedSequence]] = []
    while waiting or running:
        for _ in range(min(len(waiting), choose.choice([0, 1, 3]))):
            prompt, length = waiting.pop()
            running.append((prompt, sequences.add(case.prompts[prompt][:length]), choose.choice(PACES)))
        choose.shuffle(running)
        work = [
            (sequence, min(sequence.left, choose.choice((pace, pace, pace, 1))))
            for _, sequence, pace in running
            if choose.random() < 0.8
        ]
        if work:
            sequences.compute(*work)
        done += [(prompt, sequence) for prompt, sequence, _ in running if not sequence.left]
        running = [entry for entry in running if entry[1].left]
    assert len(done) == len(LENGTHS)
    for prompt, sequence in done:
        case.check(torch.cat(sequence.logits), prompt)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some(3)
def test_without_the_native_kernels(
    family: str, case_of: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(family)
    monkeypatch.setattr(threads, "library", lambda: None)
    runner = build_cpu_runner(case.folder, "float32", OPTIONS)
    assert isinstance(runner.model, Decoder)
    case.check(logits_by(runner, case.prompts[0], 100, 1, 1, 130, 68))


class OnGpu:
    """A GPU's model as `PagedSequences` takes it."""

    def __init__(self, folder: Path) -> None:
        self.runner = build_gpu_runner(folder, "float32", OPTIONS, device=DEVICE)
        self.pools, self.layout, self.model = self.runner.pools, self.runner.layout, self
        self.cache_layout = self.runner.cache_layout

    def forward(self, plan: StepPlan) -> Tensor:
        """The logits: `logits` has nothing left to do."""
        device, attention = self.runner.device, self.runner.attention
        windows = [group.window for group in self.cache_layout.side_groups]
        inputs = AttentionInputs.from_plan(plan, BLOCK, device, windows)
        attention.plan(inputs)
        tokens = torch.from_numpy(plan.tokens.astype(np.int64)).to(device)
        return self.runner.model.forward_logits(tokens, inputs.positions, attention).cpu()

    def logits(self, logits: Tensor) -> Tensor:
        return logits


@pytest.mark.parametrize(
    "family",
    [
        # A third of them in `make test-all`: kernels and runner are the same for all.
        pytest.param(family, marks=pytest.mark.slow if at % 6 else pytest.mark.more)
        for at, family in enumerate(FAMILIES)
    ],
)
def test_on_a_gpu(family: str, case_of: Callable[[str], Case]) -> None:
    case = case_of(family)
    case.check(logits_by(OnGpu(case.folder), case.prompts[0][:60], 41, 1, 17, 1))


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.some(3)
def test_bfloat16_is_close_to_float32(architecture: str, model_of: Callable[..., Path]) -> None:
    """bfloat16 carries 8 bits: logits agree to a few percent of their spread, in chunks and decode as well."""
    folder = model_of(architecture, dtype="bfloat16")
    case = Case(folder)
    runner = build_cpu_runner(folder, "auto", OPTIONS)
    assert runner.spec.dtype == "bfloat16"
    error = logits_by(runner, case.prompts[0], 100, 1, 1, 130, 1, 67) - case.expected[0]
    assert error.std() < 0.04 * case.expected[0].std()
