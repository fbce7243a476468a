"""GGUF files of models that transformers' code runs: its configuration, and its weights out of the file's tensors."""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from kvrelay.engine.models.fast.loader import OnLoaded, TensorFiles
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.models.reading.fields import Fields
from kvrelay.machine.gguf import GENERAL_SUFFIX

logger = logging.getLogger(__name__)

METADATA = "metadata"
"""Field of config.json that has the metadata of the file's model."""
ATTRIBUTES = {
    "context_length": "max_position_embeddings",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Attributes of configurations by the metadata's keys, of which transformers reads some for some architectures."""
SCALED_BY_HEADS = {"gemma2": 46, "gemma3": 62}
"""Number of layers of each architecture's 27B model, whose products of queries and keys are divided by
sqrt(hidden size / heads), 144 and 168 in their published configurations; those of others by the root of the size of a
head."""
NO_TENSORS = ("rope_freqs.weight",)
"""Tensors that aren't read: their values follow from the metadata."""


def architecture_of(fields: Fields) -> str:
    """The architecture as the file names it; empty if the folder's model isn't of a GGUF file."""
    kind = fields.get("model_type")
    return kind.removesuffix(GENERAL_SUFFIX) if isinstance(kind, str) and kind.endswith(GENERAL_SUFFIX) else ""


def read_gguf_config(checkpoint: Checkpoint, fields: Fields) -> PreTrainedConfig:
    """transformers' configuration of the model, with what it doesn't read of the metadata.

    Args:
        fields: of the folder's config.json.

    Raises:
        ValueError: transformers can't read it, or a key can't be used; the text names file and key.
    """
    file, architecture = _file(checkpoint), architecture_of(fields)
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, KeyError, TypeError, OSError, NotImplementedError) as error:
        raise ValueError(f"{file}: transformers can't read its configuration: {error}") from error
    metadata: Mapping[str, Any] = fields.get(METADATA) or {}
    values = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    for key, attribute in ATTRIBUTES.items():
        if key in values and (hasattr(config, attribute) or key == "context_length"):
            setattr(config, attribute, values[key])
    config.vocab_size = fields.integer("vocab_size")
    config.eos_token_id = fields.get("eos_token_id")
    config.dtype = fields.get("dtype")
    if (getattr(config, "pad_token_id", None) or 0) >= config.vocab_size:
        config.pad_token_id = None  # the class's default, where the file names none
    if architecture in SCALED_BY_HEADS:
        by_heads = config.num_hidden_layers == SCALED_BY_HEADS[architecture]
        size = config.hidden_size // config.num_attention_heads if by_heads else config.head_dim
        config.query_pre_attn_scalar = size
    _set_rotation(config, values, f"{file}: {architecture}.")
    return config


def _set_rotation(config: PreTrainedConfig, values: Mapping[str, Any], where: str) -> None:
    """Sets the rotary positions that the metadata describe.

    Raises:
        ValueError: they can't be set; the text names the key.
    """
    found: Any = getattr(config, "rope_parameters", None)
    if not found:
        return
    rotation: dict[str, Any] = found.get("full_attention", found)
    if "rope.freq_base" in values:
        rotation["rope_theta"] = float(values["rope.freq_base"])
    factor = values.get("rope.scaling.factor", 1.0)
    if values.get("rope.scaling.type", "linear") == "linear" and factor not in (0.0, 1.0):
        rotation.update(rope_type="linear", factor=factor)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = values.get("rope.dimension_count", size) / size
    if "partial_rotary_factor" in rotation:
        if "rope.dimension_count" in values:
            rotation["partial_rotary_factor"] = share
    elif share != 1:
        raise ValueError(f"{where}rope.dimension_count is {values['rope.dimension_count']}; allowed: {size}")


def read_gguf_weights(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    checkpoint: Checkpoint,
    architecture: str,
    dtype: torch.dtype,
    on_loaded: OnLoaded | None = None,
) -> dict[str, Tensor]:
    """The weights by their names in transformers' model, dequantized to `dtype`.

    Raises:
        ValueError: a tensor isn't one of the model's, or has numbers that aren't finite; the text names file and
            tensor.
    """
    with torch.device("meta"):
        model = model_class(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    names: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    known = {name.removesuffix(".weight") for name in names}
    needed = tuple(name for name in checkpoint.tensors if name not in NO_TENSORS)
    files = TensorFiles(checkpoint, needed, torch.float32, "cpu", on_loaded, keep=False)
    made: dict[str, dict[str, Tensor]] = {"tensors": {}}
    types: Counter[str] = Counter()
    for name in needed:
        entry = checkpoint.tensors[name]
        if name.removesuffix(".weight") not in known:
            raise ValueError(f"{entry.path}: tensor {name}: {model_class.__name__} has no such tensor")
        types[entry.dtype] += 1
        weights: Any = files.take(name).numpy()
        weights, own, _ = processor.process(
            weights=weights, name=name, tensor_key_mapping=names, parsed_parameters=made
        )
        if own is not None:
            made["tensors"][names[own]] = torch.from_numpy(np.ascontiguousarray(weights)).to(dtype)
    shown = ", ".join(f"{count} {kind}" for kind, count in types.most_common())
    logger.info("GGUF: weights kept as they are stored: none; held as %s: %s", str(dtype).removeprefix("torch."), shown)
    return {name: tensor.to(dtype) for name, tensor in made["tensors"].items()}


def _file(checkpoint: Checkpoint) -> Path:
    return next(iter(checkpoint.tensors.values())).path
