"""config.json and generation_config.json of a Hugging Face folder, read strictly into one value. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kvrelay.engine.config import CacheDtype
from kvrelay.engine.kv.layout import FloatDtype, KVLayout, Order
from kvrelay.engine.models.reading.families import ARCHITECTURES, Architecture, Traits
from kvrelay.engine.models.reading.fields import Fields, read_json
from kvrelay.engine.models.reading.stored import StoredFormat, stored_format

RopeKind = Literal["default", "linear", "llama3"]
DTYPES: tuple[FloatDtype, ...] = get_args(FloatDtype)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: frequencies `theta ** (-2i / head_dim)`, scaled as `kind` says."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    """Factor by which the context became longer, for linear and llama3."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    """Positions that the model was first trained on, for llama3."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model and its parameters."""

    architecture: str
    """Model class as config.json names it, e.g. "LlamaForCausalLM"."""
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    traits: Traits
    eos_token_ids: tuple[int, ...]
    dtype: FloatDtype
    """Dtype of the weights in the files that aren't quantized, as config.json says."""
    stored: StoredFormat | None = None
    """Quantized format of the files' linear layers; None if they aren't quantized."""

    def kv_layout(self, dtype: FloatDtype, kv_dtype: CacheDtype, block_size: int, order: Order) -> KVLayout:
        """The layout of this model's KV, which is stored in `dtype`, of the weights, if `kv_dtype` is auto."""
        stored = dtype if kv_dtype == "auto" else kv_dtype
        return KVLayout(self.layers, self.kv_heads, self.head_dim, block_size, stored, order)

    def windows(self, max_context: int) -> tuple[int, ...]:
        """[layers] the window of each layer, as in `Traits`; 0 too if no context is longer than it."""
        return tuple(window if window < max_context else 0 for window in self.traits.windows)


def read_config(folder: Path) -> ModelConfig:
    """The config of the model in `folder`.

    Raises:
        ValueError: a file is missing or unreadable, or a field is missing, of the wrong type or not supported; the text
            names file, field, value and what is allowed.
    """
    values = read_json(folder / "config.json")
    architecture = _architecture(Fields("config.json", values))
    fields = Fields("config.json", {**architecture.defaults, **values})
    fields.choice("hidden_act", ("silu",), default="silu")
    layers = fields.integer("num_hidden_layers")
    hidden_size = fields.integer("hidden_size")
    vocab_size = fields.integer("vocab_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if fields.get("head_dim") is None and hidden_size % heads:
        fields.refuse("num_attention_heads", f"a divisor of hidden_size ({hidden_size}), or head_dim given")
    head_dim = fields.integer("head_dim", default=hidden_size // heads)
    if head_dim % 2:
        fields.refuse("head_dim", "an even number")
    return ModelConfig(
        architecture=architecture.model_class,
        layers=layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=read_rope(fields),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        traits=architecture.traits(fields, layers),
        eos_token_ids=eos_token_ids(folder, fields, vocab_size),
        dtype=_dtype(fields),
        stored=stored_format(fields),
    )


def is_of_family(folder: Path) -> bool:
    """Whether the model in `folder` is of a type that the fast path serves.

    Raises:
        ValueError: there is no config, or it isn't readable.
    """
    return read_json(folder / "config.json").get("model_type") in ARCHITECTURES


def _architecture(fields: Fields) -> Architecture:
    architecture = ARCHITECTURES[fields.choice("model_type", tuple(ARCHITECTURES))]
    classes = fields.get("architectures")
    if classes is not None and classes != [architecture.model_class]:
        fields.refuse(
            "architectures", f"[{architecture.model_class!r}], because model_type is {architecture.model_type}"
        )
    return architecture


_ROPE_FIELDS: dict[RopeKind, frozenset[str]] = {
    "default": frozenset({"rope_theta", "rope_type", "type"}),
    "linear": frozenset({"factor", "partial_rotary_factor"}),
    "llama3": frozenset(
        {"factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings", "partial_rotary_factor"}
    ),
}
"""The fields that each kind reads. Each reads those of the default kind too."""
_OTHER_ROPE_FIELDS = frozenset(
    {"attention_factor", "beta_fast", "beta_slow", "long_factor", "mrope_section", "mscale", "mscale_all_dim"}
    | {"short_factor", "truncate"}
)
"""Fields that transformers reads for kinds that aren't served."""


def read_rope(fields: Fields) -> RopeConfig:
    """Rotary positions, as transformers 5 reads them (`RotaryEmbeddingConfigMixin` in `modeling_rope_utils.py`).

    `rope_scaling`, which older versions write, wins over `rope_parameters` unless it is empty. `rope_theta` inside of
    it wins over the one beside it. `original_max_position_embeddings` beside it wins over the one inside, and
    `max_position_embeddings` stands in for both. A field that the kind doesn't read is ignored if transformers reads it
    for another kind, and refused if it doesn't.
    """
    scaling = fields.fields("rope_scaling")
    if scaling is None or not scaling.names:
        scaling = fields.fields("rope_parameters") or Fields("config.json: rope_parameters", {})
    theta = scaling.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    name = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = scaling.choice(name, get_args(RopeKind), default="default")
    for unknown in sorted(scaling.names - _OTHER_ROPE_FIELDS.union(*_ROPE_FIELDS.values())):
        scaling.refuse(unknown, ", ".join(sorted(_ROPE_FIELDS["default"] | _ROPE_FIELDS[kind])))
    if kind == "default":
        return RopeConfig(theta)
    for source in (scaling, fields):
        share = source.get("partial_rotary_factor")
        if share not in (None, 1):
            source.refuse("partial_rotary_factor", "1.0")
        if share is not None:
            break
    factor = scaling.number("factor")
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    original = fields if fields.get("original_max_position_embeddings") is not None else scaling
    return RopeConfig(
        theta,
        "llama3",
        factor,
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_positions=original.integer(
            "original_max_position_embeddings", default=fields.integer("max_position_embeddings")
        ),
    )


def eos_token_ids(folder: Path, fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids of generation_config.json if it has any, else those of config.json; perhaps none."""
    sources = [fields]
    generation = folder / "generation_config.json"
    if generation.exists():
        sources.insert(0, Fields(generation.name, read_json(generation)))
    for source in sources:
        ids = source.token_ids("eos_token_id")
        if ids is not None:
            if any(token >= vocab_size for token in ids):
                source.refuse("eos_token_id", f"ids below vocab_size ({vocab_size})")
            return ids
    return ()


def _dtype(fields: Fields) -> FloatDtype:
    """The dtype that `dtype` names, as transformers 5 writes it, or `torch_dtype`; float32 if neither is there."""
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return fields.choice(name, DTYPES, default="float32")
