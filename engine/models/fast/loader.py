"""Loads a checkpoint's weights."""

import logging
import math
import mmap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.attention.base import HeadNorm
from kvrelay.engine.models.fast.decoder import Layer, Weights
from kvrelay.engine.models.reading.checkpoint import EMBEDDING, Checkpoint, expected_tensors
from kvrelay.engine.models.reading.config import ModelConfig
from kvrelay.engine.models.reading.gguf import KEPT, coded, dequantized, in_order
from kvrelay.engine.models.reading.quantized import read_layer
from kvrelay.engine.models.reading.rope import frequencies
from kvrelay.engine.models.reading.stored import HEAD
from kvrelay.kernels.codes import CodedWeight, alike, join
from kvrelay.kernels.ops import Linear
from kvrelay.machine.gguf import QUANTIZED

logger = logging.getLogger(__name__)

OnLoaded = Callable[[float], None]
"""Called with the loaded share of the weights, 0 to 1."""
STORED = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
PAGED_BYTES = 2**18
"""Tensors of this many bytes or more get pages of their own."""
MakeLinear = Callable[[Tensor | CodedWeight, Tensor | None], Linear]


class LayerCache(Protocol):
    """Layers that were made before, by name."""

    def load(self, name: str) -> Linear | None:
        """The layer; None if it is to be made."""
        ...

    def store(self, name: str, layer: Linear) -> None:
        """Keeps the layer, which was made."""
        ...


class NoCache:
    """Implements `LayerCache`: all layers are to be made."""

    def load(self, name: str) -> Linear | None:
        return None

    def store(self, name: str, layer: Linear) -> None:
        pass


NO_CACHE = NoCache()


@dataclass(frozen=True, slots=True)
class Making:
    """Options of `load_weights`: how the head is laid out, and which layers needn't be made."""

    head: MakeLinear
    has_embedding: bool = False
    """Whether tokens are looked up in the head if embeddings are tied, so that they aren't held twice."""
    cache: LayerCache = NO_CACHE
    """Cache of finished layers, whose weights aren't read from the files."""


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    linear: MakeLinear,
    on_loaded: OnLoaded | None = None,
    device: torch.device | str = "cpu",
    making: Making | None = None,
) -> Weights:
    """Loads the weights, converted to `dtype`, onto a device.

    Files are read tensor by tensor, so at most one layer's weights are in memory beside the model itself. A tied
    embedding is also given to `linear` as the head: it is held twice if that changes its layout.

    Args:
        linear: lays out a weight [out, in] and its bias for multiplication; see `Ops.linear`. Layers that the
            checkpoint has quantized come as codes.
        making: of the head, by `linear` unless given, and of layers that are cached.
        on_loaded: called with the loaded share of the bytes, 0 to 1.

    Raises:
        ValueError: the files don't hold what `config` needs; the text names the tensor.
    """
    optional = frozenset({"lm_head.weight"}) if config.tie_embeddings else frozenset()
    expected = expected_tensors(config)
    checkpoint.verify(expected, optional)
    files = TensorFiles(
        checkpoint, tuple(name for name in expected if name in checkpoint.tensors), dtype, device, on_loaded
    )
    # The head first: it is large, and as it is read and laid out, nothing else is in memory yet.
    making = making or Making(linear)
    projection, embedding = making.cache.load(HEAD), None
    if projection is None:
        source = EMBEDDING if config.tie_embeddings else HEAD
        weight = _weight(files, config, (source, config.vocab_size), inputs=config.hidden_size)
        if config.tie_embeddings and isinstance(weight, Tensor):
            embedding = weight
        projection = making.head(weight, None)
        making.cache.store(HEAD, projection)
    else:
        files.skip(HEAD)
    if config.tie_embeddings and making.has_embedding:
        embedding = None
        files.skip(EMBEDDING)
    elif embedding is None:
        embedding = files.take(f"{EMBEDDING}.weight")
    layers = tuple(_layer(files, config, linear, making.cache, index) for index in range(config.layers))
    norm = files.take("model.norm.weight")
    if files.kept or files.dequantized:
        logger.info(
            "GGUF: weights kept as they are stored: %s; held as %s: %s",
            _counts(files.kept),
            str(dtype).removeprefix("torch."),
            _counts(files.dequantized),
        )
    return Weights(
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=projection,
        frequencies=frequencies(config.rope, config.head_dim).to(device),
    )


