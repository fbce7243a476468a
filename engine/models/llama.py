"""Llama 1 to 3.x and what copies it: biases are options."""

from kvrelay.engine.models.architecture import Architecture, Traits
from kvrelay.engine.models.fields import Fields


def traits(fields: Fields, layers: int) -> Traits:
    bias = fields.boolean("attention_bias", False)
    return Traits((0,) * layers, qkv_bias=bias, output_bias=bias, mlp_bias=fields.boolean("mlp_bias", False))


LLAMA = Architecture("llama", "LlamaForCausalLM", traits, {"eos_token_id": 2})
