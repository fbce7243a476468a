"""From a checkpoint's files to a model that runs."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvrelay.engine.models.checkpoint import Checkpoint, expected_tensors
from kvrelay.engine.models.config import ModelConfig
from kvrelay.engine.models.decoder import Decoder, Layer, Weights
from kvrelay.engine.models.rope import frequencies
from kvrelay.kernels.ops import Linear, Ops

Progress = Callable[[float], None]


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    ops: Ops,
    progress: Progress | None = None,
) -> Decoder:
    """Loads the weights, converted to `dtype` and laid out as `ops` wants them.

    Files are memory-mapped and read tensor by tensor, so beyond the model itself one layer's weights are in memory at
    most. A tied embedding is held twice: rows of it are looked up, and as the head it is laid out for multiplying.

    Args:
        progress: told the share of bytes that is loaded, 0 to 1.

    Raises:
        ValueError: the files don't hold what `config` needs; the text names the tensor.
    """
    optional = frozenset({"lm_head.weight"}) if config.tie_embeddings else frozenset()
    expected = expected_tensors(config)
    checkpoint.verify(expected, optional)
    files = TensorFiles(checkpoint, tuple(expected), dtype, progress)
    layers = tuple(_layer(files, config, ops, index) for index in range(config.layers))
    embedding = files.take("model.embed_tokens.weight")
    head = embedding if config.tie_embeddings else files.take("lm_head.weight")
    weights = Weights(
        embedding=embedding,
        layers=layers,
        norm=files.take("model.norm.weight"),
        head=ops.linear(head, None),
        frequencies=frequencies(config.rope, config.head_dim),
    )
    return Decoder(config, weights, ops)


class TensorFiles:
    """Reads tensors out of a checkpoint, each once."""

    def __init__(
        self, checkpoint: Checkpoint, names: tuple[str, ...], dtype: torch.dtype, progress: Progress | None
    ) -> None:
        self._entries = checkpoint.tensors
        self._dtype = dtype
        self._progress = progress
        self._total = sum(self._bytes(name) for name in names)
        self._done = 0
        self._open: tuple[Path, safe_open] | None = None

    def take(self, *names: str) -> Tensor:
        """The tensors, converted and joined along their first dimension; a copy, never a view of the file."""
        parts = [self._read(name) for name in names]
        if len(parts) > 1:
            tensor = torch.cat([part.to(self._dtype) for part in parts])
        else:
            tensor = parts[0].to(self._dtype, copy=True)
        for name in names:
            self._done += self._bytes(name)
        if self._progress is not None:
            self._progress(self._done / self._total)
        return tensor

    def _read(self, name: str) -> Tensor:
        path = self._entries[name].path
        if self._open is None or self._open[0] != path:
            try:
                self._open = path, safe_open(path, "pt")
            except SafetensorError as error:
                raise ValueError(f"{path}: not a safetensors file: {error}") from error
        tensor: Tensor = self._open[1].get_tensor(name)  # type: ignore[no-untyped-call]  # safetensors is untyped
        return tensor

    def _bytes(self, name: str) -> int:
        return self._entries[name].end - self._entries[name].begin


def _layer(files: TensorFiles, config: ModelConfig, ops: Ops, index: int) -> Layer:
    base, traits = f"model.layers.{index}", config.traits

    def linear(bias: bool, *names: str) -> Linear:
        weight = files.take(*(f"{base}.{name}.weight" for name in names))
        return ops.linear(weight, files.take(*(f"{base}.{name}.bias" for name in names)) if bias else None)

    qk_norm = None
    if traits.qk_norm:
        query = files.take(f"{base}.self_attn.q_norm.weight").expand(config.heads, -1)
        key = files.take(f"{base}.self_attn.k_norm.weight").expand(config.kv_heads, -1)
        qk_norm = torch.cat((query, key))
    return Layer(
        input_norm=files.take(f"{base}.input_layernorm.weight"),
        qkv=linear(traits.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=qk_norm,
        output=linear(traits.output_bias, "self_attn.o_proj"),
        mlp_norm=files.take(f"{base}.post_attention_layernorm.weight"),
        gate_up=linear(traits.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=linear(traits.mlp_bias, "mlp.down_proj"),
    )
