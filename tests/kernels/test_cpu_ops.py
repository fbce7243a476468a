"""Each CPU operation against its definition in `kernels/reference.py`."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_cpu_linear import normal
from torch import Tensor

from kvrelay.kernels import reference
from kvrelay.kernels.cpu import ops

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ROWS = (1, 2, 7, 64)


def close(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    assert found.dtype == expected.dtype
    bound = TOLERANCE[found.dtype] * scale
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


def rotations(rows: int, half_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines as `rope` takes them."""
    angles = normal(rows, 1, half_dim, seed=9)
    return angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)


ARGUMENTS: dict[str, Callable[[int, torch.dtype], tuple[Any, ...]]] = {
    "rms_norm": lambda rows, dtype: (normal(rows, 96, dtype=dtype), normal(96, dtype=dtype), 1e-5),
    "rms_norm of heads": lambda rows, dtype: (
        normal(rows, 10, 16, dtype=dtype)[:, :6],
        normal(6, 16, dtype=dtype),
        1e-5,
    ),
    "add_rms_norm": lambda rows, dtype: (
        *(normal(rows, 96, dtype=dtype, seed=seed) for seed in range(2)),
        normal(96, dtype=dtype),
        1e-5,
    ),
    "rope": lambda rows, dtype: (normal(rows, 9, 32, dtype=dtype)[:, :6], *rotations(rows, 16)),
    "silu_mul": lambda rows, dtype: (normal(rows, 2 * 56, dtype=dtype),),
    "gelu_mul": lambda rows, dtype: (normal(rows, 2 * 56, dtype=dtype),),
    "gelu": lambda rows, dtype: (4 * normal(rows, 56, dtype=dtype),),
    "rms_norm by float32": lambda rows, dtype: (normal(rows, 96, dtype=dtype), normal(96), 1e-5),
    "layer_norm": lambda rows, dtype: (normal(rows, 96, dtype=dtype), normal(96, dtype=dtype), None, 1e-5),
    "layer_norm with bias": lambda rows, dtype: (
        3 + normal(rows, 96, dtype=dtype),
        *(normal(96, dtype=dtype, seed=seed) for seed in range(2)),
        1e-5,
    ),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_operation_equals_its_definition_and_keeps_all_but_x(name: str, dtype: torch.dtype) -> None:
    operation = name.split()[0]
    for rows in ROWS:
        given = ARGUMENTS[name](rows, dtype)
        before = [each.clone() if isinstance(each, Tensor) else each for each in given]
        found = getattr(ops, operation)(*given)
        for each, kept in zip(given[1:], before[1:], strict=True):
            assert torch.equal(each, kept) if isinstance(each, Tensor) else each == kept
        expected = getattr(reference, operation)(*before)
        for each, wanted in zip(*([x] if isinstance(x, Tensor) else x for x in (found, expected)), strict=True):
            close(each, wanted, scale=2 if name.endswith("heads") else 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (33, 7), (256, 1), (704, 256)])
def test_linear(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    weight = normal(outputs, inputs, dtype=dtype) / math.sqrt(inputs)
    for offset in (None, normal(outputs, dtype=dtype)):
        product = ops.linear(weight.clone(), offset)
        for rows in ROWS:
            x = normal(rows, inputs, dtype=dtype)
            close(product(x), reference.linear(weight, offset)(x), scale=4)


def test_linear_without_onednn_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "packable", lambda dtype: False)
    weight, x = normal(5, 8), normal(3, 8)
    close(ops.linear(weight, None)(x), reference.linear(weight, None)(x))


def test_prepacked_float32_is_exact_enough_for_logits() -> None:
    """The result is within 1e-6 of the spread of float64's, so that prepacking moves no greedy token."""
    weight, x = normal(512, 2048) / math.sqrt(2048), normal(64, 2048)
    exact = x.double() @ weight.double().T
    assert (ops.linear(weight, None)(x).double() - exact).abs().max() < 5e-6