def load_embedding(checkpoint: Checkpoint, dtype: torch.dtype) -> Tensor:
    """[vocab, hidden] the embedding of a checkpoint that was loaded before."""
    name = f"{EMBEDDING}.weight"
    return TensorFiles(checkpoint, (name,), dtype, "cpu", None).take(name)


class TensorFiles:
    """Reads each tensor of a checkpoint once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        names: tuple[str, ...],
        dtype: torch.dtype,
        device: torch.device | str,
        on_loaded: OnLoaded | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._entries = checkpoint.tensors
        self._dtype = dtype
        self._device = device
        self._on_loaded = on_loaded
        self._total = sum(self._bytes(name) for name in names)
        self._unread = set(names)
        self.kept: Counter[str] = Counter()
        self.dequantized: Counter[str] = Counter()
        """Numbers of quantized GGUF tensors by type, that were read as codes or not."""

    def take(self, *names: str) -> Tensor:
        """The tensors on the device, converted, and joined along their first dimension."""
        shapes = [self._entries[name].shape for name in names]
        tensor = allocate((sum(shape[0] for shape in shapes), *shapes[0][1:]), self._dtype)
        for name, part in zip(names, tensor.split_with_sizes([shape[0] for shape in shapes]), strict=True):
            self._read(name, part)
        self._count(*names)
        return tensor.to(self._device)

    def skip(self, *prefixes: str) -> None:
        """Marks the tensors whose names begin so as not needed, or read before."""
        self._count(*[name for name in self._unread if name.startswith(prefixes)])

    def stored(self, name: str) -> Tensor | None:
        """The tensor as it is in the file, uint8 [out, bytes] of a quantized type of GGUF; None if it isn't there."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        quantized = entry.dtype in QUANTIZED
        shape = (entry.shape[0], self._bytes(name) // entry.shape[0]) if quantized else entry.shape
        tensor = allocate(shape, torch.uint8 if quantized else STORED[entry.dtype])
        self._fill(name, tensor)
        self._unread.discard(name)
        return in_order(tensor, entry.interleaved_heads) if entry.interleaved_heads else tensor

    def keeps(self, name: str) -> bool:
        """Whether the tensor has a type of GGUF's that becomes codes."""
        return self._entries[name].dtype in KEPT

    def coded(self, name: str) -> CodedWeight:
        """The codes of a tensor, of which `keeps` is true.

        Raises:
            ValueError: a scale isn't finite; the text names the tensor.
        """
        entry, raw = self._entries[name], self.stored(name)
        found = None if raw is None else coded(entry.dtype, raw)
        if found is None or not found.is_finite():
            raise ValueError(f"{entry.path}: tensor {name} has a scale that is infinite or no number")
        self.kept[entry.dtype] += 1
        return found

    def _count(self, *names: str) -> None:
        self._unread.difference_update(names)
        if self._on_loaded is not None:
            self._on_loaded(1 - sum(map(self._bytes, self._unread)) / self._total)

    def _read(self, name: str, out: Tensor) -> None:
        """Fills `out`, converted.

        Raises:
            ValueError: a number is infinite or none; the text names the tensor.
        """
        entry = self._entries[name]
        if STORED.get(entry.dtype) == out.dtype and not entry.interleaved_heads:
            self._fill(name, out)
        else:
            tensor = self.stored(name)
            if entry.dtype in QUANTIZED and tensor is not None:
                tensor = dequantized(entry.dtype, tensor)
                self.dequantized[entry.dtype] += 1
            if tensor is not None:
                out.copy_(tensor)
        if not math.isfinite(out.sum(dtype=torch.float32).item()):
            raise ValueError(f"{entry.path}: tensor {name} has a number that is infinite or NaN")

    def _fill(self, name: str, out: Tensor) -> None:
        """Fills `out` with the bytes of a tensor.

        Read, not mapped: the pages of a mapped file would stay in memory beside the weights that were made of them.
        """
        entry = self._entries[name]
        data: NDArray[np.uint8] = out.view(-1).view(torch.uint8).numpy()
        left = data
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.begin)
            while len(left):
                count = file.readinto(left.data)
                if not count:
                    raise ValueError(f"{entry.path}: tensor {name} is cut short")
                left = left[count:]
        self._checkpoint.note(name, data.data)

    def _bytes(self, name: str) -> int:
        return self._entries[name].end - self._entries[name].begin


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor, in pages of its own if it is large.

    Such pages return to the system with the tensor. On the heap, each weight that is read, packed and dropped would
    leave a hole that the next one doesn't quite fit: in the end a third of the model's size.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < PAGED_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)


