"""config.json and generation_config.json of a Hugging Face folder, read strictly into one value. No torch."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from kvrelay.engine.config import CacheDtype, Device, Dtype, Quantization
from kvrelay.engine.degree import MAX_RANKS, Degree
from kvrelay.engine.kv.layout import CacheLayout, FloatDtype, KVLayout, LayerGroup, Order
from kvrelay.engine.models.reading.families import ACTIVATIONS, ARCHITECTURES, Activation, Architecture, Traits
from kvrelay.engine.models.reading.fields import Fields, read_json
from kvrelay.engine.models.reading.positions import NO_ROPE, RopeConfig, head_order, read_rope
from kvrelay.engine.models.reading.stored import IN_INT32, StoredFormat, stored_format
from kvrelay.engine.ranks.collective import Place
from kvrelay.engine.ranks.spans import WIDTH, even_span
from kvrelay.machine.options import require

DTYPES: tuple[FloatDtype, ...] = get_args(FloatDtype)
MOST_LAYERS = 4096
INT4_GROUP = 64
"""Number of inputs that share a scale in weights that are converted to int4 at load."""


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
    ropes: tuple[RopeConfig, ...]
    """[layers]."""
    tie_embeddings: bool
    traits: Traits
    activation: Activation
    eos_token_ids: tuple[int, ...]
    dtype: FloatDtype
    """Dtype of the weights in the files that aren't quantized, as config.json says."""
    stored: StoredFormat | None = None
    """Quantized format of the files' linear layers; None if they aren't quantized."""
    stretched_positions: int = 0
    """Positions with the long factors of longrope; 0 for models without, and for those that have them already."""
    first_layer: int = 0
    """Number of the first of these layers in the model; above 0 in the config of a later pipeline stage."""
    of: "ModelConfig | None" = None
    """Config of the whole model, if this is that of a rank (`for_rank`)."""

    @property
    def whole(self) -> "ModelConfig":
        """The config of the whole model."""
        return self.of or self

    @property
    def is_gguf(self) -> bool:
        """Whether the weights are in GGUF files."""
        return self.stored is not None and self.stored.layout == "gguf"

    @property
    def distinct_ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary positions of all layers, each once."""
        return tuple(dict.fromkeys(self.ropes))

    @property
    def head_order(self) -> list[int] | None:
        """See `positions.head_order`."""
        return head_order(max(self.ropes, key=lambda rope: rope.kind != "none"), self.head_dim, self.traits.interleaved)

    @property
    def residual_eps(self) -> float:
        """Eps of norms of the residual, which is kept divided by `Traits.residual_scale`."""
        return self.norm_eps / self.traits.residual_scale**2

    @property
    def form(self) -> str:
        """Name of rotations other than the config's own (`for_context`), which give other keys; else empty."""
        return (
            "stretched" if any(rope.long_factors and rope.factors == rope.long_factors for rope in self.ropes) else ""
        )

    def run_dtype(self, dtype: Dtype, device: Device = "cpu") -> FloatDtype:
        """The dtype in which the weights are used: with `auto` that of the files, or float32 in place of float16, which
        is slow on CPUs."""
        if dtype != "auto":
            return dtype
        return "float32" if self.dtype == "float16" and device == "cpu" else self.dtype

    def for_context(self, max_context: int) -> "ModelConfig":
        """This config for contexts of up to `max_context` tokens, an option; 0 leaves the choice to the model.

        longrope has other frequencies for contexts longer than the original ones, which change all keys. So they are
        chosen once, for all contexts, and only if longer ones are asked for.
        """
        if not self.stretched_positions or max_context <= self.max_positions:
            return self
        ropes = tuple(rope.stretched() for rope in self.ropes)
        return replace(self, ropes=ropes, max_positions=self.stretched_positions, stretched_positions=0)

    def kv_layout(self, dtype: FloatDtype, kv_dtype: CacheDtype, block_size: int, order: Order) -> KVLayout:
        """The layout of the KV of all layers in one pool, stored in `dtype`, of the weights, if `kv_dtype` is auto."""
        stored = dtype if kv_dtype == "auto" else kv_dtype
        return KVLayout(self.layers, self.kv_heads, self.head_dim, block_size, stored, order)

    def cache_layout(self, whole: KVLayout, max_context: int) -> CacheLayout:
        """The layout of what this model keeps of sequences of up to `max_context` tokens: a full group of the layers
        that see all tokens of one, and a group of one track for each window.

        Args:
            whole: the layout of the KV of all layers in one pool.
        """
        windows = self.windows(max_context)
        tracks = {window: (replace(whole, layers=windows.count(window)),) for window in sorted(set(windows))}
        full = LayerGroup("full", tracks.pop(0, ()))
        sides = [LayerGroup("window", track, window) for window, track in tracks.items()]
        return CacheLayout((full, *sides), whole.block_size)

    def whole_cache_layout(self, own: CacheLayout, max_context: int) -> CacheLayout:
        """The layout of what all ranks together keep of a sequence, by what one rank keeps of it."""
        whole = self.whole
        layout = replace(own.tracks[0][1], layers=whole.layers, kv_heads=whole.kv_heads)
        return whole.cache_layout(layout, max_context) if own.side_groups else CacheLayout.of(layout)

    def for_rank(
        self, place: Place, quantization: Quantization = "none", *, whole: bool = False, spares: int = 0
    ) -> "ModelConfig":
        """The config of what one rank computes: its heads, its part of the MLP's width, and its layers.

        Hidden size and vocabulary are the model's.

        Args:
            quantization: the option; groups of inputs that share a scale stay together.
            whole: whether a rank has whole experts, and not a part of each.
            spares: experts that it has room for beside its own ones.
        """
        degree = place.degree
        if degree.ranks == 1:
            return self
        layers = degree.layers(place.rank, self.layers)
        own = slice(layers.start, layers.stop)
        experts = self.traits.experts
        if experts is not None:
            width, shared = (
                even_span(each, place, self.width_unit(each, quantization)).size
                for each in (experts.width, experts.shared)
            )
            if whole:
                number, each = place.rank % degree.tensor, experts.routing.experts // degree.tensor
                experts = replace(experts, shared=shared, held=range(number * each, (number + 1) * each), spares=spares)
            else:
                experts = replace(experts, width=width, shared=shared)
        return replace(
            self,
            layers=len(layers),
            first_layer=layers.start,
            of=self,
            heads=self.heads // degree.tensor,
            kv_heads=len(degree.kv_heads(place.rank, self.kv_heads)),
            intermediate_size=even_span(
                self.intermediate_size, place, self.width_unit(self.intermediate_size, quantization)
            ).size,
            ropes=self.ropes[own],
            traits=replace(
                self.traits, windows=self.traits.windows[own], rotated=self.traits.rotated[own], experts=experts
            ),
        )

    def width_unit(self, width: int, quantization: Quantization) -> int:
        """Columns of an MLP's or an expert's width that stay on one rank."""
        return math.lcm(WIDTH, self.group_of(width, quantization))

    def group_of(self, inputs: int, quantization: Quantization) -> int:
        """Number of inputs of a layer that can't be divided over ranks; 1 if all can."""
        stored = self.stored
        if stored is None:
            return INT4_GROUP if quantization == "int4" else 1
        if stored.layout == "gguf":
            # Rows of other widths can't be in types with blocks of 256.
            return 256 if inputs % 256 == 0 else 32
        return stored.group or (1 if stored.layout in ("fp8", "int8") else IN_INT32)

    def windows(self, max_context: int) -> tuple[int, ...]:
        """[layers] the window of each layer, as in `Traits`; 0 too if no context is longer than it."""
        return tuple(window if window < max_context else 0 for window in self.traits.windows)


