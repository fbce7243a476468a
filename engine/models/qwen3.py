"""Qwen3: norms on each head's query and key; windows on some layers if asked for."""

from kvrelay.engine.models.architecture import QWEN_DEFAULTS, Architecture, Traits, layer_windows
from kvrelay.engine.models.fields import Fields


def traits(fields: Fields, layers: int) -> Traits:
    bias = fields.boolean("attention_bias", False)
    return Traits(layer_windows(fields, layers), qkv_bias=bias, output_bias=bias, qk_norm=True)


QWEN3 = Architecture("qwen3", "Qwen3ForCausalLM", traits, {**QWEN_DEFAULTS, "head_dim": 128})