def _layer(files: TensorFiles, config: ModelConfig, linear: MakeLinear, cache: LayerCache, index: int) -> Layer:
    base, traits = f"model.layers.{index}", config.traits

    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}

    def projection(bias: bool, inputs: int, outputs: dict[str, int]) -> Linear:
        name = ", ".join(f"{base}.{part}" for part in outputs)
        found = cache.load(name)
        if found is not None:
            files.skip(*(f"{base}.{part}" for part in outputs))
            return found
        weight = _weight(files, config, *((f"{base}.{name}", count) for name, count in outputs.items()), inputs=inputs)
        made = linear(weight, files.take(*(f"{base}.{name}.bias" for name in outputs)) if bias else None)
        cache.store(name, made)
        return made

    qk_norm = None
    if traits.qk_norm:
        query = files.take(f"{base}.self_attn.q_norm.weight").expand(config.heads, -1)
        key = files.take(f"{base}.self_attn.k_norm.weight").expand(config.kv_heads, -1)
        qk_norm = HeadNorm(torch.cat((query, key)), config.norm_eps)
    return Layer(
        input_norm=files.take(f"{base}.input_layernorm.weight"),
        qkv=projection(traits.qkv_bias, hidden, qkv),
        qk_norm=qk_norm,
        output=projection(traits.output_bias, queries, {"self_attn.o_proj": hidden}),
        mlp_norm=files.take(f"{base}.post_attention_layernorm.weight"),
        gate_up=projection(traits.mlp_bias, hidden, {"mlp.gate_proj": inner, "mlp.up_proj": inner}),
        down=projection(traits.mlp_bias, inner, {"mlp.down_proj": hidden}),
    )


def _weight(files: TensorFiles, config: ModelConfig, *layers: tuple[str, int], inputs: int) -> Tensor | CodedWeight:
    """The weights of layers, given by name and outputs, one below the other: as codes if the files have them so.

    Raises:
        ValueError: they are quantized differently, or so that they can't be multiplied.
    """
    form, names = config.stored, ", ".join(name for name, _ in layers)
    weights = [f"{name}.weight" for name, _ in layers]
    if form is not None and form.layout == "gguf":
        kept = all(map(files.keeps, weights))
        return join(alike([files.coded(name) for name in weights])) if kept else files.take(*weights)
    covered = [form is not None and form.covers(name) for name, _ in layers]
    if form is None or not any(covered) or layers[0][0] == EMBEDDING:
        return files.take(*weights)
    if not all(covered):
        raise ValueError(f"{names}: some are quantized; allowed: all or none, because they are multiplied together")

    def weight(name: str, outputs: int) -> CodedWeight:
        return read_layer(form, lambda end: files.stored(f"{name}.{end}"), name, outputs, inputs)

    return join([weight(name, outputs) for name, outputs in layers])


def _counts(types: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in types.most_common()) or "none"
