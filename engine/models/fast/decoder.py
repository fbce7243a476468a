"""The decoder of all supported architectures; `reading.families` says how they differ."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.attention.base import Attention, HeadNorm, Rotation
from kvrelay.engine.models.reading.config import ModelConfig
from kvrelay.engine.ranks.collective import ALONE, Place
from kvrelay.engine.ranks.spans import even_span
from kvrelay.kernels.ops import Feeds, Linear, Ops
from kvrelay.kernels.reference import fed_tokens, rotations

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
    sinks: Tensor | None
    """float32 [H]; see `reference.paged_attention`; None if the model has none."""
    output: Linear
    """H * D -> hidden."""
    output_norm: Norm | None
    mlp_norm: Norm | None
    gate_up: Linear
    """hidden -> 2 * intermediate: gate, then up; or hidden -> intermediate, without a gate."""
    down: Linear
    """intermediate -> hidden."""
    down_norm: Norm | None
    router: Linear | None = None
    """hidden -> experts: in a layer with experts, whose `gate_up` and `down` are those of all of them, one below the
    other."""
    router_bias: Tensor | None = None
    """float32 [experts]; see `reference.route`."""
    shared_gate_up: Linear | None = None
    shared_down: Linear | None = None
    """Products of an MLP whose result is added to the experts'; None if there is none."""


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All weights of a model, or those of one rank: `slices` has what they are."""

    embedding: Tensor | None
    """[vocab, hidden]; None if tokens are looked up in the head, or by the first pipeline stage."""
    layers: tuple[Layer, ...]
    norm: Norm | None
    """The last norm; None if the first stage has it."""
    head: Linear | None
    """hidden -> vocab; None if the first stage has it."""
    rotary: Tensor
    """float32 [R, 2, D / 2] of each of `ModelConfig.distinct_ropes`; see `rope.rotary`."""


class Model(Protocol):
    """`Decoder` and `NativeDecoder`; the former has the docstrings."""

    @property
    def config(self) -> ModelConfig:
        """Config of what this rank computes."""
        ...

    @property
    def place(self) -> Place: ...

    @property
    def embedding(self) -> Tensor | None: ...

    @property
    def norm(self) -> Tensor: ...

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, *, taps: Taps = ...) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Decoder:
    """A model, or one rank's part of it, ready to run.

    Ranks of a stage add up what they have of a layer's projections to the hidden size. All calls are made by all of
    them, with the same tokens.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops, place: Place = ALONE, *, gathers: bool = False
    ) -> None:
        """
        Args:
            config: of the rank (`ModelConfig.for_rank`).
            weights: of the rank.
            gathers: whether each rank gets the logits of all tokens, and not of its own part of the vocabulary.

        Raises:
            ValueError: the weights have no embedding, and the rank is of the first stage; or the layers have experts,
                which only `NativeDecoder` computes.
        """
        if config.traits.experts is not None:
            raise ValueError("layers of experts need the native CPU kernels; allowed otherwise: model_path general")
        if weights.embedding is None and place.stage == 0:
            raise ValueError("the weights have no embedding; tokens must be looked up in the head")
        self.config = config
        self.place = place
        self._vocabulary = even_span(config.vocab_size, place)
        ranks = [replace(place, rank=rank) for rank in range(place.degree.tensor)]
        self._tokens = [even_span(config.vocab_size, rank).count for rank in ranks] if gathers else []
        """Tokens of each rank of the stage, if each gets all logits."""
        self.embedding = weights.embedding
        """[vocab, hidden]; None if it is held in another form."""
        self._weights = weights
        self._ops = ops
        traits = config.traits
        self._embedding_scale = traits.embedding_scale / traits.residual_scale
        self._rotations = [config.distinct_ropes.index(rope) for rope in config.ropes]
        """Index of each layer's rotation among `Weights.rotary`."""
        norm = weights.norm
        self._last_norm = None if norm is None else norm.times(traits.logits_scale, norm.weight.dtype)
        gates = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_mul}
        self._activate = gates[config.activation] if traits.gated else ops.gelu

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Weights of the layers, first to last."""
        return self._weights.layers

    @property
    def norm(self) -> Tensor:
        """[hidden] weights of the norm before the head.

        Raises:
            ValueError: the first pipeline stage has it.
        """
        if self._weights.norm is None:
            raise ValueError(f"the norm before the head is on another stage than {self.place.stage}")
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
            tokens: int64 [T]; for a later pipeline stage the result of the one before, [T, hidden].
            positions: int64 [T].
            attention: has planned this step.
            feeds: tokens that are taken from there instead.
            taps: filled.

        Returns:
            [T, hidden], before the last norm, divided by `Traits.residual_scale`.
        """
        residual, update = self._run_layers(tokens, positions, attention, feeds, taps)
        hidden = residual if update is None else update + residual
        tap(taps, self.config.first_layer + self.config.layers, hidden, self.config.traits.residual_scale)
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
        tap(taps, self.config.first_layer + self.config.layers, hidden, self.config.traits.residual_scale)
        return self._head(x)

    def _run_layers(
        self, tokens: Tensor, positions: Tensor, attention: Attention, feeds: Feeds | None, taps: Taps
    ) -> tuple[Tensor, Tensor | None]:
        """The residual before the last layer's MLP, and that MLP's result, both [T, hidden]; None without layers."""
        config = self.config
        heads, keys = config.heads, config.kv_heads
        residual, cos, sin = self._begin(tokens, feeds, positions)
        turns = [Rotation(*each) for each in zip(cos, sin, strict=True)]
        update: Tensor | None = None
        for index, layer in enumerate(self._weights.layers):
            x, residual = self._norm(residual, update, layer.input_norm)
            tap(taps, config.first_layer + index, residual, config.traits.residual_scale)
            qkv = layer.qkv(x)
            if layer.joint_norms:
                self._norm_jointly(qkv, layer.joint_norms)
            qkv = qkv.view(-1, heads + 2 * keys, config.head_dim)
            seen = attention.run(index, qkv, turns[self._rotations[index]], layer.qk_norm)
            if config.traits.parallel:
                update = self._sum(layer.output(seen).add_(layer.down(self._activate(layer.gate_up(x)))))
                continue
            update = self._normed(self._sum(layer.output(seen)), layer.output_norm)
            x, residual = self._norm(residual, update, layer.mlp_norm)
            update = self._normed(self._sum(layer.down(self._activate(layer.gate_up(x)))), layer.down_norm)
        return residual, update

    def _begin(self, tokens: Tensor, feeds: Feeds | None, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first layer's input [T, hidden], and cos and sin of the positions, as `Ops.embed`."""
        rotary, table, part = self._weights.rotary, self.embedding, self._vocabulary
        if table is None:
            return tokens, *rotations(positions, rotary)
        if part.is_whole:
            return self._ops.embed(tokens, feeds, positions, table, rotary, self._embedding_scale)
        own = fed_tokens(tokens, feeds) - part.begin
        others = (own < 0) | (own >= part.count)
        found, cos, sin = self._ops.embed(
            own.masked_fill(others, 0), None, positions, table, rotary, self._embedding_scale
        )
        return self._sum(found.masked_fill(others[:, None], 0)), cos, sin

    def _sum(self, part: Tensor) -> Tensor:
        """The sum of what the stage's ranks have."""
        return self.place.group.sum(part.contiguous())

    def _norm_jointly(self, qkv: Tensor, norms: tuple[Norm, ...]) -> None:
        """Norms all queries together, and all keys, in place; `qkv` is [T, outputs] of this rank."""
        ends = np.cumsum([len(norm.weight) for norm in norms]).tolist()
        parts = qkv.tensor_split(ends, 1)
        if self.place.group.size == 1:
            for part, norm in zip(parts, norms, strict=False):
                part.copy_(self._normed(part, norm))
            return
        # All ranks have as many numbers, so the mean of all is that of their means; copies of a head change nothing.
        means = self._sum(torch.stack([part.float().square().mean(1) for part in parts[: len(norms)]]))
        factors = (means / self.place.group.size + self.config.residual_eps).rsqrt()
        for part, factor, norm in zip(parts, factors, norms, strict=False):
            part.copy_(part.float() * factor[:, None] * norm.weight.float())

    def _head(self, x: Tensor) -> Tensor:
        """float32 logits of the rank's part of the vocabulary, or of all tokens if it gathers them."""
        if self._weights.head is None:
            raise ValueError(f"the head is on another stage than {self.place.stage}")
        own = self._weights.head(x)
        if len(self._tokens) < 2:
            return own.float()[:, : self._vocabulary.count]
        # Before they become float32, which takes twice the bytes.
        parts = self.place.group.gather(own[:, : self._vocabulary.size].contiguous())
        return torch.cat([part[:, :count] for part, count in zip(parts, self._tokens, strict=True)], 1).float()

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
        """float32 [N, vocab] of rows of `forward`'s result, [N, hidden]; of the rank's part of the vocabulary only,
        unless it gathers them."""
        return self._head(self._normed(hidden, self._last_norm))
