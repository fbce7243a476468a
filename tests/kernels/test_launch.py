"""A launch that is repeated gives compiled code what Triton would give it; the kernels' own tests repeat theirs."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrelay.kernels.triton import launch as launch_module
from kvrelay.kernels.triton.launch import launch


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
