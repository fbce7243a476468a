"""Each CPU operation against its definition in `kernels/reference.py`."""

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kvrelay.kernels import reference
from kvrelay.kernels.cpu import linear as cpu_linear
from kvrelay.kernels.cpu import ops

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
ROWS = (1, 2, 7, 64)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def close(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    assert found.dtype == expected.dtype
    bound = TOLERANCE[found.dtype] * scale
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", ROWS)
class TestOps:
    @pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (33, 7), (256, 1), (704, 256)])
    @pytest.mark.parametrize("bias", [False, True])
    def test_linear(self, rows: int, dtype: torch.dtype, inputs: int, outputs: int, bias: bool) -> None:
        weight = normal(outputs, inputs, dtype=dtype) / math.sqrt(inputs)
        offset = normal(outputs, dtype=dtype) if bias else None
        x = normal(rows, inputs, dtype=dtype)
        close(ops.linear(weight.clone(), offset)(x), reference.linear(weight, offset)(x), scale=4)

    def test_rms_norm(self, rows: int, dtype: torch.dtype) -> None:
        x, weight = normal(rows, 96, dtype=dtype), normal(96, dtype=dtype)
        close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))

    def test_rms_norm_with_a_weight_per_head(self, rows: int, dtype: torch.dtype) -> None:
        x, weight = normal(rows, 10, 16, dtype=dtype)[:, :6], normal(6, 16, dtype=dtype)
        close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), scale=2)

    def test_add_rms_norm(self, rows: int, dtype: torch.dtype) -> None:
        x, residual, weight = (
            normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(rows, 96)] * 2 + [(96,)])
        )
        expected = reference.add_rms_norm(x, residual, weight, 1e-5)
        kept = residual.clone()
        for found, wanted in zip(ops.add_rms_norm(x, residual, weight, 1e-5), expected, strict=True):
            close(found, wanted)
        assert torch.equal(residual, kept)

    def test_rope(self, rows: int, dtype: torch.dtype) -> None:
        x = normal(rows, 9, 32, dtype=dtype)[:, :6]
        angles = normal(rows, 1, 16, seed=3)
        cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
        found = ops.rope(x, cos, sin)
        close(found, reference.rope(x, cos, sin))
        close(found.float().norm(dim=-1), x.float().norm(dim=-1), scale=1 if dtype == torch.float32 else 5e3)

    def test_silu_mul(self, rows: int, dtype: torch.dtype) -> None:
        x = normal(rows, 2 * 56, dtype=dtype)
        close(ops.silu_mul(x), reference.silu_mul(x))


@pytest.mark.parametrize("module", [reference, ops])
def test_a_backend_has_every_operation(module: ModuleType) -> None:
    for name in ("linear", "embed", "rms_norm", "add_rms_norm", "rope", "silu_mul"):
        assert callable(getattr(module, name))


def test_rotations_agree_with_complex_numbers() -> None:
    x = normal(5, 3, 8)
    angles = normal(5, 1, 4, seed=9)
    cos, sin = angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    close(reference.rope(x, cos, sin), torch.cat((turned.real, turned.imag), -1))


def test_linear_without_onednn_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_linear, "packable", lambda dtype: False)
    weight, x = normal(5, 8), normal(3, 8)
    close(cpu_linear.linear(weight, None)(x), reference.linear(weight, None)(x))


def test_prepacked_float32_is_exact_enough_for_logits() -> None:
    """The result is within 1e-6 of the spread of float64's, so that prepacking moves no greedy token."""
    weight, x = normal(512, 2048) / math.sqrt(2048), normal(64, 2048)
    exact = x.double() @ weight.double().T
    assert (ops.linear(weight, None)(x).double() - exact).abs().max() < 5e-6
