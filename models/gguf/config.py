"""config.json of a GGUF file's model, and the names that its tensors have in Hugging Face checkpoints."""

import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from kvrelay.machine.gguf import FLOATS, GENERAL_SUFFIX
from kvrelay.models.gguf.header import GGUFError, Header

ModelType = Literal["llama", "mistral", "qwen2", "qwen3"]
CLASSES: Mapping[ModelType, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ARCHITECTURES: Mapping[str, ModelType] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""The `model_type` of each architecture that kvrelay's own code runs. Mistral's models have the architecture `llama`,
too."""
GENERAL = ("gemma2", "gemma3", "gpt2", "mamba", "nemotron", "phi3", "stablelm", "starcoder2")
"""Architectures whose models transformers' code runs, with weights that its rules make of the file's."""
INTERLEAVED = ("llama", "mistral")
"""Types of models whose files have the rows of queries and keys in another order: in each head, the rows of its first
half and those of its second take turns."""
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>")
"""Control tokens that end a text, though files name only one of them."""
CONTROL = 3


def hugging_face_name(name: str) -> str | None:
    """The name in a Hugging Face checkpoint of a tensor; None if no model that is served has such a tensor."""
    if (match := _LAYER.fullmatch(name)) is not None:
        layer, part, end = match.groups()
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{end}" if part in _LAYER_NAMES else None
    part, _, end = name.partition(".")
    return f"{_NAMES[part]}.{end}" if part in _NAMES and end == "weight" else None


def needed_names(config: Mapping[str, Any]) -> Iterator[str]:
    """The names of the tensors that a model of this config.json has at least."""
    yield "output_norm.weight"
    norms = () if config["model_type"] == "qwen3" else ("attn_q_norm", "attn_k_norm")
    for layer in range(config["num_hidden_layers"]):
        yield from (f"blk.{layer}.{part}.weight" for part in _LAYER_NAMES if part not in norms)


def config_of(header: Header) -> dict[str, Any]:
    """The values of config.json.

    Raises:
        GGUFError: a key is missing or has a value that isn't served; the text names it.
    """
    architecture = header.text("general.architecture")
    if architecture in GENERAL:
        return _general_config(header, architecture)
    if architecture not in ARCHITECTURES:
        header.refuse("general.architecture", ", ".join((*ARCHITECTURES, *GENERAL)))
    model_type = ARCHITECTURES[architecture]

    def key(name: str) -> str:
        return f"{architecture}.{name}"

    if header.integer(key("expert_count"), 0, minimum=0):
        header.refuse(key("expert_count"), "0; experts aren't served from GGUF")
    window = header.integer(key("attention.sliding_window"), 0, minimum=0)
    if window and model_type == "llama":
        model_type = "mistral"
    elif window:
        header.refuse(key("attention.sliding_window"), "0")
    hidden, heads = header.integer(key("embedding_length")), header.integer(key("attention.head_count"))
    if key("attention.key_length") not in header.metadata and hidden % heads:
        header.refuse(key("attention.head_count"), f"a divisor of {key('embedding_length')} ({hidden})")
    head_dim = header.integer(key("attention.key_length"), hidden // heads)
    if head_dim % 2:
        header.refuse(key("attention.key_length"), f"an even number; {hidden} / {heads} where it is absent")
    kv_heads = header.integer(key("attention.head_count_kv"), heads)
    if heads % kv_heads:
        header.refuse(key("attention.head_count_kv"), f"a divisor of {key('attention.head_count')} ({heads})")
    for same in (key("attention.value_length"), key("rope.dimension_count")):
        if header.integer(same, head_dim) != head_dim:
            header.refuse(same, f"the size of a head ({head_dim})")
    names = header.tensors
    if EMBEDDING not in names:
        raise GGUFError(header.path, f"tensor {EMBEDDING} is missing")
    theta = header.number(key("rope.freq_base"), 10000.0)
    return {
        "model_type": model_type,
        "architectures": [CLASSES[model_type]],
        "hidden_act": "silu",
        "num_hidden_layers": header.integer(key("block_count")),
        "hidden_size": hidden,
        "intermediate_size": header.integer(key("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": names[EMBEDDING].shape[0],
        "max_position_embeddings": header.integer(key("context_length")),
        "rms_norm_eps": header.number(key("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(header, architecture, theta, head_dim),
        "tie_word_embeddings": HEAD not in names,
        "sliding_window": window or None,
        "use_sliding_window": False,
        "attention_bias": model_type != "qwen2" and "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_down.bias" in names,
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(header),
        **_weights(header),
    }


def _general_config(header: Header, architecture: str) -> dict[str, Any]:
    """The config.json of a model that transformers' code runs. It has all metadata of the model, because fingerprints
    cover this file.

    Raises:
        GGUFError: the text names the key.
    """
    if EMBEDDING not in header.tensors:
        raise GGUFError(header.path, f"tensor {EMBEDDING} is missing")
    if header.integer("split.count", 1) != 1:
        header.refuse("split.count", f"1, because architecture {architecture} is read from single files only")
    if header.text(f"{architecture}.rope.scaling.type", "none") not in ("none", "linear"):
        header.refuse(f"{architecture}.rope.scaling.type", "none, linear")
    header.integer(f"{architecture}.block_count")
    metadata = {key: value for key, value in header.metadata.items() if key.startswith(f"{architecture}.")}
    return {
        "model_type": f"{architecture}{GENERAL_SUFFIX}",
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        "eos_token_id": end_tokens(header),
        "dtype": _weights(header)["dtype"],
        "metadata": metadata,
    }


def end_tokens(header: Header) -> list[int]:
    """The ids of the tokens that end a text, that of `tokenizer.ggml.eos_token_id` first."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = [header.integer(key, minimum=0) for key in keys if key in header.metadata]
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    kinds = header.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, list):
        ends = (
            index
            for index, (text, kind) in enumerate(zip(tokens, kinds, strict=False))
            if kind == CONTROL and text in _ENDS
        )
        ids += ends
    most = header.tensors[EMBEDDING].shape[0]
    for key in keys:
        if header.metadata.get(key, 0) >= most:
            header.refuse(key, f"an id below {most}, the number of tokens that are embedded")
    return list(dict.fromkeys(ids))


