"""The model families that the fast path serves, and their differences. A family is one `model_type` of config.json.

All are decoders whose layers have grouped queries, rotary positions on some layers at least, and an MLP.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from kvrelay.engine.models.reading.experts import (
    ExpertsTraits,
    glm4_moe_experts,
    gpt_oss_experts,
    minimax_m2_experts,
    mixtral_experts,
    qwen3_moe_experts,
)
from kvrelay.engine.models.reading.fields import Fields
from kvrelay.engine.models.reading.positions import ROPE_KINDS, RopeConfig, RopeKind, read_rope, read_scaling

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations by their names in config.json."""


class NormNames(NamedTuple):
    """Names of a layer's norms in the checkpoint; an empty one if the layer doesn't have that norm."""

    input: str = "input_layernorm"
    """Norm of attention's input."""
    attention: str = ""
    """Norm of attention's output, before it is added to the residual."""
    mlp_input: str = "post_attention_layernorm"
    mlp: str = ""
    """Norm of the MLP's output, before it is added to the residual."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Features that an architecture adds to the common decoder."""

    windows: tuple[int, ...]
    """Number of keys that a query sees in each layer, its own included; 0 for all up to its own."""
    rotated: tuple[bool, ...] = ()
    """Whether each layer rotates queries and keys; empty if all do."""
    interleaved: bool = False
    """Whether neighbours are the pairs that are rotated; see `head_order`."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the projection of attention's output has a bias."""
    mlp_bias: bool = False
    joined: frozenset[str] = frozenset()
    """Projections that are one tensor in the checkpoint: `qkv`, `gate_up`."""
    qk_norm: bool = False
    """Whether each head's query and key get an RMS norm before the rotation."""
    joint_qk_norm: bool = False
    """Whether all queries together get one RMS norm, and all keys together another one."""
    norms: NormNames = field(default_factory=NormNames)
    layer_norm: bool = False
    """Whether norms are layer norms; RMS norms if not."""
    norm_bias: bool = False
    norm_offset: bool = False
    """Whether norms have their weights less 1 in the checkpoint."""
    parallel: bool = False
    """Whether attention and MLP have the same input, the normed one of the layer."""
    gated: bool = True
    """Whether the MLP has a gate."""
    attention_scale: float = 0.0
    """Factor of a query's product with a key; 0 for 1 / sqrt(head_dim)."""
    embedding_scale: float = 1.0
    """Factor of the embedding."""
    residual_scale: float = 1.0
    """Factor of what each layer adds to the residual."""
    logits_scale: float = 1.0
    """Factor of logits."""
    sinks: bool = False
    """Whether each head has a number that takes part in its softmax, and no value."""
    experts: ExpertsTraits | None = None
    """Experts of the layers; None if all have an MLP."""


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
    partial_rope: bool = False
    """Whether a part of each head can be rotated only."""
    rope_kinds: Mapping[str, RopeKind] = field(default_factory=lambda: ROPE_KINDS)
    """Kinds of rotary positions, by their names in config.json."""
    sliding_rope: Callable[[Fields, int], tuple[RopeConfig, RopeConfig]] | None = None
    """Reads rotary positions of layers without a window and of those with one, for heads of a size, where they
    differ."""
    activation: str = "silu"
    """Name of the only activation, a key of ACTIVATIONS."""
    activation_field: str = "hidden_act"
    eps_field: str = "rms_norm_eps"


def layer_kinds(fields: Fields, layers: int) -> list[str] | None:
    """`layer_types` of config.json, one for each layer; None if the field is absent or null."""
    kinds: list[str] | None = fields.get("layer_types")
    if kinds is not None:
        known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
        if not known or len(kinds) != layers:
            fields.refuse("layer_types", f"a list of {layers} times full_attention or sliding_attention")
    return kinds


def kinds_windows(fields: Fields, kinds: list[str]) -> tuple[int, ...]:
    """Windows of layers of these kinds."""
    sliding = "sliding_attention"
    window = fields.integer("sliding_window") if sliding in kinds else 0
    return tuple(window if kind == sliding else 0 for kind in kinds)


