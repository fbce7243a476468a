"""Linear layers on CPU, with weights laid out once as oneDNN wants them.

The only file that touches torch's private oneDNN operators. Against `F.linear`, prepacked weights are 2 to 3 times
faster in float32 at any number of rows, and in bfloat16 up to 2.5 times at up to 32 rows and even above. Where torch
or the CPU lacks the operators, `F.linear` takes over.

oneDNN compiles and keeps code for each number of rows that it meets, a few hundred kilobytes each. So rows are padded
to a multiple of ROWS: a worker's memory would grow by hundreds of megabytes as prompts of every length come by.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 16
"""Rows of a product are padded to a multiple of this; fewer rows are taken as they are."""


def linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """`x [T, in] -> x @ weight.T + bias [T, out]`. The result keeps no reference to `weight` if it could be packed.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """
    if not packable(weight.dtype):
        return lambda x: functional.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    run = torch.ops.mkldnn._linear_pointwise.default

    def apply(x: Tensor) -> Tensor:
        rows = x.shape[0]
        missing = -rows % ROWS if rows > ROWS else 0
        out: Tensor = run(functional.pad(x, (0, 0, 0, missing)) if missing else x, packed, bias, "none", [], "")
        return out[:rows] if missing else out

    return apply


@cache
def packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs and multiplies weights of this type here."""
    operators = torch.ops.mkldnn
    if dtype not in (torch.float32, torch.bfloat16) or not torch._C._has_mkldnn:
        return False
    if not hasattr(operators, "_reorder_linear_weight") or not hasattr(operators, "_linear_pointwise"):
        return False
    return dtype is torch.float32 or bool(operators._is_mkldnn_bf16_supported())
