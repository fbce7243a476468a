"""Tiny random Hugging Face checkpoints, made by transformers, so that they look as real ones do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from support.tokenizers import byte_level_tokenizer

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Families for which whole engines and clusters are tested."""
FAMILIES = (
    *ARCHITECTURES,
    *("ministral", "seed_oss", "smollm3", "phi3", "granite", "olmo2", "olmo3", "glm", "glm4", "starcoder2"),
    *("cohere", "cohere2"),
    *("gemma", "gemma3_text"),
)
WITH_EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "minimax_m2", "gpt_oss")
"""Families of the fast path whose layers have experts, which run on the native CPU kernels only."""
VOCAB_SIZE = 320
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
# What sets each architecture apart. The windows are shorter than the tests' prompts.
OWN: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": 40, "head_dim": 32},
    "qwen2": {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 32},
    "ministral": {
        "head_dim": 32,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "seed_oss": {"head_dim": 16},
    "smollm3": {"no_rope_layer_interval": 2},
    "phi3": {"original_max_position_embeddings": 1024},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 3.0,
        "tie_word_embeddings": True,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 40},
    "glm": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "head_dim": 32,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 48,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "use_qk_norm": True,
        "head_dim": 32,
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 32,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "swiglu_limit": 1.5,
    },
    "glm4": {"head_dim": 32},
    "starcoder2": {"sliding_window": 40},
    "cohere": {},
    "cohere2": {"sliding_window": 40, "sliding_window_pattern": 2},
    "gemma": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 40, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20},
}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def make_checkpoint(
    folder: Path,
    architecture: str,
    *,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Writes a checkpoint with random weights and a byte-level BPE tokenizer into `folder`, and returns it.

    Args:
        architecture: one of FAMILIES.
        dtype: of the weights in the file.
        overrides: further fields of the architecture's transformers config. Qwen3 without windows unless given.
    """
    options = {**COMMON, **OWN[architecture], **overrides}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **options), dtype=torch.float32)
    _randomize(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer(options["vocab_size"]).save_pretrained(folder)
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes the tensors of a checkpoint of one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def copied(folder: Path, to: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Writes a copy of a checkpoint, with other weights, into the folder `to`, and returns that."""
    to.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    save_file(weights, to / "model.safetensors")
    return to


def make_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that can spell any text and knows a few hundred merges at most."""
    tokenizer = byte_level_tokenizer(vocab_size, (BOS, EOS, PAD), [Path(__file__).read_text()])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def _randomize(model: torch.nn.Module, seed: int) -> None:
    """Draws every parameter, norms and biases too, so large that logits are far apart and each part shows in them.

    Weights of norms are near those of a new model, which are 1, or 0 in families that add 1.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.add_(0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.5 * noise)
            elif "embed" in name:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(1.7 * noise / parameter.shape[1] ** 0.5)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
