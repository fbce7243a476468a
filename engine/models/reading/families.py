"""The model families that the fast path serves, and how they differ. A family is one `model_type` of config.json.

All are pre-norm decoders with rotary positions and gated SiLU.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrelay.engine.models.reading.fields import Fields


@dataclass(frozen=True, slots=True)
class Traits:
    """Features that an architecture adds to the common decoder."""

    windows: tuple[int, ...]
    """Number of keys that a query sees in each layer, its own included; 0 for all up to its own."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the projection of attention's output has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head's query and key get an RMS norm before the rotation."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `model_type`, and how its models differ from others."""

    model_type: str
    model_class: str
    """Class that `architectures` in config.json must name, if it is there."""
    traits: Callable[[Fields, int], Traits]
    """Makes the traits from config.json and the number of layers."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values that transformers takes for fields that are absent from config.json; a field that is null is null."""


def layer_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """Windows of a model that turns them on with `use_sliding_window`, for the layers that `layer_types` names, or from
    layer `max_window_layers` on.

    Raises:
        ValueError: the fields contradict one another, or name an unknown kind of layer.
    """
    kinds = fields.get("layer_types")
    if kinds is not None:
        known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
        if not known or len(kinds) != layers:
            fields.refuse("layer_types", f"a list of {layers} times full_attention or sliding_attention")
    if not fields.boolean("use_sliding_window", False):
        if kinds is not None and "sliding_attention" in kinds:
            fields.refuse("use_sliding_window", "true, because layer_types holds sliding_attention")
        return (0,) * layers
    if fields.get("sliding_window") is None:
        return (0,) * layers
    window = fields.integer("sliding_window")
    if kinds is None:
        full = fields.integer("max_window_layers", minimum=0)
        return tuple(window if layer >= full else 0 for layer in range(layers))
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


QWEN_DEFAULTS: Mapping[str, Any] = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
"""`Architecture.defaults` of Qwen2, and a part of those of Qwen3."""


def _llama(fields: Fields, layers: int) -> Traits:
    """Llama 1 to 3.x and what copies it: biases are options."""
    bias = fields.boolean("attention_bias", False)
    return Traits((0,) * layers, qkv_bias=bias, output_bias=bias, mlp_bias=fields.boolean("mlp_bias", False))


def _mistral(fields: Fields, layers: int) -> Traits:
    """Mistral: a sliding window on every layer, or none where it is null."""
    window = 0 if fields.get("sliding_window") is None else fields.integer("sliding_window")
    return Traits((window,) * layers)


def _qwen2(fields: Fields, layers: int) -> Traits:
    """Qwen2 and Qwen2.5: biases on query, key and value; windows on some layers if asked for."""
    return Traits(layer_windows(fields, layers), qkv_bias=True)


def _qwen3(fields: Fields, layers: int) -> Traits:
    """Qwen3: norms on each head's query and key; windows on some layers if asked for."""
    bias = fields.boolean("attention_bias", False)
    return Traits(layer_windows(fields, layers), qkv_bias=bias, output_bias=bias, qk_norm=True)


_MISTRAL_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8, "eos_token_id": 2}
ARCHITECTURES: dict[str, Architecture] = {
    known.model_type: known
    for known in (
        Architecture("llama", "LlamaForCausalLM", _llama, {"eos_token_id": 2}),
        Architecture("mistral", "MistralForCausalLM", _mistral, _MISTRAL_DEFAULTS),
        Architecture("qwen2", "Qwen2ForCausalLM", _qwen2, QWEN_DEFAULTS),
        Architecture("qwen3", "Qwen3ForCausalLM", _qwen3, {**QWEN_DEFAULTS, "head_dim": 128}),
    )
}
"""The families that kvrelay serves, by `model_type`."""
