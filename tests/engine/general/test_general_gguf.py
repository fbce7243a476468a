"""GGUF files of architectures that transformers' code runs: the original's numbers, and refusals that name a place."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from test_general_cluster import COMPLETION, PROMPTS, cluster
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvrelay.client.messages import Completion
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.models.choice import is_fast
from kvrelay.engine.models.general.reading import load_model, read_general_config
from kvrelay.engine.models.reading import hashes
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.runner.general import build_general_runner
from kvrelay.models import resolve
from kvrelay.models.gguf import folder
from support.general import greedy
from support.gguf_files import write_general_gguf

TOKENS = torch.tensor([[3, 5, 9, 100, 77, 54, 32, 88, 120, 311, 4, 8, 9, 22, 0, 7] * 3])
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
HEADS = {"num_key_value_heads": 2, "intermediate_size": 128}
Fields = Callable[[gguf.GGUFWriter], object]


ATTENTION = {"head_count": 4, "head_count_kv": 2, "feed_forward_length": 128, "rope_freq_base": 1e4}
WINDOW = {"key_length": 32, "sliding_window": 24}
PARTLY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma2": (
        "gemma2",
        {
            **HEADS,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 24,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
        ATTENTION
        | WINDOW
        | {"layer_norm_rms_eps": 1e-6, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    ),
    "starcoder2": (
        "starcoder2",
        {**HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, "norm_epsilon": 1e-5},
        ATTENTION | {"rope_freq_base": 5e4, "layer_norm_eps": 1e-5},
    ),
    "phi3": (
        "phi3",
        {**HEADS, "rope_parameters": PARTLY, "sliding_window": 24},
        ATTENTION | {"layer_norm_rms_eps": 1e-5, "rope_dimension_count": 8, "sliding_window": 24},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **HEADS,
            "num_hidden_layers": 6,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        ATTENTION
        | WINDOW
        | {
            "rope_freq_base": 5e4,
            "layer_norm_rms_eps": 1e-6,
            "rope_scaling_type": gguf.RopeScalingType.LINEAR,
            "rope_scaling_factor": 8.0,
        },
    ),
    "stablelm": (
        "stablelm",
        {**HEADS, "rope_parameters": PARTLY, "layer_norm_eps": 1e-5, "use_qkv_bias": True},
        ATTENTION | {"layer_norm_eps": 1e-5, "rope_dimension_count": 8},
    ),
    "nemotron": (
        "nemotron",
        {**HEADS, "norm_eps": 1e-5},
        ATTENTION | {"layer_norm_rms_eps": 1e-5, "layer_norm_eps": 1e-5, "rope_dimension_count": 8},
    ),
    "gpt2": ("gpt2", {}, {"head_count": 4, "feed_forward_length": 256, "layer_norm_eps": 1e-5}),
    "mamba": (
        "mamba",
        {"state_size": 8, "time_step_rank": 4},
        {
            "ssm_conv_kernel": 4,
            "ssm_inner_size": 128,
            "ssm_state_size": 8,
            "ssm_time_step_rank": 4,
            "layer_norm_rms_eps": 1e-5,
        },
    ),
}
"""Architectures as files name them, with the model type, fields of its config, and what the file has instead of them:
the values that are given to the methods `add_*` of a `GGUFWriter`."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (folder, hashes):
        monkeypatch.setattr(module, "user_cache", lambda: tmp_path / "cache")


def original(name: str) -> PreTrainedModel:
    """A model with random weights, norms and biases too."""
    kind, own, _ = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **own}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    made: PreTrainedModel = model.eval()
    return made


def write(name: str, path: Path, dtype: str = "F32", change: Fields = lambda writer: None) -> Path:
    def fields(writer: gguf.GGUFWriter) -> None:
        for field, value in MODELS[name][2].items():
            getattr(writer, f"add_{field}")(value)
        change(writer)

    return write_general_gguf(original(name), path, name, fields, lambda _: dtype)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.some(3)
def test_logits_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    made = resolve(str(write(name, tmp_path / "tiny.gguf")))
    config = read_general_config(made)
    assert not is_fast(made, "auto")
    assert (config.vocab_size, config.max_positions, config.eos_token_ids) == (320, 256, (1,))
    found = load_model(config, Checkpoint(made), torch.float32, "cpu")
    with torch.inference_mode():
        expected = original(name)(TOKENS).logits
        torch.testing.assert_close(found(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "mamba"])
@pytest.mark.some(1)
def test_quantized_weights_are_those_that_transformers_reads(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a line at the start says what became of them."""
    file = write(name, tmp_path / "tiny.gguf", "Q8_0" if name == "gpt2" else "F16")
    made = resolve(str(file))
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, ignore_mismatched_sizes=True
    )
    with caplog.at_level(logging.INFO):
        options = EngineConfig(kv_memory_bytes=2**22, threads=1, max_batch_tokens=16, device="cpu").on("cpu")
        runner = build_general_runner(made, "float32", options)
    assert "GGUF: weights kept as they are stored: none; held as float32: " in caplog.text
    assert runner.spec.way.startswith("flat" if name == "gpt2" else "gather")
    found = load_model(read_general_config(made), Checkpoint(made), torch.float32, "cpu").state_dict()
    for key, tensor in expected.state_dict().items():
        if "wpe" not in key:  # transformers makes 1024 positions, whatever the file says
            torch.testing.assert_close(found[key], tensor, msg=key)


@pytest.mark.more
@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_a_pair_that_reads_the_same_file_yields_transformers_tokens(name: str, tmp_path: Path) -> None:
    """Weights are those of the file, of 16 bits; prefill and decode have blocks of different sizes."""
    file, model = write(name, tmp_path / "tiny.gguf", "F16"), original(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.half())

    async def answers() -> list[Completion]:
        async with cluster(file, decodes=1) as pair:
            return [await pair.ask(prompt) for prompt in PROMPTS]

    found = asyncio.run(answers())
    assert [list(one.token_ids) for one in found] == [greedy(model, prompt, COMPLETION)[0] for prompt in PROMPTS]
    assert all(one.timeline.transfer_bytes for one in found)


def test_a_tensor_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_factors_long.weight", torch.ones(8).numpy())

    made = resolve(str(write("phi3", tmp_path / "tiny.gguf", change=change)))
    with pytest.raises(ValueError, match=r"tiny\.gguf: tensor rope_factors_long\.weight: Phi3ForCausalLM has no such"):
        load_model(read_general_config(made), Checkpoint(made), torch.float32, "cpu")


def test_another_scaling_of_positions_is_named(tmp_path: Path) -> None:
    file = write("phi3", tmp_path / "tiny.gguf", change=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN))
    with pytest.raises(ValueError, match=r"tiny\.gguf: phi3\.rope\.scaling\.type is 'yarn'; allowed: none, linear"):
        resolve(str(file))
