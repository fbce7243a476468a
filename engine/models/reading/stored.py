"""Layouts of quantized weights in the checkpoints that people download, read from config.json. No torch.

quant_method, format                    tensors of a linear layer [out, in], in groups of G inputs
fp8                                     weight E4M3 [out, in], weight_scale [], or
                                        weight_scale_inv [out / 128, in / 128] with weight_block_size
compressed-tensors int-quantized        weight int8 [out, in], weight_scale [out, 1] or [1]
compressed-tensors float-quantized      weight E4M3 [out, in], weight_scale [out, 1] or [1]
compressed-tensors pack-quantized       weight_packed int32 [out, in / 8], weight_scale [out, in / G],
                                        weight_zero_point int32 [out / 8, in / G] if not symmetric, weight_shape [2]
compressed-tensors mxfp4-pack-quantized weight_packed uint8 [out, in / 2], weight_scale uint8 [out, in / 32]
awq                                     qweight int32 [in, out / 8], qzeros int32 [in / G, out / 8],
                                        scales [in / G, out]
gptq                                    qweight int32 [in / P, out], qzeros int32 [in / G, out / P],
                                        scales [in / G, out], g_idx int32 [in]; P is 32 / bits
mxfp4                                   of all experts together, in groups of 32 inputs that share a power of two:
                                        blocks uint8 [experts, out, in / 32, 16], scales uint8 [experts, out, in / 32]
gguf                                    weight in a type of GGUF's or floats [out, in], of each layer its own
"""

import re
from dataclasses import dataclass
from typing import Literal

from kvrelay.engine.config import Quantization
from kvrelay.engine.models.reading.fields import Fields
from kvrelay.engine.ranks.spans import Span
from kvrelay.machine import gguf
from kvrelay.machine.options import require

