"""In what the supported architectures differ: pre-norm decoders with rotary positions and gated SiLU all of them."""

from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.engine.models.fields import Fields


@dataclass(frozen=True, slots=True)
class Traits:
    """The parts that an architecture has beyond the common decoder."""

    windows: tuple[int, ...]
    """[layers] keys that a query sees, itself included; 0 for all before it."""
    qkv_bias: bool = False
    output_bias: bool = False
    """On the projection of attention's output."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each head's query and key, ahead of the rotation."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `model_type`."""

    model_type: str
    model_class: str
    """What `architectures` in config.json must say, where it says something."""
    traits: Callable[[Fields, int], Traits]
    """From config.json and the number of layers."""


def layer_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """Windows of a model that switches them on with `use_sliding_window`, from layer `max_window_layers` on or where
    `layer_types` says so.

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
    window = fields.integer("sliding_window")
    if kinds is None:
        full = fields.integer("max_window_layers", minimum=0)
        return tuple(window if layer >= full else 0 for layer in range(layers))
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
