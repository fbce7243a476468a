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
from kvrelay.engine.models.fast.decoder import Layer, Norm, Weights
from kvrelay.engine.models.reading.checkpoint import EMBEDDING, Checkpoint, expected_tensors, projections
from kvrelay.engine.models.reading.config import ModelConfig
from kvrelay.engine.models.reading.gguf import KEPT, coded, dequantized, in_order
from kvrelay.engine.models.reading.quantized import read_layer
from kvrelay.engine.models.reading.rope import rotary
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
CHECKED = 2**18
"""Numbers of a tensor that are looked at together, for whether they are finite."""
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
    keep: bool = True
    """Whether weights of GGUF files that can be codes come as such, and not converted to the dtype."""


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
    making = making or Making(linear)
    names = tuple(name for name in expected if name in checkpoint.tensors)
    files = TensorFiles(checkpoint, names, dtype, device, on_loaded, keep=making.keep)
    # The head first: it is large, and as it is read and laid out, nothing else is in memory yet.
    projection, embedding = _head(files, config, making)
    layers = tuple(_layer(files, config, linear, making.cache, index) for index in range(config.layers))
    norm = _norm(files, config, "model.norm")
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
        rotary=_rotary(config).to(device),
    )


def _rotary(config: ModelConfig) -> Tensor:
    """See `Weights.rotary`."""
    scale = config.traits.attention_scale * math.sqrt(config.head_dim) or 1.0
    return torch.stack([rotary(rope, config.head_dim, scale) for rope in config.distinct_ropes])


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
        *,
        keep: bool = True,
    ) -> None:
        """See `load_weights` and `Making`."""
        self._checkpoint = checkpoint
        self._entries = checkpoint.tensors
        self._dtype = dtype
        self._device = device
        self._on_loaded = on_loaded
        self._keep = keep
        self._total = sum(self._bytes(name) for name in names)
        self._unread = set(names)
        self.kept: Counter[str] = Counter()
        self.dequantized: Counter[str] = Counter()
        """Numbers of quantized GGUF tensors by type, that were read as codes or not."""

    def take(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensors on the device, converted to `dtype` or that of the weights, and joined along their first
        dimension."""
        shapes = [self._entries[name].shape for name in names]
        tensor = allocate((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype or self._dtype)
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
        """Whether the tensor becomes codes, of a type of GGUF's."""
        return self._keep and self._entries[name].dtype in KEPT

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
        # In pieces, because a sum in float32 makes a copy.
        if not all(
            math.isfinite(piece.sum(dtype=torch.float32).item())
            for piece in out.view(-1).chunk(max(1, out.numel() // CHECKED))
        ):
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


def _head(files: TensorFiles, config: ModelConfig, making: Making) -> tuple[Linear, Tensor | None]:
    """The head, and the embedding [vocab, hidden] unless tokens are looked up in the head.

    A function of its own, so that no name keeps the weight that the head was made of while the layers are loaded.
    """
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
        files.skip(EMBEDDING)
        return projection, None
    return projection, files.take(f"{EMBEDDING}.weight") if embedding is None else embedding


def _layer(files: TensorFiles, config: ModelConfig, linear: MakeLinear, cache: LayerCache, index: int) -> Layer:
    base, traits, order = f"model.layers.{index}", config.traits, config.head_order
    parts = projections(config)

    def projection(part: str, rows: Tensor | None = None) -> Linear:
        """The projection, its outputs in the order `rows` of those in the checkpoint."""
        outputs, inputs, bias = parts[part]
        name = ", ".join(f"{base}.{part}" for part in outputs)
        found = cache.load(name)
        if found is not None:
            files.skip(*(f"{base}.{part}" for part in outputs))
            return found
        weight = _weight(files, config, *((f"{base}.{name}", count) for name, count in outputs.items()), inputs=inputs)
        offsets = files.take(*(f"{base}.{name}.bias" for name in outputs)) if bias else None
        if rows is not None:
            weight = weight.outputs(rows) if isinstance(weight, CodedWeight) else weight[rows]
            offsets = None if offsets is None else offsets[rows]
        made = linear(weight, offsets)
        cache.store(name, made)
        return made

    def norm(name: str) -> Norm | None:
        return _norm(files, config, f"{base}.{name}") if name else None

    qk_norm, joint = None, tuple[Norm, ...]()
    if traits.joint_qk_norm:
        joint = tuple(Norm(files.take(f"{base}.self_attn.{name}_norm.weight")) for name in "qk")
    if traits.qk_norm:
        norms = [_norm_weight(files, config, f"{base}.self_attn.{name}_norm.weight") for name in "qk"]
        query, key = norms if order is None else [norm[order] for norm in norms]
        qk_norm = HeadNorm(
            torch.cat((query.expand(config.heads, -1), key.expand(config.kv_heads, -1))), config.norm_eps
        )
    names = traits.norms
    return Layer(
        input_norm=norm(names.input),
        qkv=projection("qkv", _head_rows(config, order)),
        qk_norm=qk_norm,
        joint_norms=joint,
        output=projection("output"),
        output_norm=norm(names.attention),
        mlp_norm=norm(names.mlp_input),
        gate_up=projection("gate_up"),
        down=projection("down"),
        down_norm=norm(names.mlp),
    )


def _norm(files: TensorFiles, config: ModelConfig, name: str) -> Norm:
    bias = files.take(f"{name}.bias") if config.traits.norm_bias else None
    return Norm(_norm_weight(files, config, f"{name}.weight"), bias)


def _norm_weight(files: TensorFiles, config: ModelConfig, name: str) -> Tensor:
    """In float32 if it is the sum of 1 and what the file has, because bfloat16 would keep little of that."""
    return files.take(name, dtype=torch.float32) + 1 if config.traits.norm_offset else files.take(name)


def _head_rows(config: ModelConfig, order: list[int] | None) -> Tensor | None:
    """int64 [(H + 2 Hkv) * D] the outputs of the QKV projection, with queries and keys in `order` (`head_order`)."""
    if order is None:
        return None
    rows = torch.arange((config.heads + 2 * config.kv_heads) * config.head_dim).view(-1, config.head_dim)
    rotated = config.heads + config.kv_heads
    rows[:rotated] = rows[:rotated, order]
    return rows.flatten()


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