def layer_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """Windows of a model that turns them on with `use_sliding_window`, for the layers that `layer_types` names, or from
    layer `max_window_layers` on.

    Raises:
        ValueError: the fields contradict one another, or name an unknown kind of layer.
    """
    kinds = layer_kinds(fields, layers)
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
    return kinds_windows(fields, kinds)


def same_windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """A window on every layer, or on none where it is null."""
    return (0 if fields.get("sliding_window") is None else fields.integer("sliding_window"),) * layers


QWEN_DEFAULTS: Mapping[str, Any] = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
"""`Architecture.defaults` of Qwen2, and a part of those of Qwen3."""


def _llama(fields: Fields, layers: int) -> Traits:
    """Llama 1 to 3.x and what copies it: biases are options."""
    bias = fields.boolean("attention_bias", False)
    return Traits((0,) * layers, qkv_bias=bias, output_bias=bias, mlp_bias=fields.boolean("mlp_bias", False))


def _mistral(fields: Fields, layers: int) -> Traits:
    """Mistral: a sliding window on every layer, or none where it is null."""
    return Traits(same_windows(fields, layers))


def _ministral(fields: Fields, layers: int) -> Traits:
    """Ministral: as Mistral, or windows on the layers that `layer_types` names."""
    kinds = layer_kinds(fields, layers)
    return Traits(same_windows(fields, layers) if kinds is None else kinds_windows(fields, kinds))


def _qwen2(fields: Fields, layers: int) -> Traits:
    """Qwen2 and Qwen2.5: biases on query, key and value; windows on some layers if asked for."""
    return Traits(layer_windows(fields, layers), qkv_bias=True)


def _qwen3(fields: Fields, layers: int) -> Traits:
    """Qwen3: norms on each head's query and key; windows on some layers if asked for."""
    bias = fields.boolean("attention_bias", False)
    return Traits(layer_windows(fields, layers), qkv_bias=bias, output_bias=bias, qk_norm=True)


