"""Experts in MXFP4, as gpt-oss publishes them, kept as they are: float4 (E2M1) in groups of 32 inputs that share a
power of two (Open Compute's MX specification).

    gate_up_proj_blocks  uint8 [experts, outputs, groups, 16], two numbers in a byte, the first one in its low half
    gate_up_proj_scales  uint8 [experts, outputs, groups], exponents plus 127
    down_proj_blocks, down_proj_scales      the same of the second product

The model is made without these weights. Its experts' modules get `StoredExperts` instead, from which
`experts.swap_experts` makes the kernels' weights, one layer at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvrelay.engine.models.fast.loader import TensorFiles
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.models.reading.quantized import finite, mxfp4
from kvrelay.engine.models.reading.stored import MXFP4
from kvrelay.kernels.codes import CodedWeight

GROUP = MXFP4.group
STORED = "_kvrelay_stored"
"""Attribute of a module: its `StoredExperts`."""
WEIGHTS = ("gate_up_proj", "down_proj")
ENDS = ("_blocks", "_scales")


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """Reads the experts of one module."""

    experts: int
    read: Callable[[str], tuple[Tensor, Tensor]]
    """Reads blocks and scales of one of WEIGHTS."""

    def weight(self, name: str) -> CodedWeight:
        """All experts' weights [experts * outputs, inputs], one below the other.

        Raises:
            ValueError: they aren't finite.
        """
        blocks, scales = self.read(name)
        return finite(mxfp4(blocks.flatten(0, 1).flatten(1), scales.flatten(0, 1)), name)


def class_without_experts(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of a model whose experts have no weights, but for placeholders of no elements."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        for module in self.modules():
            for name in WEIGHTS:
                if _is_experts(module):
                    setattr(module, name, nn.Parameter(torch.empty(0, dtype=getattr(module, name).dtype)))

    # The name is the same, because transformers finds by it what it knows of the class.
    return type(model_class.__name__, (model_class,), {"__init__": init, "__module__": model_class.__module__})


def is_placeholder(model: nn.Module, name: str) -> bool:
    """Whether the parameter of this name is one of `class_without_experts`."""
    return name.rpartition(".")[2] in WEIGHTS and model.get_parameter(name).numel() == 0


def give_stored(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Gives each module of experts its `StoredExperts`.

    Raises:
        ValueError: the files don't hold them, or in another shape or type; the text names the tensor.
    """
    for path, module in model.named_modules():
        if _is_experts(module):
            sizes: Any = module
            experts, wanted = int(sizes.num_experts), (2 * int(sizes.intermediate_size), int(sizes.hidden_size))
            shapes = {WEIGHTS[0]: wanted, WEIGHTS[1]: (wanted[1], wanted[0] // 2)}
            for name, (outputs, inputs) in shapes.items():
                _check(checkpoint, f"{path}.{name}", (experts, outputs, inputs // GROUP))
            module.__dict__[STORED] = StoredExperts(experts, _reader(checkpoint, path))


def dequantize_stored(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives modules of experts their weights as numbers of `dtype`, for devices without kernels for codes."""
    for module in model.modules():
        stored: StoredExperts | None = module.__dict__.pop(STORED, None)
        if stored is None:
            continue
        for name in WEIGHTS:
            weight: Tensor = getattr(module, name)
            numbers = stored.weight(name).dequantize().to(dtype)
            numbers = numbers.view(stored.experts, -1, numbers.shape[1]).transpose(1, 2).contiguous()
            setattr(module, name, nn.Parameter(numbers.to(weight.device), requires_grad=False))


def _is_experts(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in (*WEIGHTS, "num_experts", "is_transposed"))


def _check(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    for end, rest in zip(ENDS, ((GROUP // 2,), ()), strict=True):
        entry = checkpoint.tensors.get(name + end)
        if entry is None:
            raise ValueError(f"{checkpoint.folder}: tensor {name}{end} is missing")
        if entry.shape != shape + rest or entry.dtype != "U8":
            raise ValueError(
                f"{entry.path}: tensor {name}{end} is {entry.dtype} {list(entry.shape)}; allowed: U8"
                f" {list(shape + rest)}"
            )


def _reader(checkpoint: Checkpoint, path: str) -> Callable[[str], tuple[Tensor, Tensor]]:
    def read(name: str) -> tuple[Tensor, Tensor]:
        names = tuple(f"{path}.{name}{end}" for end in ENDS)
        files = TensorFiles(checkpoint, names, torch.float32, "cpu", None)
        return files.stored(names[0]), files.stored(names[1])

    return read
