"""Launches that are repeated do what new ones would, and none hold on to tensors that each repetition gives anew."""

import gc
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrelay.kernels import codes, reference
from kvrelay.kernels.codes import CodedWeight
from kvrelay.kernels.ops import Feeds
from kvrelay.kernels.triton import launch as launch_module
from kvrelay.kernels.triton.add_rmsnorm import Norms
from kvrelay.kernels.triton.embed import Embed
from kvrelay.kernels.triton.launch import launch
from kvrelay.kernels.triton.quant_gemv import QuantGemv
from kvrelay.kernels.triton.quant_linear import quantized
from kvrelay.kernels.triton.quant_matmul import QuantMatmul
from kvrelay.kernels.triton.sample import Choices, Sampler, Workspace
from kvrelay.kernels.triton.silu_mul import SiluMul

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def test_repeated_norms_equal_the_reference() -> None:
    """The launches differ in tensors, number of rows, type, eps, and have an address that is no multiple of 16."""
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

    function, packed_metadata = 77, (4, 1, 0)

    def __init__(self, launched: list[tuple[Any, ...]], signature: tuple[str, ...]) -> None:
        self.src = SimpleNamespace(signature=dict.fromkeys(signature, "i32"))
        self._launched = launched

    def run(self, *values: Any) -> None:
        self._launched.append(("compiled", *values))


