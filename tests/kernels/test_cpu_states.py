"""The native kernels of layers with a state equal `kernels/reference.py`, for any ragged rows on scattered slots."""

from collections.abc import Callable

import pytest
from state_steps import DTYPES, STEPS, Scene

from kvrelay.kernels.cpu.program import Team
from kvrelay.kernels.cpu.states import NativeStateOps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize("threads", [1, 3])
class TestEqual:
    def test_conv(self, team_of: Callable[[int], Team], rows: list[tuple[int, int]], dtype: str, threads: int) -> None:
        for channels, width in ((48, 4), (37, 3), (5, 1)):
            Scene(rows, dtype).check_conv(NativeStateOps(team_of(threads)), channels, width)

    def test_ssd(self, team_of: Callable[[int], Team], rows: list[tuple[int, int]], dtype: str, threads: int) -> None:
        for heads, groups, dim, size in ((4, 1, 64, 128), (6, 3, 20, 9), (2, 2, 80, 16)):
            Scene(rows, dtype).check_ssd(NativeStateOps(team_of(threads)), heads, groups, dim, size)

    def test_delta(self, team_of: Callable[[int], Team], rows: list[tuple[int, int]], dtype: str, threads: int) -> None:
        for heads, key_heads, dim, key_dim in ((4, 2, 64, 64), (6, 6, 20, 9), (3, 1, 80, 128)):
            Scene(rows, dtype).check_delta(NativeStateOps(team_of(threads)), heads, key_heads, dim, key_dim)

    def test_wkv(self, team_of: Callable[[int], Team], rows: list[tuple[int, int]], dtype: str, threads: int) -> None:
        for channels in (48, 37):
            Scene(rows, dtype).check_wkv(NativeStateOps(team_of(threads)), channels)
