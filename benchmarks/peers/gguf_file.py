"""Convert a checkpoint of `benchmarks/checkpoint.py` to GGUF, which llama.cpp reads.

    DIR/other/bin/python benchmarks/peers/gguf_file.py MODEL OUT.gguf [--type q8_0]

Dense Llama shapes, for timing only: queries and keys aren't permuted as llama.cpp's rotation wants them, so its text is
another. Qwen3-MoE shapes, with all experts of a layer in one tensor.
"""

import argparse
import json
import re
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=("f32", "bf16", "q8_0", "q4_0"), default="bf16", help="of the matrices")
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    moe = config["model_type"] == "qwen3_moe"
    architecture = gguf.MODEL_ARCH.QWEN3MOE if moe else gguf.MODEL_ARCH.LLAMA
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(str(args.out), gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if moe:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if args.type == "f32" else f"MOSTLY_{args.type.upper()}"])
    add_tokenizer(writer, json.loads((args.model / "tokenizer.json").read_text())["model"], config["vocab_size"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    kind = gguf.GGMLQuantizationType[args.type.upper()]
    experts: dict[str, dict[int, torch.Tensor]] = {}
    with safe_open(args.model / "model.safetensors", "pt") as weights:
        for key in weights.keys():  # noqa: SIM118  # not a mapping
            tensor = weights.get_tensor(key)
            if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", key):
                # All experts of a layer are one tensor.
                of_layer = experts.setdefault(names.get_name(f"{found[1]}.{found[3]}", (".weight",)), {})
                of_layer[int(found[2])] = tensor
            else:
                router = key.endswith("mlp.gate.weight")
                name = names.get_name(key, (".weight",))
                add_tensor(writer, name, tensor, gguf.GGMLQuantizationType.F32 if router else kind)
        for name, of_layer in experts.items():
            add_tensor(writer, name, torch.stack([of_layer[index] for index in sorted(of_layer)]), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, bpe: dict, vocabulary: int) -> None:
    tokens = [f"<unused{index}>" for index in range(vocabulary)]
    for token, index in bpe["vocab"].items():
        tokens[index] = token
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * vocabulary)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> None:
    if tensor.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, tensor.float().numpy())
        return
    if kind == gguf.GGMLQuantizationType.BF16:
        raw = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint8)
    else:
        raw = gguf.quants.quantize(tensor.float().numpy(), kind)
    writer.add_tensor(name, raw, raw_dtype=kind)


if __name__ == "__main__":
    main()
