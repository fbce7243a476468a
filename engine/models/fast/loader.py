"""Loads a checkpoint's weights."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.attention.base import HeadNorm
from kvrelay.engine.models.fast.decoder import Layer, Norm, Weights
from kvrelay.engine.models.fast.slices import NORM, SUMMED, Part, Slices
from kvrelay.engine.models.reading.checkpoint import (
    EMBEDDING,
    SIZES,
    Checkpoint,
    TensorEntry,
    expected_tensors,
    optional_tensors,
    projections,
)
from kvrelay.engine.models.reading.config import ModelConfig
from kvrelay.engine.models.reading.gguf import KEPT, coded, dequantized, in_order
from kvrelay.engine.models.reading.packed_cache import PackedCache
from kvrelay.engine.models.reading.quantized import finite, mxfp4, read_layer
from kvrelay.engine.models.reading.rope import rotary
from kvrelay.engine.models.reading.stored import HEAD
from kvrelay.engine.ranks.spans import Span, whole
from kvrelay.kernels.codes import CodedWeight, QuantizeColumns, alike, allocate, join, outputs_or_zeros
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
PIECE_BYTES = 2**20
"""Bytes, about, of the rows that are read at once of a tensor whose columns are divided."""
CHECKED = 2**18
"""Numbers of a tensor that are looked at together, for whether they are finite."""
MakeLinear = Callable[[Tensor | CodedWeight, Tensor | None], Linear]


@dataclass(frozen=True, slots=True)
class Making:
    """Options of `load_weights`: how the head is laid out, which layers are made already, and which part is loaded."""

    head: MakeLinear
    router: MakeLinear | None = None
    """Lays out routers of experts, which aren't quantized; None as all other layers."""
    has_embedding: bool = False
    """Whether tokens are looked up in the head if embeddings are tied, so that they aren't held twice."""
    cache: PackedCache | None = None
    """Cache of finished layers, whose weights aren't read from the files; None for no cache."""
    keep: bool = True
    """Whether weights of GGUF files that can be codes come as such, and not converted to the dtype."""
    slices: Slices | None = None
    """The part of the model that is loaded; None for all."""
    columns: QuantizeColumns | None = None
    """Quantizes weights whose columns are divided; None if `linear` needs no more than the columns for that."""


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
    expected = expected_tensors(config)
    checkpoint.verify(expected, optional_tensors(checkpoint, config))
    making = making or Making(linear)
    slices = making.slices or Slices.of(config)
    names = tuple(name for name in expected if name in checkpoint.tensors and slices.reads(name))
    files = TensorFiles(checkpoint, names, dtype, device, on_loaded, keep=making.keep)
    # The head first: it is large, and as it is read and laid out, nothing else is in memory yet.
    projection, embedding = _head(files, slices, making) if slices.has_vocabulary else (None, None)
    if slices.has_vocabulary and config.tie_embeddings and making.has_embedding:
        embedding = None
        files.skip(EMBEDDING)
    elif slices.has_vocabulary and embedding is None:
        embedding = files.take(Part(f"{EMBEDDING}.weight", slices.vocabulary))
    first = slices.own.first_layer
    layers = tuple(_layer(files, slices, linear, making, first + index) for index in range(slices.own.layers))
    norm = _norm(files, config, NORM) if slices.has_vocabulary else None
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
        rotary=_rotary(slices.own).to(device),
    )


def _head(files: "TensorFiles", slices: Slices, making: Making) -> tuple[Linear, Tensor | None]:
    """The head, and the embedding if it was read for it."""
    embedding: Tensor | None = None

    def make() -> Linear:
        nonlocal embedding
        weight = _weight(files, slices.config, [slices.head], whole(slices.config.hidden_size))
        embedding = weight if slices.config.tie_embeddings and isinstance(weight, Tensor) else None
        return making.head(weight, None)

    head = _cached(files, making.cache, HEAD, [HEAD], make)
    return head, embedding


