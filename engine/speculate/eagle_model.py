"""The model of an EAGLE-3 checkpoint: one decoder layer that continues the served model's hidden states.

At position i it takes e, the embedding of token i + 1, and g, a feature of position i:

    g = fc(the served model's inputs to three of its layers at i)     where these are known
    g = h of position i - 1                                           behind the last of them
    a = g + attention([norm(e), norm(g)])                             queries, keys and values from both
    h = a + mlp(norm(a))
    logits of token i + 2 = U norm(h)                                 of the tokens that U has, the others never

Source: Li et al., EAGLE-3, 2025, section 3.1.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvrelay.engine.attention.base import Attention, Rotation
from kvrelay.engine.models.fast.parts import Parts
from kvrelay.engine.models.reading.config import ModelConfig
from kvrelay.engine.models.reading.fields import Fields, read_json
from kvrelay.engine.models.reading.positions import RopeConfig, read_rope
from kvrelay.engine.models.reading.rope import rotary
from kvrelay.engine.speculate.tensors import Tensors
from kvrelay.kernels.ops import Linear

FILE = "model.safetensors"
LAYER = "midlayer"
STATES = 3


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Fields of an EAGLE-3 checkpoint's config.json."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    draft_vocab_size: int
    """Number of tokens that the layer can guess."""
    norm_eps: float
    norm_before_residual: bool
    """Whether g is normed first, and added as such."""
    layers: tuple[int, ...]
    """Layers of the served model whose inputs the layer takes; as `Proposer.layers`."""


@dataclass(frozen=True, slots=True, eq=False)
class EagleWeights:
    """Weights of an EAGLE-3 layer; norms are of the type of activations."""

    embedding: Tensor
    """[vocab, hidden]."""
    fuse: Linear
    """STATES * hidden of the served model -> hidden."""
    token_norm: Tensor
    feature_norm: Tensor
    qkv: Linear
    """2 * hidden -> (H + 2 Hkv) * D."""
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    norm: Tensor
    head: Linear
    """hidden -> draft vocab."""
    targets: Tensor | None
    """int64 [draft vocab] the served model's id of each token that can be guessed; None if they are the same."""
    rotary: Tensor
    """As `Weights.rotary`, of one kind."""


