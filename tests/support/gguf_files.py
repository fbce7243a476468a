"""Tiny GGUF files, written by the package `gguf` out of checkpoints that transformers made."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from support.checkpoints import BOS, EOS, make_tokenizer

Quantize = Callable[[str], str]
"""The type of a matrix by its GGUF name."""
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    checkpoint: Path,
    path: Path,
    dtype_of: Quantize = lambda name: "F32",
    *,
    splits: int = 0,
    edit: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> Path:
    """Writes the model of a folder that `make_checkpoint` has written as one file, or as splits; returns the first.

    Args:
        path: of the file; splits take its stem.
        dtype_of: of each matrix; other tensors are F32.
        edit: changes what is written.
    """
    tensors = load_file(checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = config["model_type"]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=-(-len(tensors) // splits) if splits else 0)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"] if config.get("head_dim") else config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    _add_tokenizer(writer, Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
    template = checkpoint / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())
    for name, tensor in tensors.items():
        theirs = gguf_name(name)
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = interleaved(tensor, heads if "q_proj" in name else kv_heads)
        kind = gguf.GGMLQuantizationType[dtype_of(theirs) if tensor.ndim > 1 else "F32"]
        if kind is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(theirs, tensor)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}*.gguf"))[0]


def write_general_gguf(
    model: PreTrainedModel,
    path: Path,
    architecture: str,
    fields: Callable[[gguf.GGUFWriter], object],
    dtype_of: Quantize = lambda name: "F32",
) -> Path:
    """Writes a model of an architecture that transformers' code runs as one file, and returns it.

    Args:
        architecture: as GGUF names it.
        fields: adds the metadata, besides the tokenizer's.
        dtype_of: of each matrix; other tensors are F32.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    fields(writer)
    _add_tokenizer(writer, make_tokenizer(config.vocab_size).backend_tokenizer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias")) or names.get_name(
            name.removeprefix("transformer."), try_suffixes=(".weight", ".bias")
        )
        values = tensor.numpy()
        if architecture == "gpt2" and any(part in name for part in ("c_attn.w", "c_proj.w", "c_fc.w")):
            values = values.T
        if architecture in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
            values = values + 1
        if architecture == "mamba" and name.endswith("A_log"):
            values = -np.exp(values)
        if name.endswith(("conv1d.weight", "conv.conv.weight")):
            values = values[:, 0]
        kind = gguf.GGMLQuantizationType[dtype_of(theirs) if values.ndim > 1 else "F32"]
        values = np.ascontiguousarray(values)
        if kind is not gguf.GGMLQuantizationType.F32:
            values = gguf.quants.quantize(values, kind)
        writer.add_tensor(theirs, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """The name of a checkpoint's tensor in GGUF files."""
    stem, _, end = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{end}"


def interleaved(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The rows of heads in the order that files of `llama` have."""
    halves = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if index in special else normal for index in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokens.index(BOS))
    writer.add_eos_token_id(tokens.index(EOS))