def _cached(
    files: "TensorFiles", cache: PackedCache | None, name: str, tensors: Iterable[str], make: Callable[[], Linear]
) -> Linear:
    """The layer of this name from the cache, whose `tensors` aren't read then; else what `make` makes, which the cache
    keeps."""
    found = None if cache is None else cache.load(name)
    if found is not None:
        files.skip(*tensors)
        return found
    made = make()
    if cache is not None:
        cache.store(name, made)
    return made


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

    def take(
        self,
        *parts: str | Part,
        columns: Span | None = None,
        dtype: torch.dtype | None = None,
        largest: Tensor | None = None,
    ) -> Tensor:
        """Tensors, or some rows of them, on the device, joined along their first dimension.

        Args:
            columns: of matrices; None for all.
            dtype: of the result, if it isn't that of the weights.
            largest: float32 [rows], filled with the largest magnitude of each row, over all columns of the checkpoint.
        """
        found = [self._part(part) for part in parts]
        columns = None if columns is None or columns.is_whole else columns
        shape = self._entries[found[0].name].shape
        rest = shape[1:] if columns is None else (columns.size,)
        sizes = [part.rows.size for part in found]
        tensor = allocate((sum(sizes), *rest), dtype or self._dtype)
        every = None if largest is None else largest.zero_().split_with_sizes(sizes)
        for index, (part, out) in enumerate(zip(found, tensor.split_with_sizes(sizes), strict=True)):
            self._read(part, columns, out, None if every is None else every[index])
        self._count(*[part.name for part in found])
        return tensor.to(self._device)

    def _part(self, part: str | Part) -> Part:
        return Part(part, whole(self._entries[part].shape[0])) if isinstance(part, str) else part

    def skip(self, *prefixes: str) -> None:
        """Marks the tensors whose names begin so as not needed, or read before."""
        self._count(*[name for name in self._unread if name.startswith(prefixes)])

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; None if it isn't there."""
        entry = self._entries.get(name)
        return None if entry is None else entry.shape

    def stored(self, name: str, rows: Span | None = None, columns: Span | None = None) -> Tensor:
        """A tensor as it is in the file, uint8 [out, bytes] of a quantized type of GGUF.

        Args:
            rows, columns: those that are read; None for all.

        Raises:
            ValueError: columns of a quantized type that aren't whole blocks; the text names the tensor.
        """
        entry = self._entries[name]
        rows = rows or whole(entry.shape[0] if entry.shape else 1)
        begin, end = self._columns(name, columns)
        raw = allocate((rows.count, end - begin), torch.uint8)
        if columns is None:
            self._fill(name, rows, raw.view(-1))
        else:
            for first, piece in self._pieces(name, rows):
                raw[first : first + len(piece)] = piece[:, begin:end]
        self._unread.discard(name)
        tensor = raw
        if entry.dtype not in QUANTIZED:
            tensor = raw.view(-1).view(STORED[entry.dtype])
            rest = entry.shape[1:] if columns is None else (columns.count,)
            tensor = tensor.view((rows.count, *rest) if entry.shape else ())
        if not entry.interleaved_heads:
            return tensor
        return in_order(tensor, entry.interleaved_heads * rows.count // entry.shape[0])

    def keeps(self, name: str) -> bool:
        """Whether the tensor becomes codes, of a type of GGUF's."""
        return self._keep and self._entries[name].dtype in KEPT

    def zeros(self, rows: int, columns: int) -> Tensor:
        """A weight of zeros, on the device: the part of a rank that has nothing of a narrow layer."""
        return torch.zeros(rows, columns, dtype=self._dtype, device=self._device)

    def coded(self, part: Part, columns: Span) -> CodedWeight:
        """The codes of a part of a tensor, of which `keeps` is true.

        Raises:
            ValueError: a scale isn't finite; the text names the tensor.
        """
        name, entry = part.name, self._entries[part.name]
        found = coded(entry.dtype, self.stored(name, part.rows, None if columns.is_whole else columns))
        if found is None or not found.is_finite():
            raise ValueError(f"{entry.path}: tensor {name} has a scale that is infinite or no number")
        self.kept[entry.dtype] += 1
        return found

    def _count(self, *names: str) -> None:
        self._unread.difference_update(names)
        if self._on_loaded is not None:
            self._on_loaded(1 - sum(map(self._bytes, self._unread)) / self._total)

    def _read(self, part: Part, columns: Span | None, out: Tensor, largest: Tensor | None) -> None:
        """Fills `out` with a part, converted, and with zeros behind it; `largest` as for `take`.

        Raises:
            ValueError: a number is infinite or none; the text names the tensor.
        """
        name, rows, entry = part.name, part.rows, self._entries[part.name]
        filled = out[: rows.count] if columns is None else out[: rows.count, : columns.count]
        if filled.shape != out.shape:
            out.zero_()
        if entry.dtype in QUANTIZED:
            filled.copy_(dequantized(entry.dtype, self.stored(name, rows, columns)))
            self.dequantized[entry.dtype] += 1
        elif entry.interleaved_heads or (columns is None and STORED[entry.dtype] != out.dtype):
            filled.copy_(self.stored(name, rows))
        elif columns is None:
            self._fill(name, rows, filled.view(-1).view(torch.uint8))
        else:
            for first, piece in self._pieces(name, rows):
                numbers = piece.view(-1).view(STORED[entry.dtype]).view(len(piece), -1).to(out.dtype)
                filled[first : first + len(piece)] = numbers[:, columns.begin : columns.end]
                if largest is not None:
                    largest[first : first + len(piece)] = numbers.float().abs().amax(1)
        # In pieces, because a sum in float32 makes a copy; `out` has zeros beside what was filled.
        if not all(
            math.isfinite(piece.sum(dtype=torch.float32).item())
            for piece in out.view(-1).chunk(max(1, out.numel() // CHECKED))
        ):
            raise ValueError(f"{entry.path}: tensor {name} has a number that is infinite or NaN")

    def _columns(self, name: str, columns: Span | None) -> tuple[int, int]:
        """Begin and end of columns among the bytes of a row.

        Raises:
            ValueError: they aren't whole blocks of the tensor's type.
        """
        entry = self._entries[name]
        if columns is None:
            return 0, self._row_bytes(entry)
        block, size = 1, SIZES.get(entry.dtype, 0)
        if entry.dtype in QUANTIZED:
            _, block, size = QUANTIZED[entry.dtype]
        if columns.begin % block or columns.end % block:
            raise ValueError(
                f"{entry.path}: tensor {name} has blocks of {block} columns in {entry.dtype}, and a rank would have"
                f" {columns.begin} to {columns.end}; allowed: a smaller tensor_parallel"
            )
        return columns.begin // block * size, columns.end // block * size

    def _pieces(self, name: str, rows: Span) -> Iterator[tuple[int, Tensor]]:
        """Rows of a tensor, uint8 [n, bytes of a row], a few at a time: the number of the first one among `rows`, and
        the rows, which are valid until the next ones."""
        width = self._row_bytes(self._entries[name])
        step = max(1, min(rows.count, PIECE_BYTES // width))
        buffer = allocate((step, width), torch.uint8)
        for first in range(0, rows.count, step):
            begin, count = rows.begin + first, min(step, rows.count - first)
            self._fill(name, Span(begin, begin + count, count, rows.of), buffer[:count].view(-1))
            yield first, buffer[:count]

    def _fill(self, name: str, rows: Span, out: Tensor) -> None:
        """Fills `out`, uint8, with the bytes of some rows of a tensor.

        Read, not mapped: the pages of a mapped file would stay in memory beside the weights that were made of them.
        """
        entry = self._entries[name]
        data: NDArray[np.uint8] = out.numpy()
        left = data
        with entry.path.open("rb", buffering=0) as file:
            file.seek(entry.begin + rows.begin * self._row_bytes(entry))
            while len(left):
                count = file.readinto(left.data)
                if not count:
                    raise ValueError(f"{entry.path}: tensor {name} is cut short")
                left = left[count:]
        if len(data) == self._bytes(name):
            self._checkpoint.note(name, data.data)

    def _row_bytes(self, entry: TensorEntry) -> int:
        return (entry.end - entry.begin) // (entry.shape[0] if entry.shape else 1)

    def _bytes(self, name: str) -> int:
        return self._entries[name].end - self._entries[name].begin


def _layer(files: TensorFiles, slices: Slices, linear: MakeLinear, making: Making, index: int) -> Layer:
    config, own = slices.config, slices.own
    base, traits, order = f"model.layers.{index}", config.traits, config.head_order
    parts = projections(config, index)

    def projection(part: str, order: Tensor | None = None) -> Linear:
        """The projection, its outputs in the order of those in the checkpoint unless `order` is given."""
        outputs = [Part(f"{base}.{name}", rows) for name, rows in slices.outputs(part, index)]
        names = list(dict.fromkeys(output.name for output in outputs))

        def make() -> Linear:
            weight = _weight(files, config, outputs, slices.inputs(part, index), making.columns)
            offsets = None
            if parts[part].bias and not (part in SUMMED and slices.place.group.place):
                offsets = files.take(*[Part(f"{output.name}.bias", output.rows) for output in outputs])
            if order is not None:
                weight = weight.outputs(order) if isinstance(weight, CodedWeight) else weight[order]
                offsets = None if offsets is None else offsets[order]
            return (making.router or linear if part == "router" else linear)(weight, offsets)

        return _cached(files, making.cache, ", ".join(names), names, make)

    def joined(part: str) -> Linear:
        """One product of all experts, which is one tensor in the checkpoint."""
        (output,) = parts[part].outputs
        name = f"{base}.{output}"
        return _cached(
            files, making.cache, name, [name], lambda: linear(*_joined_experts(files, slices, making, part, name))
        )

    def norm(name: str) -> Norm | None:
        return _norm(files, config, f"{base}.{name}") if name else None

    qk_norm, joint = None, tuple[Norm, ...]()
    if traits.joint_qk_norm:
        norms = [
            files.take(Part(f"{base}.self_attn.{name}_norm.weight", rows))
            for name, rows in (("q", slices.queries), ("k", slices.keys))
        ]
        if order is not None:
            norms = [norm.view(-1, config.head_dim)[:, order].flatten() for norm in norms]
        joint = tuple(map(Norm, norms))
    if traits.qk_norm:
        norms = [_norm_weight(files, config, f"{base}.self_attn.{name}_norm.weight") for name in "qk"]
        query, key = norms if order is None else [norm[order] for norm in norms]
        qk_norm = HeadNorm(torch.cat((query.expand(own.heads, -1), key.expand(own.kv_heads, -1))), config.norm_eps)
    names = traits.norms
    bias = ""
    product: Callable[[str], Linear] = projection
    if traits.experts is not None and traits.experts.in_layer(index):
        bias = traits.experts.bias
        product = joined if traits.experts.joined else projection
    return Layer(
        input_norm=norm(names.input),
        qkv=projection("qkv", _head_rows(own, order)),
        qk_norm=qk_norm,
        joint_norms=joint,
        sinks=files.take(Part(f"{base}.self_attn.sinks", slices.heads), dtype=torch.float32) if traits.sinks else None,
        output=projection("output"),
        output_norm=norm(names.attention),
        mlp_norm=norm(names.mlp_input),
        gate_up=product("gate_up"),
        down=product("down"),
        down_norm=norm(names.mlp),
        router=projection("router") if "router" in parts else None,
        router_bias=files.take(f"{base}.{bias}", dtype=torch.float32) if bias else None,
        shared_gate_up=projection("shared_gate_up") if "shared_gate_up" in parts else None,
        shared_down=projection("shared_down") if "shared_down" in parts else None,
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


def _weight(
    files: TensorFiles,
    config: ModelConfig,
    layers: list[Part],
    inputs: Span,
    quantize: QuantizeColumns | None = None,
) -> Tensor | CodedWeight:
    """Rows of the weights of layers, one below the other: as codes if the files have them so.

    Args:
        inputs: the columns.
        quantize: see `Making.columns`.

    Raises:
        ValueError: they are quantized differently, or so that they can't be multiplied or divided.
    """
    form, names = config.stored, ", ".join(part.name for part in layers)
    weights = [Part(f"{name}.weight", rows) for name, rows in layers]
    if not inputs.count or not layers[0].rows.count:
        return files.zeros(sum(part.rows.size for part in layers), inputs.size)
    if form is not None and form.layout == "gguf":
        if all(files.keeps(part.name) for part in weights):
            return join(alike([files.coded(part, inputs).padded(part.rows.size, inputs.size) for part in weights]))
        return files.take(*weights, columns=inputs)
    covered = [form is not None and form.covers(name) for name, _ in layers]
    if form is None or not any(covered) or layers[0].name == EMBEDDING:
        if quantize is None or inputs.is_whole:
            return files.take(*weights, columns=inputs)
        largest = torch.empty(sum(part.rows.size for part in weights))
        weight = files.take(*weights, columns=inputs, largest=largest)
        return quantize(weight, largest.to(weight.device))
    if not all(covered):
        raise ValueError(f"{names}: some are quantized; allowed: all or none, because they are multiplied together")

    def weight_of(layer: Part) -> CodedWeight:
        def read(end: str) -> Tensor | None:
            name = f"{layer.name}.{end}"
            shape = files.shape(name)
            return None if shape is None else files.stored(name, *form.cut(end, shape, layer.rows, inputs))

        found = finite(read_layer(form, read, layer.name, layer.rows, inputs.count), layer.name)
        return found.padded(layer.rows.size, inputs.size)

    return join([weight_of(layer) for layer in layers])


def _joined_experts(
    files: TensorFiles, slices: Slices, making: Making, part: str, name: str
) -> tuple[Tensor | CodedWeight, Tensor | None]:
    """The weight and the bias of one product of all experts of a layer, as `Layer` has them. The checkpoint has them in
    one tensor, with gates and ups by turns: [experts, inputs, outputs], or blocks and scales of MXFP4.

    Args:
        part: gate_up or down.
        name: of the tensor.
    """
    config, span = slices.config, slices.expert
    experts = slices.own.traits.experts
    if experts is None:
        raise ValueError(f"{name} is a tensor of experts, and the model has none")
    held, hidden = experts.own, config.hidden_size
    read = Span(held.start, held.stop, len(held), experts.routing.experts)
    # Whatever the spare slots begin with: nothing asks for it.
    slots = torch.tensor([*range(len(held)), *range(experts.spares)])
    own = torch.full((span.size,), -1)
    own[: span.count] = torch.arange(span.begin, span.end)
    ups = part == "gate_up"
    rows = torch.cat((2 * own, 2 * own + 1)).clamp(min=-1) if ups else torch.arange(hidden)
    outputs = 2 * span.of if ups else hidden
    every = torch.where(rows < 0, -1, rows + outputs * slots[:, None]).flatten()
    columns = whole(hidden) if ups else span
    bias = None
    # A rank with a part of each expert has a part of the sum that the bias is added to.
    if ups or experts.held is not None or not slices.place.group.place:
        bias = outputs_or_zeros(files.take(Part(f"{name}_bias", read), dtype=torch.float32).flatten(), every)
    if config.stored is not None:
        blocks, scales = files.stored(f"{name}_blocks", read), files.stored(f"{name}_scales", read)
        stored = finite(mxfp4(blocks.flatten(0, 1).flatten(1), scales.flatten(0, 1)), name)
        weight = outputs_or_zeros(stored, every)
        return weight.inputs(columns.begin, columns.end).padded(len(every), columns.size), bias
    tensor = files.take(Part(name, read))
    made = allocate((len(slots), len(rows), columns.size), tensor.dtype)
    for expert, out in zip(slots.tolist(), made, strict=True):
        out[:, columns.count :] = 0
        out[:, : columns.count] = outputs_or_zeros(tensor[expert].t(), rows)[:, columns.begin : columns.end]
    if making.columns is None or columns.is_whole:
        return made.flatten(0, 1), bias
    return making.columns(made.flatten(0, 1), tensor.float().abs().amax(1).flatten()), bias


def _counts(types: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in types.most_common()) or "none"
