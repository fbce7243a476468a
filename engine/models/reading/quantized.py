"""Quantized weights of a checkpoint (`stored.py`), as codes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvrelay.engine.models.reading.stored import StoredFormat
from kvrelay.engine.ranks.spans import Span
from kvrelay.kernels.codes import CodedWeight, CodeType

Read = Callable[[str], Tensor | None]
"""The tensor with this end of its name, as it is stored; None for an optional one that is not there."""

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in an int32 of each of its eight outputs, counted in steps of four bits from the lowest."""


def read_layer(form: StoredFormat, read: Read, layer: str, rows: Span, inputs: int) -> CodedWeight:
    """The weight of a linear layer, or a part of it.

    Args:
        read: reads what `StoredFormat.cut` says.
        rows: the outputs.
        inputs: number of inputs that are read.

    Raises:
        ValueError: it can't be multiplied as it is stored; the text names the layer.
    """

    def tensor(end: str) -> Tensor:
        found = read(end)
        if found is None:
            raise ValueError(f"{layer}.{end} is missing")
        return found

    group = form.group or inputs
    if form.layout in ("fp8", "int8"):
        return _bytes(form, tensor, rows, inputs)
    if form.layout == "mxfp4":
        return mxfp4(tensor("weight_packed"), tensor("weight_scale"), group)
    if form.layout == "packed":
        _refuse_reordered(read("weight_g_idx"), group, layer)
        codes, scales = _unpack(tensor("weight_packed"), 4), tensor("weight_scale").float()
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
        if form.zeros:
            zeros = _unpack(tensor("weight_zero_point").t(), 4).t().contiguous()
        return CodedWeight(CodeType.INT4, codes, scales, zeros, group)
    scales = tensor("scales").float().t().contiguous()
    if form.layout == "awq":
        order = list(AWQ_ORDER)
        codes, zeros = (_unpack(tensor(end), 4, order).t().contiguous() for end in ("qweight", "qzeros"))
        return CodedWeight(CodeType.INT4, codes, scales, zeros, group)
    _refuse_reordered(read("g_idx"), group, layer)
    codes = _unpack(tensor("qweight").t(), form.bits)
    zeros = _unpack(tensor("qzeros"), form.bits).t() + form.zero_offset
    if form.bits == 4:
        return CodedWeight(CodeType.INT4, codes, scales, (zeros & 15).contiguous(), group)
    if not bool((zeros == 128).all()):
        raise ValueError(f"{layer}: gptq with 8 bits and zeros other than 128; allowed: symmetric weights (sym)")
    return CodedWeight(CodeType.INT8, codes ^ 128, scales, None, group)


def finite(weight: CodedWeight, layer: str) -> CodedWeight:
    """The weight of a layer.

    Raises:
        ValueError: it isn't finite; the text names the layer.
    """
    if not weight.is_finite():
        raise ValueError(f"{layer}: its weight has a number or a scale that is infinite or NaN")
    return weight


def mxfp4(packed: Tensor, exponents: Tensor, group: int = 32) -> CodedWeight:
    """A weight in MXFP4 (Open Compute's MX specification): float4 (E2M1) in groups that share a power of two.

    Args:
        packed: uint8 [out, in / 2], two numbers in a byte, the first one in its low half.
        exponents: uint8 [out, in / group], plus 127.
    """
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    return CodedWeight(CodeType.FP4, codes, torch.exp2(exponents.float() - 127), None, group)


def _bytes(form: StoredFormat, tensor: Callable[[str], Tensor], rows: Span, inputs: int) -> CodedWeight:
    codes = tensor("weight").view(torch.uint8)
    if form.block > 1:
        blocks = tensor("weight_scale_inv").float()
        scales = blocks.repeat_interleave(form.block, 0)[rows.begin : rows.end].contiguous()
    else:
        scales = tensor("weight_scale").float().reshape(-1, 1).expand(rows.count, 1).contiguous()
    kind = CodeType.FP8 if form.layout == "fp8" else CodeType.INT8
    return CodedWeight(kind, codes, scales, None, form.group or inputs, form.round_inputs)


def _unpack(packed: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """uint8 [rows, columns * 32 / bits] of int32 [rows, columns]; the lowest bits come first, or as `order` says."""
    count = 32 // bits
    places = torch.tensor(order if order is not None else range(count), dtype=torch.int32) * bits
    values: Tensor = packed[..., None] >> places & (2**bits - 1)
    return values.to(torch.uint8).flatten(1)


def _refuse_reordered(groups: Tensor | None, group: int, layer: str) -> None:
    """Refuses act-order that stays in the checkpoint, because it scatters the inputs of a group."""
    if groups is not None and not torch.equal(groups.long(), torch.arange(len(groups)) // group):
        raise ValueError(
            f"{layer}: its inputs are grouped by importance (desc_act, act-order); allowed: consecutive inputs"
        )
