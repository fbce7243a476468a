"""Convert a checkpoint of `benchmarks/checkpoint.py` to GGUF, which llama.cpp reads.

    DIR/other/bin/python benchmarks/peers/gguf_file.py MODEL OUT.gguf [--type q8_0]

For timing only: queries and keys aren't permuted as llama.cpp's rotation wants them, so its text is another.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=("bf16", "q8_0", "q4_0"), default="bf16", help="of the matrices")
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    writer = gguf.GGUFWriter(str(args.out), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{args.type.upper()}"])
    add_tokenizer(writer, json.loads((args.model / "tokenizer.json").read_text())["model"], config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    with safe_open(args.model / "model.safetensors", "pt") as weights:
        for key in weights.keys():  # noqa: SIM118  # not a mapping
            add_tensor(
                writer,
                names.get_name(key, (".weight",)) + ".weight",
                weights.get_tensor(key),
                gguf.GGMLQuantizationType[args.type.upper()],
            )
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
    if tensor.ndim == 1:
        writer.add_tensor(name, tensor.float().numpy())
        return
    if kind == gguf.GGMLQuantizationType.BF16:
        raw = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint8)
    else:
        raw = gguf.quants.quantize(tensor.float().numpy(), kind)
    writer.add_tensor(name, raw, raw_dtype=kind)


if __name__ == "__main__":
    main()
