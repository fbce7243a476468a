"""Launches that are repeated do what new ones would, and none hold on to tensors that each repetition gives anew."""

import gc
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrelay.kernels import launch as launch_module
from kvrelay.kernels import reference
from kvrelay.kernels.add_rmsnorm import Norms
from kvrelay.kernels.launch import launch
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


class Compiled:
    """Code of `StubKernel`, as Triton 3.6 to 3.9 have it."""

    def __init__(self, launched: list[tuple[Any, ...]], signature: tuple[str, ...]) -> None:
        self.src = SimpleNamespace(signature=dict.fromkeys(signature, "i32"))
        self._launched = launched

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *values: self._launched.append(("compiled", grid, *values))


class StubKernel:
    """A kernel that only notes what it is launched with, and its code."""

    def __init__(self, make: Callable[[list[tuple[Any, ...]]], object]) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self._compiled = make(self.launched)

    @staticmethod
    def fn(x: Any, rows: Any, SIZE: Any) -> None:
        """Its parameters."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def run(*values: Any, num_warps: int) -> object:
            self.launched.append(("kernel", grid, *values))
            return self._compiled

        return run


OF_3_6 = ("x", "rows", "SIZE")
FORMS = {
    "3.6 to 3.9": (lambda launched: Compiled(launched, OF_3_6), True),
    "without constants, as before 3.3": (lambda launched: Compiled(launched, OF_3_6[:2]), False),
    "unknown": (lambda launched: object(), False),
}


@pytest.mark.parametrize(("make", "repeated"), FORMS.values(), ids=FORMS)
def test_each_form_of_compiled_code_is_launched_with_its_arguments(
    make: Callable[[list[tuple[Any, ...]]], object], repeated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Repeated where it takes all parameters, else launched by Triton, which is told once."""
    launch_module._tell_slow.cache_clear()
    kernel, x, other = StubKernel(make), torch.zeros(8), torch.zeros(8)
    with caplog.at_level(logging.WARNING, launch_module.__name__):
        launches = [launch(kernel, (4, 2), x, 32, SIZE=8, num_warps=4) for _ in range(2)]
    assert len(caplog.records) == (0 if repeated else 1)
    kernel.launched.clear()
    launches[0].repeat(x=other, rows=48, unknown=1)
    launches[0].repeat(x=other, rows=33)
    # Other code is compiled for a number that is no multiple of 16.
    by_triton = [("kernel", (4, 2), other, rows, 8) for rows in (48, 33)]
    expected = [("compiled", (4, 2, 1), other.data_ptr(), 48, 8), by_triton[1]] if repeated else by_triton
    assert [entry[:2] + entry[3:] for entry in kernel.launched] == [entry[:2] + entry[3:] for entry in expected]
    assert [getattr(entry[2], "data_ptr", lambda at=entry[2]: at)() for entry in kernel.launched] == [
        other.data_ptr()
    ] * 2