def _weights(header: Header) -> dict[str, Any]:
    """The dtype of the weights, and how they are quantized if they are."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            sizes[tensor.dtype] += tensor.end - tensor.begin
    if quantized := [dtype for dtype, _ in sizes.most_common() if dtype not in FLOATS]:
        return {"dtype": "bfloat16", "quantization_config": {"quant_method": "gguf", "type": quantized[0]}}
    return {"dtype": {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[sizes.most_common(1)[0][0]]}


def _rope_scaling(header: Header, architecture: str, theta: float, head_dim: int) -> dict[str, Any] | None:
    key, original = f"{architecture}.rope.scaling.type", f"{architecture}.rope.scaling.original_context_length"
    kind = header.text(key, "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": header.number(f"{architecture}.rope.scaling.factor")}
    if kind != "none":
        header.refuse(key, "none, linear")
    if ROPE_FACTORS not in header.tensors:
        return None
    tensor = header.tensors[ROPE_FACTORS]
    count = head_dim // 2
    if tensor.dtype != "F32" or tensor.shape != (count,):
        raise GGUFError(
            header.path, f"tensor {ROPE_FACTORS} is {tensor.dtype} {list(tensor.shape)}; allowed: F32 [{count}]"
        )
    with header.path.open("rb") as file:
        file.seek(tensor.begin)
        found = struct.unpack(f"<{count}f", file.read(4 * count))
    if not all(0 < factor < math.inf for factor in found):
        raise GGUFError(header.path, f"tensor {ROPE_FACTORS} has other factors than numbers above 0")
    scaling = {"rope_type": "llama3", "factor": max(found), **_LLAMA3}
    positions = header.integer(original, 8192)
    waves = [2 * math.pi * theta ** (2 * index / head_dim) for index in range(count)]
    if not all(
        math.isclose(_llama3_factor(wave, max(found), positions), factor, rel_tol=1e-3)
        for wave, factor in zip(waves, found, strict=True)
    ):
        raise GGUFError(header.path, f"tensor {ROPE_FACTORS} isn't Llama 3's scaling; other factors aren't served")
    return {**scaling, "original_max_position_embeddings": positions}


def _llama3_factor(wave: float, factor: float, positions: int) -> float:
    """The number by which Llama 3's scaling divides the frequency of a wave of so many positions."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    blend = min(1.0, max(0.0, (positions / wave - low) / (high - low)))
    return 1 / ((1 - blend) / factor + blend)
