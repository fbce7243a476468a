"""Launches that are repeated do what new ones would, and none hold on to tensors that each repetition gives anew."""

import gc
import weakref

import pytest
import torch

from kvrelay.kernels import reference
from kvrelay.kernels.add_rmsnorm import Norms
from kvrelay.kernels.silu_mul import SiluMul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def test_repeated_norms_equal_the_reference() -> None:
    """Other tensors, another number of rows, another type, an address that is no multiple of 16, another eps."""
    norms = Norms()
    shifted = normal(5 * 24 + 1)[1:].view(5, 24)
    inputs = [normal(5, 24), normal(5, 24), shifted, normal(3, 24), normal(3, 24, dtype=torch.float16), normal(3, 24)]
    for count, x in enumerate(inputs):
        weight, residual, eps = normal(24).to(x.dtype), normal(*x.shape).to(x.dtype), 1e-5 * (1 + count // 5)
        expected, total = reference.add_rms_norm(x.clone(), residual.clone(), weight, eps)
        found, kept = norms.add_rms_norm(x, residual, weight, eps)
        tolerance = 2e-3 if x.dtype is torch.float16 else 1e-5
        torch.testing.assert_close(kept, total, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        alone = norms.rms_norm(x, weight, eps)
        torch.testing.assert_close(alone, reference.rms_norm(x, weight, eps), atol=tolerance, rtol=tolerance)


def test_repeated_gates_equal_the_reference_and_keep_nothing_alive() -> None:
    gate = SiluMul()
    for rows in (3, 3, 4, 0, 3):
        x = normal(rows, 14)
        torch.testing.assert_close(gate(x), reference.silu_mul(x), atol=1e-6, rtol=1e-5)
    first = normal(3, 14)
    gone = weakref.ref(first), weakref.ref(gate(first))
    del first
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_a_first_launch_checks_its_tensors() -> None:
    with pytest.raises(ValueError, match=r"weight is \[5\]; allowed: \[4\]"):
        Norms().rms_norm(normal(2, 4), normal(5), 1e-5)