def allowed_degrees(config: ModelConfig, quantization: Quantization = "none", output_block: int = 1) -> list[int]:
    """Numbers of ranks that a model can be divided over, by tensor parallelism.

    Args:
        output_block: inputs of a block of the attention's output layers, for types of GGUF, whose blocks stay whole.
    """

    def heads_fit(tensor: int) -> bool:
        if config.heads % tensor or (config.kv_heads % tensor and tensor % config.kv_heads):
            return False
        inputs = config.heads // tensor * config.head_dim
        return tensor == 1 or inputs % (output_block if config.is_gguf else config.group_of(inputs, quantization)) == 0

    return [tensor for tensor in range(1, min(config.heads, MAX_RANKS) + 1) if heads_fit(tensor)]


def check_degree(
    config: ModelConfig, degree: Degree, quantization: Quantization = "none", output_block: int = 1
) -> None:
    """Checks that a model can be divided over so many ranks.

    Args:
        quantization, output_block: as those of `allowed_degrees`.

    Raises:
        ValueError: it can't; the text names the option, its value and the degrees that can be had.
    """
    allowed = allowed_degrees(config, quantization, output_block)
    heads = f"for {config.heads} query heads and {config.kv_heads} KV heads"
    text = f"{', '.join(map(str, allowed))}, {heads}"
    require(degree.tensor in allowed, "tensor_parallel", degree.tensor, text)
    require(degree.pipeline <= config.layers, "pipeline_parallel", degree.pipeline, f"1 to {config.layers}, of layers")


