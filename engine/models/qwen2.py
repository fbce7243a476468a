"""Qwen2 and Qwen2.5: biases on query, key and value; windows on some layers if asked for."""

from kvrelay.engine.models.architecture import QWEN_DEFAULTS, Architecture, Traits, layer_windows
from kvrelay.engine.models.fields import Fields


def traits(fields: Fields, layers: int) -> Traits:
    return Traits(layer_windows(fields, layers), qkv_bias=True)


QWEN2 = Architecture("qwen2", "Qwen2ForCausalLM", traits, QWEN_DEFAULTS)
