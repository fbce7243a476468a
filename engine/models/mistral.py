"""Mistral: a sliding window on every layer, or none where it is null."""

from kvrelay.engine.models.architecture import Architecture, Traits
from kvrelay.engine.models.fields import Fields


def traits(fields: Fields, layers: int) -> Traits:
    window = 0 if fields.get("sliding_window") is None else fields.integer("sliding_window")
    return Traits((window,) * layers)


MISTRAL = Architecture(
    "mistral", "MistralForCausalLM", traits, {"sliding_window": 4096, "num_key_value_heads": 8, "eos_token_id": 2}
)