def _seed_oss(fields: Fields, layers: int) -> Traits:
    """Seed-OSS: as Llama, with an option of its own for the bias behind attention."""
    return Traits(
        (0,) * layers,
        qkv_bias=fields.boolean("attention_bias", True),
        output_bias=fields.boolean("attention_out_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def _smollm3(fields: Fields, layers: int) -> Traits:
    """SmolLM3: every fourth layer doesn't rotate; windows on those layers if asked for."""
    rotated = fields.get("no_rope_layers")
    if rotated is None:
        interval = fields.integer("no_rope_layer_interval", default=4)
        rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(each not in (0, 1) for each in rotated):
        fields.refuse("no_rope_layers", f"a list of at least {layers} times 0 or 1")
    kinds = layer_kinds(fields, layers)
    if kinds is None:
        sliding = fields.boolean("use_sliding_window", False) and fields.get("sliding_window") is not None
        kinds = ["full_attention" if each or not sliding else "sliding_attention" for each in rotated[:layers]]
    bias = fields.boolean("attention_bias", False)
    return Traits(
        kinds_windows(fields, kinds),
        rotated=tuple(map(bool, rotated[:layers])),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )


def _phi3(fields: Fields, layers: int) -> Traits:
    """Phi-3, Phi-3.5 and Phi-4: joined projections."""
    return Traits(same_windows(fields, layers), joined=frozenset({"qkv", "gate_up"}))


def _granite(fields: Fields, layers: int) -> Traits:
    """Granite 3: as Llama, with factors at four places."""
    bias = fields.boolean("attention_bias", False)
    return Traits(
        (0,) * layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        attention_scale=fields.number("attention_multiplier", default=1.0),
        embedding_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        logits_scale=1 / fields.number("logits_scaling", default=1.0),
    )


def _olmo2(fields: Fields, layers: int) -> Traits:
    """OLMo 2: norms behind attention and MLP, none before; one norm for all queries and one for all keys."""
    bias = fields.boolean("attention_bias", False)
    norms = NormNames(input="", attention="post_attention_layernorm", mlp_input="", mlp="post_feedforward_layernorm")
    return Traits((0,) * layers, qkv_bias=bias, output_bias=bias, joint_qk_norm=True, norms=norms)


def _glm(fields: Fields, layers: int) -> Traits:
    """GLM-4 and GLM-Edge: neighbours are rotated, of half a head."""
    bias = fields.boolean("attention_bias", True)
    return Traits((0,) * layers, interleaved=True, qkv_bias=bias, joined=frozenset({"gate_up"}))


def _glm4(fields: Fields, layers: int) -> Traits:
    """GLM-4-0414: as GLM-4, with norms before and behind attention and MLP."""
    norms = NormNames(attention="post_self_attn_layernorm", mlp="post_mlp_layernorm")
    return replace(_glm(fields, layers), norms=norms)


def _starcoder2(fields: Fields, layers: int) -> Traits:
    """StarCoder2: layer norms, an MLP without a gate, biases everywhere."""
    bias = fields.boolean("use_bias", True)
    return Traits(
        same_windows(fields, layers),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        layer_norm=True,
        norm_bias=True,
        gated=False,
    )


def _cohere2(fields: Fields, layers: int) -> Traits:
    """Command R7B and Command A: as Command R, with windows; layers without one don't rotate."""
    windows = kinds_windows(fields, _every_nth_full(fields, layers, 4))
    return replace(_cohere(fields, layers), windows=windows, rotated=tuple(window > 0 for window in windows))


def _cohere(fields: Fields, layers: int) -> Traits:
    """Command R: attention beside the MLP, layer norms; neighbours are rotated."""
    fields.choice("use_qk_norm", (False,), default=False)
    bias = fields.boolean("attention_bias", False)
    return Traits(
        (0,) * layers,
        interleaved=True,
        qkv_bias=bias,
        output_bias=bias,
        norms=NormNames(mlp_input=""),
        layer_norm=True,
        parallel=True,
        logits_scale=fields.number("logit_scale", default=0.0625),
    )


def _gemma3(fields: Fields, layers: int) -> Traits:
    """Gemma 3, text only: as Gemma, with norms before and behind attention and MLP and on each head's query and key."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(name) is not None:
            fields.refuse(name, "null")
    fields.choice("use_bidirectional_attention", (False,), default=False)
    norms = NormNames(
        attention="post_attention_layernorm", mlp_input="pre_feedforward_layernorm", mlp="post_feedforward_layernorm"
    )
    scale = fields.number("query_pre_attn_scalar", default=256.0) ** -0.5
    windows = kinds_windows(fields, _every_nth_full(fields, layers, 6))
    return replace(_gemma(fields, layers), windows=windows, qk_norm=True, norms=norms, attention_scale=scale)


def _gemma(fields: Fields, layers: int) -> Traits:
    """Gemma: a factor of the embedding, norms with weights less 1, and GELU."""
    fields.choice("use_bidirectional_attention", (False,), default=False)
    bias = fields.boolean("attention_bias", False)
    scale = fields.integer("hidden_size") ** 0.5
    if "bfloat16" in (fields.get("dtype"), fields.get("torch_dtype")):
        # The models were trained with the factor in their own type.
        scale = nearest_bfloat16(scale)
    return Traits((0,) * layers, qkv_bias=bias, output_bias=bias, norm_offset=True, embedding_scale=scale)


def _qwen3_moe(fields: Fields, layers: int) -> Traits:
    """Qwen3-MoE: as Qwen3, with experts in all layers, and a window on all if asked for."""
    bias = fields.boolean("attention_bias", False)
    windows = same_windows(fields, layers) if fields.boolean("use_sliding_window", False) else (0,) * layers
    return Traits(windows, qkv_bias=bias, output_bias=bias, qk_norm=True, experts=qwen3_moe_experts(fields))


def _mixtral(fields: Fields, layers: int) -> Traits:
    """Mixtral: as Mistral, with experts in all layers."""
    return Traits(same_windows(fields, layers), experts=mixtral_experts(fields))


def _glm4_moe(fields: Fields, layers: int) -> Traits:
    """GLM-4.5 to 4.7: a part of each head is rotated; experts in all layers but the first ones."""
    bias, qk_norm = fields.boolean("attention_bias", False), fields.boolean("use_qk_norm", False)
    return Traits((0,) * layers, qkv_bias=bias, qk_norm=qk_norm, experts=glm4_moe_experts(fields, layers))


def _gpt_oss(fields: Fields, layers: int) -> Traits:
    """gpt-oss: attention sinks, windows on every other layer, biases, and experts in all layers."""
    bias = fields.boolean("attention_bias", True)
    windows = kinds_windows(fields, _every_nth_full(fields, layers, 2))
    return Traits(windows, qkv_bias=bias, output_bias=bias, sinks=True, experts=gpt_oss_experts(fields))


def _minimax_m2(fields: Fields, layers: int) -> Traits:
    """MiniMax-M2: norms of all queries and of all keys, a part of each head is rotated, experts in all layers."""
    return Traits((0,) * layers, joint_qk_norm=True, experts=minimax_m2_experts(fields))


def _rotary_dim_ropes(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """The same rotary positions for all layers, of the part of a head that `rotary_dim` names, if it is there."""
    if fields.get("rotary_dim") is not None and fields.get("partial_rotary_factor") is None:
        factor = fields.integer("rotary_dim") / head_dim
        fields = fields.merged(Fields("config.json", {"partial_rotary_factor": factor}))
    rope = read_rope(fields, head_dim, partial=True)
    return rope, rope


def nearest_bfloat16(x: float) -> float:
    """x, above 0, with the 8 bits of precision that bfloat16 has."""
    mantissa, exponent = math.frexp(x)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def _every_nth_full(fields: Fields, layers: int, pattern: int) -> list[str]:
    """`layer_types`, or without it windows on all layers but every `sliding_window_pattern`-th."""
    kinds = layer_kinds(fields, layers)
    if kinds is not None:
        return kinds
    interval = fields.integer("sliding_window_pattern", default=pattern)
    return ["sliding_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]


def _olmo3(fields: Fields, layers: int) -> Traits:
    """OLMo 3: as OLMo 2, with windows on three of four layers."""
    return replace(_olmo2(fields, layers), windows=kinds_windows(fields, _every_nth_full(fields, layers, 4)))


def ropes_by_kind(fields: Fields, head_dim: int, theta: float, sliding_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """Rotary embeddings of layers without a window, and of those with one: from `rope_parameters` by kind of layer, or
    from `rope_theta` with `rope_scaling`, and `rope_local_base_freq`.

    Args:
        theta, sliding_theta: defaults.
    """
    source, kinds = "config.json: rope_parameters", ("full_attention", "sliding_attention")
    nested = fields.fields("rope_parameters") or Fields(source, {})
    for unknown in sorted(nested.names.difference(kinds)):
        nested.refuse(unknown, ", ".join(kinds))
    thetas = fields.number("rope_theta", default=theta), fields.number("rope_local_base_freq", default=sliding_theta)
    full, sliding = (
        Fields(source, {"rope_theta": each}).merged(nested.fields(kind))
        for kind, each in zip(kinds, thetas, strict=True)
    )
    full = full.merged(fields.fields("rope_scaling"))
    return read_scaling(fields, full, head_dim), read_scaling(fields, sliding, head_dim)


_MISTRAL_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8, "eos_token_id": 2}
_SMOLLM3_DEFAULTS = {
    "num_key_value_heads": 4,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "eos_token_id": 128001,
}
_PHI3_DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "eos_token_id": 32000}
_PHI3_ROPE: dict[str, RopeKind] = {"default": "default", **dict.fromkeys(("longrope", "su", "yarn"), "longrope")}
_GLM4_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
}
_STARCODER2_DEFAULTS = {
    "num_key_value_heads": 2,
    "norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 50256,
}
_COHERE_DEFAULTS = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 255001}
_COHERE2_DEFAULTS = {**_COHERE_DEFAULTS, "sliding_window": 4096}
_GEMMA_DEFAULTS = {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True, "eos_token_id": 1}
_QWEN3_MOE_DEFAULTS = {
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_MIXTRAL_DEFAULTS = {
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "eos_token_id": 2,
}
_GLM4_MOE_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
}
_GPT_OSS_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
_MINIMAX_M2_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "rope_theta": 5e6,
    "eos_token_id": 200020,
}
_GEMMA3_DEFAULTS = {**_GEMMA_DEFAULTS, "num_key_value_heads": 4, "sliding_window": 4096}
ARCHITECTURES: dict[str, Architecture] = {
    known.model_type: known
    for known in (
        Architecture("llama", "LlamaForCausalLM", _llama, {"eos_token_id": 2}),
        Architecture("mistral", "MistralForCausalLM", _mistral, _MISTRAL_DEFAULTS),
        Architecture("ministral", "MinistralForCausalLM", _ministral, _MISTRAL_DEFAULTS),
        Architecture("qwen2", "Qwen2ForCausalLM", _qwen2, QWEN_DEFAULTS),
        Architecture("qwen3", "Qwen3ForCausalLM", _qwen3, {**QWEN_DEFAULTS, "head_dim": 128}),
        Architecture(
            "seed_oss",
            "SeedOssForCausalLM",
            _seed_oss,
            {"num_key_value_heads": 8, "head_dim": 128, "eos_token_id": 2},
        ),
        Architecture("smollm3", "SmolLM3ForCausalLM", _smollm3, _SMOLLM3_DEFAULTS),
        Architecture("phi3", "Phi3ForCausalLM", _phi3, _PHI3_DEFAULTS, partial_rope=True, rope_kinds=_PHI3_ROPE),
        Architecture("granite", "GraniteForCausalLM", _granite, {"eos_token_id": 2}),
        Architecture("olmo2", "Olmo2ForCausalLM", _olmo2, {"rms_norm_eps": 1e-5, "eos_token_id": 50279}),
        Architecture(
            "olmo3",
            "Olmo3ForCausalLM",
            _olmo3,
            {"rms_norm_eps": 1e-5, "sliding_window": 4096, "eos_token_id": 50279},
            sliding_rope=partial(ropes_by_kind, theta=5e5, sliding_theta=5e5),
        ),
        Architecture("glm", "GlmForCausalLM", _glm, _GLM4_DEFAULTS, partial_rope=True),
        Architecture("glm4", "Glm4ForCausalLM", _glm4, _GLM4_DEFAULTS, partial_rope=True),
        Architecture(
            "starcoder2",
            "Starcoder2ForCausalLM",
            _starcoder2,
            _STARCODER2_DEFAULTS,
            activation="gelu_pytorch_tanh",
            eps_field="norm_epsilon",
        ),
        Architecture("cohere", "CohereForCausalLM", _cohere, _COHERE_DEFAULTS, eps_field="layer_norm_eps"),
        Architecture("cohere2", "Cohere2ForCausalLM", _cohere2, _COHERE2_DEFAULTS, eps_field="layer_norm_eps"),
        Architecture("gemma", "GemmaForCausalLM", _gemma, _GEMMA_DEFAULTS, activation="gelu_pytorch_tanh"),
        Architecture(
            "gemma3_text",
            "Gemma3ForCausalLM",
            _gemma3,
            _GEMMA3_DEFAULTS,
            sliding_rope=partial(ropes_by_kind, theta=1e6, sliding_theta=1e4),
            activation="gelu_pytorch_tanh",
            activation_field="hidden_activation",
        ),
        Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe, _QWEN3_MOE_DEFAULTS),
        Architecture("mixtral", "MixtralForCausalLM", _mixtral, _MIXTRAL_DEFAULTS),
        Architecture("glm4_moe", "Glm4MoeForCausalLM", _glm4_moe, _GLM4_MOE_DEFAULTS, partial_rope=True),
        Architecture("gpt_oss", "GptOssForCausalLM", _gpt_oss, _GPT_OSS_DEFAULTS),
        Architecture(
            "minimax_m2", "MiniMaxM2ForCausalLM", _minimax_m2, _MINIMAX_M2_DEFAULTS, sliding_rope=_rotary_dim_ropes
        ),
    )
}
"""The families that kvrelay serves, by `model_type`."""