class StubKernel:
    """A kernel that only notes what it is launched with, and its code."""

    do_not_specialize = ("rows",)

    def __init__(self, make: Callable[[list[tuple[Any, ...]]], object]) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self._compiled = make(self.launched)

    @staticmethod
    def fn(x: Any, pair: Any, rows: Any, columns: Any, SIZE: Any) -> None:
        """A function with the kernel's parameters."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def run(*values: Any, num_warps: int) -> object:
            self.launched.append(("kernel", grid, *values))
            return self._compiled

        return run


OF_3_6 = ("x", "pair", "rows", "columns", "SIZE")
FORMS = {
    "3.6 to 3.9": (lambda launched: Compiled(launched, OF_3_6), True),
    "without constants, as before 3.3": (lambda launched: Compiled(launched, OF_3_6[:4]), False),
    "unknown": (lambda launched: object(), False),
}
GRIDS = (4, 2, 1), (3, 2, 1)
STREAM, DEVICE_NUMBER = 99, 5


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the driver, of whose device 5 stream 99 is the current one."""
    streams = {DEVICE_NUMBER: STREAM}
    active = SimpleNamespace(get_current_stream=streams.__getitem__, get_current_device=lambda: DEVICE_NUMBER)
    monkeypatch.setattr(launch_module, "driver", SimpleNamespace(active=active))


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(("make", "repeated"), FORMS.values(), ids=FORMS)
def test_each_form_of_compiled_code_is_launched_with_its_arguments(
    make: Callable[[list[tuple[Any, ...]]], object], repeated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Repeated where it takes all parameters, else launched by Triton, which is told once."""
    launch_module._tell_slow.cache_clear()
    kernel, x, fixed = StubKernel(make), torch.zeros(8), torch.zeros(8)
    with caplog.at_level(logging.WARNING, launch_module.__name__):
        again, _ = (
            launch(kernel, GRIDS[0], x, (fixed, x), 32, 16, SIZE=8, num_warps=4).repeating("x", "rows") for _ in "ab"
        )
    assert len(caplog.records) == (0 if repeated else 1)
    kernel.launched.clear()
    other, shifted = torch.zeros(8), torch.zeros(9)[1:]
    again(GRIDS[1], other, 33)
    # Other code is compiled for an address that is no multiple of 16.
    again(GRIDS[1], shifted, 33)
    assert [entry[0] for entry in kernel.launched] == ["compiled" if repeated else "kernel", "kernel"]
    places = (fixed.data_ptr(), x.data_ptr())
    if repeated:
        code = (STREAM, Compiled.function, Compiled.packed_metadata, None, None, None)
        assert kernel.launched[0] == ("compiled", *GRIDS[1], *code, other.data_ptr(), places, 33, 16, 8)
    for entry, tensor in list(zip(kernel.launched, (other, shifted), strict=True))[1 if repeated else 0 :]:
        _, grid, given, pair, *numbers = entry
        assert (grid, given.data_ptr(), tuple(each.data_ptr() for each in pair)) == (
            GRIDS[1],
            tensor.data_ptr(),
            places,
        )
        assert numbers == [33, 16, 8]


@pytest.mark.usefixtures("driver")
def test_only_what_no_code_is_compiled_for_may_vary() -> None:
    kernel = StubKernel(lambda launched: Compiled(launched, OF_3_6))
    launched = launch(kernel, GRIDS[0], torch.zeros(8), (), 32, 16, SIZE=8, num_warps=4)
    with pytest.raises(ValueError, match="columns is 16, for which code is compiled"):
        launched.repeating("columns")
    with pytest.raises(ValueError, match="rows, x vary; allowed: tensors \\(x\\) before numbers"):
        launched.repeating("rows", "x")
    with pytest.raises(ValueError, match="1 values; allowed: those of x, rows"):
        launched.repeating("x", "rows")(GRIDS[0], torch.zeros(8))
    with pytest.raises(ValueError, match="row can't vary; allowed: x, pair, rows, columns, SIZE"):
        launched.repeating("x", "row")


@pytest.mark.usefixtures("driver")
def test_code_for_an_address_that_is_no_multiple_of_16_is_not_repeated() -> None:
    kernel = StubKernel(lambda launched: Compiled(launched, OF_3_6))
    again = launch(kernel, GRIDS[0], torch.zeros(9)[1:], (), 32, 16, SIZE=8, num_warps=4).repeating("x")
    again(GRIDS[0], torch.zeros(8))
    assert [entry[0] for entry in kernel.launched] == ["kernel", "kernel"]


@pytest.mark.parametrize("quantize", [codes.int8, codes.int4])
def test_repeated_quantized_products_equal_the_first(quantize: Callable[[torch.Tensor], CodedWeight]) -> None:
    """Products of other inputs and other numbers of rows, by one object and by a new one for each."""
    weight = quantized(quantize(normal(70, 64, dtype=torch.float16)), torch.float16)
    assert weight is not None
    products: list[Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = [
        lambda: QuantMatmul(weight, None),
        lambda: QuantGemv(weight, None, processors=132),
    ]
    for make, rows_of in zip(products, ((3, 16, 20, 5, 70), (1, 16, 2, 1)), strict=True):
        product = make()
        for rows in rows_of:
            x = normal(rows, 64, dtype=torch.float16)
            assert torch.equal(product(x), make()(x))
        with pytest.raises(ValueError, match=r"x is \[2, 63\]; allowed: \[2, 64\]"):
            product(normal(2, 63, dtype=torch.float16))
        with pytest.raises(ValueError, match=r"x has strides .*; allowed: contiguous"):
            product(normal(2, 128, dtype=torch.float16)[:, ::2])


def test_repeated_embeddings_and_choices_equal_the_first() -> None:
    table, frequencies = normal(9, 16), normal(4)
    one, sampler = Embed(), Sampler(Choices.empty(4, 2, DEVICE), Workspace.empty(4, 40, DEVICE))
    for count in (3, 4, 1, 4):
        tokens, positions = torch.randint(9, (2, count), device=DEVICE)
        feeds = Feeds(torch.arange(count, device=DEVICE) - 1, torch.randint(9, (4,), device=DEVICE))
        for fed in (None, feeds):
            found = one(tokens, fed, positions, table, frequencies)
            expected = reference.embed(tokens, fed, positions, table, frequencies)
            for each, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(each, wanted, atol=1e-5, rtol=1e-5)
        logits, chosen = normal(count, 40), torch.empty(count, dtype=torch.int64, device=DEVICE)
        sampler(logits, chosen)
        assert torch.equal(chosen, logits.argmax(-1))
    with pytest.raises(ValueError, match=r"positions is \[2\]; allowed: \[4\]"):
        one(tokens, None, positions[:2], table, frequencies)
    with pytest.raises(ValueError, match=r"tokens is \[3\]; allowed: \[4\]"):
        sampler(normal(4, 40), chosen[:3])
    with pytest.raises(ValueError, match=r"temperature is \[4\]; allowed: \[5\]"):
        sampler(normal(5, 40), torch.empty(5, dtype=torch.int64, device=DEVICE))
