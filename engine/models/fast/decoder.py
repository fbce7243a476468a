"""The decoder of all supported architectures: pre-norm, rotary positions, grouped queries, gated SiLU."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from kvrelay.engine.attention.base import Attention, HeadNorm, Rotation
from kvrelay.engine.models.reading.config import ModelConfig
from kvrelay.kernels.ops import Feeds, Linear, Ops

Taps = Mapping[int, Tensor]
"""Tensors by layer, [T, hidden] each, in which a step leaves the layer's input, before its norm; the number of layers
stands for the last one's output."""
NO_TAPS: Taps = MappingProxyType({})


def taps_into(states: Tensor | None, keep: tuple[int, ...]) -> Taps:
    """Taps for these layers into states [T, layers, hidden]; none into None."""
    return NO_TAPS if states is None else {layer: states[:, place] for place, layer in enumerate(keep)}


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The weights of one layer. Projections of the same input are joined into one."""

    input_norm: Tensor
    """[hidden]."""
    qkv: Linear
    """hidden -> (H + 2 Hkv) * D: all queries, then all keys, then all values."""
    qk_norm: HeadNorm | None
    output: Linear
    """H * D -> hidden."""
    mlp_norm: Tensor
    """[hidden]."""
    gate_up: Linear
    """hidden -> 2 * intermediate: gate, then up."""
    down: Linear
    """intermediate -> hidden."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All weights of a model."""

    embedding: Tensor | None
    """[vocab, hidden]; None if tokens are looked up in the head."""
    layers: tuple[Layer, ...]
    norm: Tensor
    """[hidden]."""
    head: Linear
    """hidden -> vocab."""
    frequencies: Tensor
    """float32 [D / 2]; see `rope.frequencies`."""


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
        return self._weights.norm

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
            [T, hidden], before the last norm.
        """
        residual, update = self._run_layers(tokens, positions, attention, feeds, taps)
        hidden = residual if update is None else update + residual
        if self.config.layers in taps:
            taps[self.config.layers].copy_(hidden)
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
        x, hidden = self._norm(residual, update, self._weights.norm)
        if self.config.layers in taps:
            taps[self.config.layers].copy_(hidden)
        return self._weights.head(x).float()

    def _run_layers(
        self, tokens: Tensor, positions: Tensor, attention: Attention, feeds: Feeds | None, taps: Taps
    ) -> tuple[Tensor, Tensor | None]:
        """The residual before the last layer's MLP, and that MLP's result, both [T, hidden]; None without layers."""
        config, weights, ops = self.config, self._weights, self._ops
        eps, heads, keys = config.norm_eps, config.heads, config.kv_heads
        residual, cos, sin = ops.embed(tokens, feeds, positions, self._embedding, weights.frequencies)
        rotation = Rotation(cos, sin)
        update: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            x, residual = self._norm(residual, update, layer.input_norm)
            if index in taps:
                taps[index].copy_(residual)
            qkv = layer.qkv(x).view(-1, heads + 2 * keys, config.head_dim)
            x = attention.run(index, qkv, rotation, layer.qk_norm)
            x, residual = ops.add_rms_norm(layer.output(x), residual, layer.mlp_norm, eps)
            update = layer.down(ops.silu_mul(layer.gate_up(x)))
        return residual, update

    def _norm(self, residual: Tensor, update: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the sum of both, and that sum, all [T, hidden]."""
        ops, eps = self._ops, self.config.norm_eps
        if update is None:
            return ops.rms_norm(residual, weight, eps), residual
        return ops.add_rms_norm(update, residual, weight, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab] of rows of `forward`'s result, [N, hidden]."""
        return self._weights.head(self._ops.rms_norm(hidden, self._weights.norm, self.config.norm_eps)).float()
