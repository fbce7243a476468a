"""The decoder that all supported architectures are: pre-norm, rotary positions, grouped queries, gated SiLU."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from kvrelay.engine.attention.protocol import Attention, HeadNorm, Rotation
from kvrelay.engine.batch import ForwardBatch
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.rope import rotations
from kvrelay.kernels.ops import Linear, Ops


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The weights of one layer. Projections that read the same input are one."""

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

    embedding: Tensor
    """[vocab, hidden]."""
    layers: tuple[Layer, ...]
    norm: Tensor
    """[hidden]."""
    head: Linear
    """hidden -> vocab."""
    frequencies: Tensor
    """float32 [D / 2]; see `rope.frequencies`."""


class Decoder:
    """A model, ready to run."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops) -> None:
        self.config = config
        self._weights = weights
        self._ops = ops

    def forward(self, batch: ForwardBatch, attention: Attention) -> Tensor:
        """The step's tokens through all layers, with their KV written; `attention` has planned this batch.

        Returns:
            [T, hidden], ahead of the last norm.
        """
        config, weights, ops = self.config, self._weights, self._ops
        eps, heads, keys = config.norm_eps, config.heads, config.kv_heads
        rotation = Rotation(*rotations(weights.frequencies, batch.positions))
        residual = functional.embedding(batch.tokens, weights.embedding)
        update: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            if update is None:
                x = ops.rms_norm(residual, layer.input_norm, eps)
            else:
                x, residual = ops.add_rms_norm(update, residual, layer.input_norm, eps)
            qkv = layer.qkv(x).view(-1, heads + 2 * keys, config.head_dim)
            x = attention.run(index, qkv, rotation, layer.qk_norm)
            x, residual = ops.add_rms_norm(layer.output(x), residual, layer.mlp_norm, eps)
            update = layer.down(ops.silu_mul(layer.gate_up(x)))
        return residual if update is None else update + residual

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab] of rows of `forward`'s result, [N, hidden]."""
        return self._weights.head(self._ops.rms_norm(hidden, self._weights.norm, self.config.norm_eps)).float()

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's largest of `logits` [N, vocab] and its place, both [N]; the first of equals. A NaN is largest."""
        values, tokens = logits.max(-1)
        return values, tokens