class EagleModel:
    """EAGLE-3 layer that is ready to run."""

    def __init__(self, config: EagleConfig, weights: EagleWeights, target: ModelConfig, parts: Parts) -> None:
        """`target` is the served model's config."""
        self.config = config
        self.layers, self.heads = config.layers, config.heads
        self.states_width = target.hidden_size
        """Width of the served model's hidden states."""
        self._weights = weights
        self._vocab_size = target.vocab_size
        self._ops, self._activations = parts.ops, parts.activations

    def fuse(self, states: Tensor) -> Tensor:
        """[T, hidden] the features of states [T, STATES, hidden of the served model]."""
        return self._weights.fuse(states.flatten(1).to(self._activations))

    def forward(self, features: Tensor, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Runs tokens through the layer and writes their KV.

        Args:
            features: [T, hidden] of the positions before the tokens; overwritten.
            tokens, positions: int64 [T].
            attention: has planned this step.

        Returns:
            [T, hidden]: h.
        """
        config, weights, ops = self.config, self._weights, self._ops
        embedded, cos, sin = ops.embed(tokens, None, positions, weights.embedding, weights.rotary)
        tokens_in = ops.rms_norm(embedded.to(self._activations), weights.token_norm, config.norm_eps)
        normed = ops.rms_norm(features, weights.feature_norm, config.norm_eps)
        residual = normed if config.norm_before_residual else features
        qkv = weights.qkv(torch.cat((tokens_in, normed), -1)).view(
            -1, config.heads + 2 * config.kv_heads, config.head_dim
        )
        seen = attention.run(0, qkv, Rotation(cos[0], sin[0]), None)
        x, hidden = ops.add_rms_norm(weights.output(seen), residual, weights.mlp_norm, config.norm_eps)
        return hidden + weights.down(ops.silu_mul(weights.gate_up(x)))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab] of the served model's tokens, of rows of `forward`'s result."""
        weights = self._weights
        logits = weights.head(self._ops.rms_norm(hidden, weights.norm, self.config.norm_eps)).float()
        if weights.targets is None:
            return logits
        return logits.new_full((len(logits), self._vocab_size), -torch.inf).index_copy_(1, weights.targets, logits)


def load_eagle(folder: Path, target: ModelConfig, embedding: Tensor, parts: Parts) -> EagleModel:
    """The model in `folder`.

    Args:
        target: the served model's config.
        embedding: the served model's, [vocab, hidden], for a checkpoint without one.

    Raises:
        ValueError: it can't be used with that model; names the field or tensor, and what is allowed or expected.
    """
    fields = Fields("config.json", read_json(folder / "config.json"))
    config, rope = _read_config(fields, target)
    tensors = Tensors(folder, FILE, parts.device)
    for old, new in (("model.", ""), ("layers.0.", f"{LAYER}.")):
        tensors.rename(old, new)
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.draft_vocab_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def norm(name: str) -> Tensor:
        return tensors.take(f"{name}.weight", hidden).to(parts.activations)

    def linear(inputs: int, outputs: dict[str, int]) -> Linear:
        """Makes one linear layer of several projections, given by name and outputs, one below the other."""
        weights = [tensors.take(f"{name}.weight", count, inputs) for name, count in outputs.items()]
        return parts.linear(torch.cat(weights).to(parts.dtype), None)

    if "embed_tokens.weight" in tensors.left:
        embedding = tensors.take("embed_tokens.weight", target.vocab_size, hidden).to(parts.dtype)
    elif hidden != target.hidden_size:
        tensors.take("embed_tokens.weight", target.vocab_size, hidden)
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    weights = EagleWeights(
        embedding=embedding,
        fuse=linear(STATES * target.hidden_size, {"fc": hidden}),
        token_norm=norm(f"{LAYER}.input_layernorm"),
        feature_norm=norm(f"{LAYER}.hidden_norm"),
        qkv=linear(
            2 * hidden, {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
        ),
        output=linear(queries, {f"{attention}.o_proj": hidden}),
        mlp_norm=norm(f"{LAYER}.post_attention_layernorm"),
        gate_up=linear(hidden, {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}),
        down=linear(inner, {f"{mlp}.down_proj": hidden}),
        norm=norm("norm"),
        head=parts.head(tensors.take("lm_head.weight", vocab, hidden).to(parts.dtype), None),
        targets=_targets(tensors, vocab, target.vocab_size),
        rotary=rotary(rope, config.head_dim)[None].to(parts.device),
    )
    tensors.finish()
    return EagleModel(config, weights, target, parts)


def _read_config(fields: Fields, target: ModelConfig) -> tuple[EagleConfig, RopeConfig]:
    """The config in the files of EAGLE's authors and SpecForge, flat, or of speculators, in two levels."""
    whole = fields
    if fields.get("speculators_model_type") is not None:
        fields.choice("speculators_model_type", ("eagle3",))
        fields = whole.fields("transformer_layer_config") or whole.refuse("transformer_layer_config", "an object")
    fields.choice("model_type", ("llama",), default="llama")
    fields.choice("num_hidden_layers", (1,))
    fields.choice("hidden_act", ("silu",), default="silu")
    for name in ("attention_bias", "qkv_bias", "mlp_bias", "use_sliding_window"):
        fields.choice(name, (False,), default=False)
    for source in (whole, fields):
        if source.get("quantization_config") is not None:
            source.refuse("quantization_config", "none; with the option quantization it is quantized as the model is")
    fields.choice("vocab_size", (target.vocab_size,))
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    taken = whole.integer("target_hidden_size", default=hidden)
    if taken != target.hidden_size:
        name = "target_hidden_size" if whole.get("target_hidden_size") is not None else "hidden_size"
        (whole if name == "target_hidden_size" else fields).refuse(
            name, f"that of the served model, {target.hidden_size}"
        )
    kv_heads = fields.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    eagle = whole.fields("eagle_config")
    if eagle is not None:
        eagle.choice("use_aux_hidden_state", (True,), default=True)
    config = EagleConfig(
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", default=hidden // heads),
        draft_vocab_size=whole.integer("draft_vocab_size", default=target.vocab_size),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        norm_before_residual=whole.boolean("norm_before_residual", False),
        layers=_layers(whole, eagle, target),
    )
    return config, read_rope(fields, config.head_dim)


def _layers(fields: Fields, eagle: Fields | None, target: ModelConfig) -> tuple[int, ...]:
    """The layers that the checkpoint names, or those that EAGLE-3 was published with."""
    name, count = "eagle_aux_hidden_state_layer_ids", target.layers
    source = eagle if eagle is not None and eagle.get(name) is not None else fields
    layers = source.get(name)
    if layers is None:
        layers = sorted({2, count // 2, count - 3})
        if len(layers) != STATES or layers[0] < 0:
            source.refuse(name, f"{STATES} layers by number, because the served model has only {count}")
    known = isinstance(layers, list) and all(type(layer) is int and 0 <= layer <= count for layer in layers)
    if not known or len(set(layers)) != STATES:
        source.refuse(name, f"a list of {STATES} different integers from 0 to {count}")
    return tuple(layers)


def _targets(tensors: Tensors, draft_vocab: int, vocab: int) -> Tensor | None:
    """The served model's token ids: each token's own number plus its entry in `d2t`."""
    if "t2d" in tensors.left:
        # The same as a mask of the served model's tokens.
        tensors.take("t2d", vocab)
    if draft_vocab == vocab and "d2t" not in tensors.left:
        return None
    shifts = tensors.take("d2t", draft_vocab).long()
    targets = torch.arange(draft_vocab, device=shifts.device) + shifts
    if int(targets.min()) < 0 or int(targets.max()) >= vocab or len(set(targets.tolist())) != draft_vocab:
        raise ValueError(f"{tensors.path}: d2t doesn't give each token an id of its own from 0 to {vocab - 1}")
    return targets