def check_experts(config: ModelConfig, parts: int, exchange: str = "auto", spares: int = 0) -> None:
    """Checks that a model's experts can be divided over parts, whole ones, whose ranks exchange rows as is wanted.

    Args:
        parts, exchange, spares: the options `expert_parallel`, `expert_exchange` and `spare_experts`.

    Raises:
        ValueError: they can't; the text names the option, its value and what is allowed.
    """
    experts = config.traits.experts
    if experts is None:
        require(parts == 1, "expert_parallel", parts, "1 for a model without experts")
        return
    own = experts.routing.experts // parts
    require(spares <= own, "spare_experts", spares, f"0 to {own}, the experts of a rank")
    count = experts.routing.experts
    require(count % parts == 0, "expert_parallel", parts, f"1, or a divisor of the model's {count} experts")
    if exchange == "all_to_all" and (why := undispatched(config)):
        require(False, "expert_exchange", exchange, f"auto, all_reduce, because {why}")


def undispatched(config: ModelConfig) -> str:
    """Why a model's rows can't be sent to the ranks of their experts; empty if they can."""
    experts, norms = config.traits.experts, config.traits.norms
    if experts is None:
        return "it has no experts"
    if experts.shared or norms.attention or norms.mlp:
        return "an MLP beside the experts, or a norm behind them, computes all rows on all ranks"
    return ""


def read_config(folder: Path) -> ModelConfig:
    """The config of the model in `folder`.

    Raises:
        ValueError: a file is missing or unreadable, or a field is missing, of the wrong type or not supported; the text
            names file, field, value and what is allowed.
    """
    values = read_json(folder / "config.json")
    architecture = _architecture(Fields("config.json", values))
    fields = Fields("config.json", {**architecture.defaults, **values})
    allowed = (architecture.activation,)
    activation = fields.choice(architecture.activation_field, allowed, default=architecture.activation)
    layers = fields.integer("num_hidden_layers")
    if layers > MOST_LAYERS:
        fields.refuse("num_hidden_layers", f"up to {MOST_LAYERS}")
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
    if architecture.sliding_rope is None:
        rope = sliding = read_rope(fields, head_dim, architecture.partial_rope, architecture.rope_kinds)
    else:
        rope, sliding = architecture.sliding_rope(fields, head_dim)
    traits, positions = architecture.traits(fields, layers), fields.integer("max_position_embeddings")
    return ModelConfig(
        architecture=architecture.model_class,
        layers=layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_positions=min(positions, rope.original_max_positions) if rope.long_factors else positions,
        norm_eps=fields.number(architecture.eps_field, default=1e-6),
        ropes=tuple(
            (sliding if window else rope) if rotated else NO_ROPE
            for window, rotated in zip(traits.windows, traits.rotated or (True,) * layers, strict=True)
        ),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        traits=traits,
        activation=ACTIVATIONS[activation],
        eos_token_ids=eos_token_ids(folder, fields, vocab_size),
        dtype=_dtype(fields),
        stored=stored_format(fields),
        stretched_positions=positions if rope.long_factors and positions > rope.original_max_positions else 0,
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
