"""The decoder of all supported architectures; `reading.families` says how they differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvrelay.engine.attention.base import Attention, HeadNorm, Rotation
from kvrelay.engine.models.reading.config import ModelConfig
from kvrelay.kernels.ops import Feeds, Linear, Ops

Taps = Mapping[int, Tensor]
"""Tensors by layer, [T, hidden] each, in which a step leaves the layer's input, before its norm; the number of layers
stands for the last one's output."""
NO_TAPS: Taps = MappingProxyType({})


def tap(taps: Taps, layer: int, hidden: Tensor, scale: float) -> None:
    """Leaves `hidden` times `scale` in the layer's tap, if it has one."""
    if layer in taps:
        taps[layer].copy_(hidden if scale == 1 else hidden * scale)


def taps_into(states: Tensor | None, keep: tuple[int, ...]) -> Taps:
    """Taps for these layers into states [T, layers, hidden]; none into None."""
    return NO_TAPS if states is None else {layer: states[:, place] for place, layer in enumerate(keep)}


class Norm(NamedTuple):
    """Weights of a norm: RMS norms, or layer norms if `Traits.layer_norm`."""

    weight: Tensor
    """[hidden], or [outputs] of what is normed."""
    bias: Tensor | None = None

    def times(self, scale: float, dtype: torch.dtype) -> "Norm":
        """The norm whose results are `scale` times those of this one, in `dtype`."""
        return Norm(self.weight.to(dtype) * scale, None if self.bias is None else self.bias.to(dtype) * scale)


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The weights of one layer. Projections of the same input are joined into one; norms are those of `NormNames`."""

    input_norm: Norm | None
    qkv: Linear
    """hidden -> (H + 2 Hkv) * D: all queries, then all keys, then all values."""
    qk_norm: HeadNorm | None
    joint_norms: tuple[Norm, ...]
    """Norms of all queries together and of all keys together; none if the model has no such norms."""
    output: Linear
    """H * D -> hidden."""
    output_norm: Norm | None
    mlp_norm: Norm | None
    gate_up: Linear
    """hidden -> 2 * intermediate: gate, then up; or hidden -> intermediate, without a gate."""
    down: Linear
    """intermediate -> hidden."""
    down_norm: Norm | None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All weights of a model."""

    embedding: Tensor | None
    """[vocab, hidden]; None if tokens are looked up in the head."""
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    """hidden -> vocab."""
    rotary: Tensor
    """float32 [R, 2, D / 2] of each of `ModelConfig.distinct_ropes`; see `rope.rotary`."""


class Model(Protocol):
    """`Decoder` and `NativeDecoder`; the former has the docstrings."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def embedding(self) -> Tensor | None: ...

    @property
    def norm(self) -> Tensor: ...

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, *, taps: Taps = ...) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Decoder:
    """A model, ready to run."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        """
        Raises:
            ValueError: the weights have no embedding.
        """
        if weights.embedding is None:
            raise ValueError("the weights have no embedding; tokens must be looked up in the head")
        self.config = config
        self._embedding = weights.embedding
        self._weights = weights
        self._ops = ops
        traits = config.traits
        self._embedding_scale = traits.embedding_scale / traits.residual_scale
        self._rotations = [config.distinct_ropes.index(rope) for rope in config.ropes]
        """Index of each layer's rotation among `Weights.rotary`."""
        self._last_norm = weights.norm.times(traits.logits_scale, weights.norm.weight.dtype)
        gates = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_mul}
        self._activate = gates[config.activation] if traits.gated else ops.gelu

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Weights of the layers, first to last."""
        return self._weights.layers

    @property
    def embedding(self) -> Tensor | None:
        """[vocab, hidden]; None if it is held in another form."""
        return self._embedding

    @property
    def norm(self) -> Tensor:
        """[hidden] weights of the norm before the head."""
        return self._weights.norm.weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        feeds: Feeds | None = None,
        taps: Taps = NO_TAPS,
    ) -> Tensor:
        """Runs a step's tokens through all layers and writes their KV.

        Args:
            tokens, positions: int64 [T].
            attention: has planned this step.
            feeds: tokens that are taken from there instead.
            taps: filled.

        Returns:
            [T, hidden], before the last norm, divided by `Traits.residual_scale`.
        """
        residual, update = self._run_layers(tokens, positions, attention, feeds, taps)
        hidden = residual if update is None else update + residual
        tap(taps, self.config.layers, hidden, self.config.traits.residual_scale)
        return hidden

    def forward_logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        feeds: Feeds | None = None,
        taps: Taps = NO_TAPS,
    ) -> Tensor:
        """`logits(forward(...))`, the logits of all tokens, with one launch less."""
        residual, update = self._run_layers(tokens, positions, attention, feeds, taps)
        x, hidden = self._norm(residual, update, self._last_norm)
        tap(taps, self.config.layers, hidden, self.config.traits.residual_scale)
        return self._weights.head(x).float()

    def _run_layers(
        self, tokens: Tensor, positions: Tensor, attention: Attention, feeds: Feeds | None, taps: Taps
    ) -> tuple[Tensor, Tensor | None]:
        """The residual before the last layer's MLP, and that MLP's result, both [T, hidden]; None without layers."""
        config, weights, ops = self.config, self._weights, self._ops
        heads, keys = config.heads, config.kv_heads
        residual, cos, sin = ops.embed(tokens, feeds, positions, self._embedding, weights.rotary, self._embedding_scale)
        rotations = [Rotation(*each) for each in zip(cos, sin, strict=True)]
        update: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            x, residual = self._norm(residual, update, layer.input_norm)
            tap(taps, index, residual, config.traits.residual_scale)
            qkv = layer.qkv(x)
            first = 0
            for norm in layer.joint_norms:
                part = qkv[:, first : (first := first + len(norm.weight))]
                part.copy_(self._normed(part, norm))
            qkv = qkv.view(-1, heads + 2 * keys, config.head_dim)
            seen = attention.run(index, qkv, rotations[self._rotations[index]], layer.qk_norm)
            update = self._normed(layer.output(seen), layer.output_norm)
            if config.traits.parallel:
                update += layer.down(self._activate(layer.gate_up(x)))
                continue
            x, residual = self._norm(residual, update, layer.mlp_norm)
            update = self._normed(layer.down(self._activate(layer.gate_up(x))), layer.down_norm)
        return residual, update

    def _norm(self, residual: Tensor, update: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """The norm of the sum of both, and that sum, all [T, hidden]; without a norm the sum itself."""
        if update is not None and norm is not None and not self.config.traits.layer_norm:
            return self._ops.add_rms_norm(update, residual, norm.weight, self.config.residual_eps)
        total = residual if update is None else residual + update
        return self._normed(total, norm), total

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        """The norm of each row of x, if there is one."""
        if norm is None:
            return x
        if self.config.traits.layer_norm:
            return self._ops.layer_norm(x, *norm, self.config.residual_eps)
        return self._ops.rms_norm(x, norm.weight, self.config.residual_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab] of rows of `forward`'s result, [N, hidden]."""
        return self._weights.head(self._normed(hidden, self._last_norm)).float()