Layout = Literal["fp8", "int8", "packed", "mxfp4", "awq", "gptq", "gguf"]
METHODS = ("fp8", "compressed-tensors", "awq", "gptq", "mxfp4", "gguf")
FORMATS: dict[str, Layout] = {
    "int-quantized": "int8",
    "float-quantized": "fp8",
    "pack-quantized": "packed",
    "mxfp4-pack-quantized": "mxfp4",
}
"""Layouts by compressed-tensors' names of the formats."""
FLOATS = ("F32", "F16", "BF16")
IN_INT32 = 8
"""Number of 4-bit weights in an int32."""
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Allowed dtypes and shapes of a required tensor in a checkpoint."""

    dtypes: tuple[str, ...]
    """Dtypes, any of which will do, as safetensors names them."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes, any of which will do."""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """Quantized format of a checkpoint's linear layers."""

    method: str
    """Method's name in config.json, for messages."""
    layout: Layout
    bits: int
    """Bits of a weight; 0 for GGUF, where each tensor has its own."""
    group: int
    """Number of inputs that share a scale; 0: all."""
    block: int
    """Number of outputs that share scales; 1 unless in blocks, 0: all of a tensor."""
    zeros: bool
    round_inputs: bool
    """Whether products round their inputs to int8 (W8A8)."""
    ignored: tuple[str, ...]
    """Layers that aren't quantized: in compressed-tensors whole names, or regular expressions after `re:`; in other
    methods parts of names."""
    zero_offset: int = 0
    """Number that is added to a stored zero."""

    def covers(self, layer: str) -> bool:
        """Whether the linear layer of this name is quantized; in GGUF, whether it may be."""
        if self.layout == "gguf":
            return True
        if self is MXFP4:
            return False  # experts have no linear layers there; see `joined_tensors`
        if not self.method.startswith("compressed-tensors"):
            return layer != HEAD and not any(part in layer for part in self.ignored)
        return not any(
            re.match(entry[3:], layer) is not None if entry.startswith("re:") else entry == layer
            for entry in self.ignored
        )

    def tensors(self, outputs: int, inputs: int) -> dict[str, StoredTensor]:
        """The tensors of a layer, by the end of their names.

        Raises:
            ValueError: such a layer can't be stored so.
        """
        if self.layout == "gguf":
            return {"weight": StoredTensor((*FLOATS, *gguf.QUANTIZED), ((outputs, inputs),))}
        group = self.group or inputs
        groups, per_int32 = -(-inputs // group), 32 // self.bits
        if self.layout in ("awq", "gptq", "packed", "mxfp4") and (inputs % group or inputs % 32 or outputs % per_int32):
            raise ValueError(
                f"a layer [{outputs}, {inputs}] in {self.method} with groups of {group}; allowed: whole groups"
            )
        if self.layout in ("fp8", "int8"):
            dtype = "F8_E4M3" if self.layout == "fp8" else "I8"
            if self.block > 1:
                shape = (-(-outputs // self.block), groups)
                scale = {"weight_scale_inv": StoredTensor(FLOATS, (shape,))}
            else:
                scale = {"weight_scale": StoredTensor(FLOATS, ((outputs, 1), (outputs,), (1,), ()))}
            static = {"input_scale": StoredTensor(FLOATS, ((1,), ()), optional=True)}
            return {"weight": StoredTensor((dtype,), ((outputs, inputs),)), **scale, **static}
        if self.layout == "mxfp4":
            return {
                "weight_packed": StoredTensor(("U8",), ((outputs, inputs // 2),)),
                "weight_scale": StoredTensor(("U8",), ((outputs, groups),)),
            }
        if self.layout == "packed":
            zero = {"weight_zero_point": StoredTensor(("I32",), ((outputs // IN_INT32, groups),))}
            return {
                "weight_packed": StoredTensor(("I32",), ((outputs, inputs // IN_INT32),)),
                "weight_scale": StoredTensor(FLOATS, ((outputs, groups),)),
                "weight_shape": StoredTensor(("I64", "I32"), ((2,),), optional=True),
                "weight_g_idx": StoredTensor(("I32",), ((inputs,),), optional=True),
                **(zero if self.zeros else {}),
            }
        rows, columns = (inputs, outputs // 8) if self.layout == "awq" else (inputs // per_int32, outputs)
        order = {"g_idx": StoredTensor(("I32",), ((inputs,),), optional=True)} if self.layout == "gptq" else {}
        return {
            "qweight": StoredTensor(("I32",), ((rows, columns),)),
            "qzeros": StoredTensor(("I32",), ((groups, outputs // per_int32),)),
            "scales": StoredTensor(FLOATS, ((groups, outputs),)),
            **order,
        }

    def cut(self, end: str, shape: tuple[int, ...], rows: Span, columns: Span) -> tuple[Span | None, Span | None]:
        """The rows and columns of a stored tensor that some outputs and inputs of its layer need; None for all.

        Args:
            end, shape: of the tensor.
            rows, columns: the outputs and inputs.

        Raises:
            ValueError: outputs or inputs that are packed together would be torn apart.
        """
        if end.endswith(("g_idx", "weight_shape", "input_scale")):
            return None, None
        if end == "weight_scale_inv":
            # Blocks of outputs may be torn apart, so all of them are read.
            return None, self._stored_span(columns, self.group)
        sides = (columns, rows) if self.layout in ("awq", "gptq") else (rows, columns)
        # A single number applies to all outputs and inputs.
        found = [
            None if number == 1 else self._stored_span(span, -(-span.of // number))
            for number, span in zip(shape, sides, strict=False)
        ]
        first, second = [*found, None, None][:2]
        return first, second

    def _stored_span(self, span: Span, unit: int) -> Span | None:
        """Indices of the stored numbers, each of which stands for `unit` numbers of a span."""
        if span.is_whole:
            return None
        if span.begin % unit or (span.end % unit and span.end != span.of):
            raise ValueError(
                f"{self.method} has {unit} rows or columns together, and a rank would have {span.begin} to {span.end};"
                " allowed: another tensor_parallel"
            )
        begin, end = span.begin // unit, -(-span.end // unit)
        return Span(begin, end, end - begin, -(-span.of // unit))


MXFP4 = StoredFormat("mxfp4", "mxfp4", 4, 32, 1, zeros=False, round_inputs=False, ignored=())
"""Quantized format of gpt-oss's experts."""


def joined_tensors(
    form: StoredFormat | None, name: str, shape: tuple[int, int, int]
) -> dict[str, tuple[int, ...] | StoredTensor]:
    """The tensors of one product of all experts of a layer, by name.

    Args:
        shape: numbers of experts, outputs and inputs.

    Raises:
        ValueError: such a layer can't be stored so.
    """
    experts, outputs, inputs = shape
    bias = {f"{name}_bias": (experts, outputs)}
    if form is None:
        return {name: (experts, inputs, outputs), **bias}
    if form is not MXFP4 or inputs % form.group:
        raise ValueError(f"{name} {list(shape)} is in {form.method}; allowed: floats, or mxfp4 with whole groups of 32")
    groups = inputs // form.group
    return {
        f"{name}_blocks": StoredTensor(("U8",), ((experts, outputs, groups, form.group // 2),)),
        f"{name}_scales": StoredTensor(("U8",), ((experts, outputs, groups),)),
        **bias,
    }


def stored_format(fields: Fields) -> StoredFormat | None:
    """The format that config.json describes; None for a checkpoint that isn't quantized.

    Raises:
        ValueError: a method, or an option of it, that can't be read; the text names it.
    """
    found = fields.fields("quantization_config")
    if found is None:
        return None
    method = found.choice("quant_method", METHODS)
    if method == MXFP4.method:
        return MXFP4
    readers = {"fp8": _fp8, "compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq, "gguf": _gguf}
    return readers[method](found)


def _fp8(fields: Fields) -> StoredFormat:
    block = fields.get("weight_block_size")
    if block not in (None, [128, 128]):
        fields.refuse("weight_block_size", "null, [128, 128]")
    sizes = (0, 0) if block is None else (128, 128)
    name = "modules_to_not_convert" if fields.get("modules_to_not_convert") is not None else "ignored_layers"
    return StoredFormat("fp8", "fp8", 8, sizes[1], sizes[0], False, False, _names(fields, name))


def _gguf(fields: Fields) -> StoredFormat:
    most = fields.choice("type", tuple(gguf.QUANTIZED))
    return StoredFormat(f"gguf {most}", "gguf", 0, 0, 1, False, False, ())


def _awq(fields: Fields) -> StoredFormat:
    fields.choice("bits", (4,))
    fields.choice("version", ("gemm", "GEMM"), default="gemm")
    if not fields.boolean("zero_point", True):
        fields.refuse("zero_point", "true")
    ignored = _names(fields, "modules_to_not_convert")
    return StoredFormat("awq", "awq", 4, _group(fields), 1, True, False, ignored)


def _gptq(fields: Fields) -> StoredFormat:
    bits = fields.choice("bits", (4, 8))
    version = fields.choice("checkpoint_format", ("gptq", "gptq_v2"), default="gptq")
    if fields.boolean("lm_head", False):
        fields.refuse("lm_head", "false")
    if fields.get("dynamic"):
        fields.refuse("dynamic", "null; all layers must be quantized alike")
    ignored = _names(fields, "modules_in_block_to_not_quantize")
    # Versions before 2 store zeros less 1.
    offset = 1 if version == "gptq" else 0
    return StoredFormat("gptq", "gptq", bits, _group(fields), 1, bits == 4, False, ignored, offset)


def _compressed(fields: Fields) -> StoredFormat:
    name = fields.choice("format", tuple(FORMATS))
    layout = FORMATS[name]
    groups = fields.fields("config_groups")
    raw = fields.get("config_groups")
    if groups is None or len(raw) != 1:
        fields.refuse("config_groups", "one group of layers that are quantized alike")
    scheme = groups.fields(next(iter(raw)))
    if scheme is None or scheme.get("targets") != ["Linear"]:
        fields.refuse("config_groups", 'one group, whose targets are ["Linear"]')
    weights = scheme.fields("weights")
    if weights is None:
        scheme.refuse("weights", "an object")
    if fields.get("kv_cache_scheme") is not None:
        fields.refuse("kv_cache_scheme", "null")
    ignored = _names(fields, "ignore")
    try:
        for name in ignored:
            re.compile(name[3:] if name.startswith("re:") else "")
    except re.error as error:
        fields.refuse("ignore", f"names, and regular expressions behind re: ({error})")
    method = f"compressed-tensors {name}"
    if layout == "mxfp4":
        weights.choice("group_size", (32,), default=32)
        return StoredFormat(method, layout, 4, 32, 1, False, False, ignored)
    bits = weights.choice("num_bits", (4,) if layout == "packed" else (8,))
    symmetric = weights.boolean("symmetric", True)
    if layout == "packed":
        weights.choice("actorder", ("weight", "static"), default="static")
        strategy = weights.choice("strategy", ("group", "channel"))
        group = weights.integer("group_size") if strategy == "group" else 0
        return StoredFormat(method, layout, bits, _multiple(weights, group), 1, not symmetric, False, ignored)
    if not symmetric:
        weights.refuse("symmetric", "true")
    weights.choice("strategy", ("channel", "tensor"))
    rounds = layout == "int8" and scheme.get("input_activations") is not None
    return StoredFormat(method, layout, bits, 0, 1, False, rounds, ignored)


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        fields.refuse(name, "a list of names")
    return tuple(value)


def _group(fields: Fields) -> int:
    """The group size; 0 for all inputs, which these methods write as -1."""
    return 0 if fields.get("group_size") == -1 else _multiple(fields, fields.integer("group_size"))


def _multiple(fields: Fields, group: int) -> int:
    if group % 32:
        fields.refuse("group_size", "a multiple of 32, or -1 for all inputs")
    return group


def check_stored(quantization: Quantization, stored: StoredFormat | None) -> None:
    """Raises ValueError if a checkpoint that is quantized already should be quantized again."""
    if stored is not None:
        allowed = f"none, dense; the checkpoint is in {stored.method} already"
        require(quantization in ("none", "dense"), "quantization", quantization, allowed)
