"""The native kernels of layers with a state equal `kernels/reference.py`, for any ragged rows on scattered slots."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from state_steps import DTYPES, SLOTS, STEPS, Scene
from torch import Tensor

from kvrelay.kernels import reference
from kvrelay.kernels.cpu.packed import Arena, PackedLinear
from kvrelay.kernels.cpu.program import Team
from kvrelay.kernels.cpu.states import GatedConv, NativeStateOps
from kvrelay.kernels.states import StateRows, TimeStep

DELTAS = (4, 2, 64, 64), (6, 6, 20, 9), (3, 1, 80, 128)
SIZES: dict[str, list[tuple[int, ...]]] = {
    "conv": [(48, 4), (37, 3), (5, 1)],
    "ssd": [(4, 1, 64, 128), (6, 3, 20, 9), (2, 2, 80, 16)],
    "delta": [(*sizes, channels) for sizes in DELTAS for channels in (False, True)],
    "wkv": [(48,), (37,)],
}
"""Arguments of `Scene`'s checks."""


@pytest.mark.parametrize("operation", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.some(24)
def test_equals_its_definition(
    team_of: Callable[[int], Team], operation: str, rows: list[tuple[int, int]], dtype: str, threads: int
) -> None:
    for sizes in SIZES[operation]:
        getattr(Scene(rows, dtype), f"check_{operation}")(NativeStateOps(team_of(threads)), *sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.some(6)
def test_gated_conv(team_of: Callable[[int], Team], rows: list[tuple[int, int]], dtype: str, threads: int) -> None:
    team = team_of(threads)
    for channels, width, biased in ((48, 3, False), (37, 4, True)):
        scene, hidden = Scene(rows, dtype), 40
        first, last = scene.normal(3 * channels, hidden) / hidden**0.5, scene.normal(hidden, channels) / channels**0.5
        weight, bias = scene.normal(channels, width), scene.normal(channels) if biased else None
        x, state = scene.columns(hidden), scene.states(width, channels, dtype=scene.dtype)
        own = state[scene.slots].clone()
        packed = [PackedLinear.pack(team, Arena(), each, None) for each in (first, last)]
        found = GatedConv(team, packed[0], packed[1], weight, bias)(x, state, scene.rows)
        gates = packed[0](x.float())
        between = reference.gated_conv(gates, weight.T, bias, own, scene.firsts, scene.starts)
        torch.testing.assert_close(state[scene.slots], own, rtol=0, atol=0)
        torch.testing.assert_close(found, packed[1](between).to(scene.dtype), rtol=1e-2, atol=1e-4)
        torch.testing.assert_close(gates, x.float() @ first.float().T, rtol=2e-2, atol=2e-2)


def test_origins(team_of: Callable[[int], Team]) -> None:
    """Rows of one token, each behind the row before, leave the states of one row with all the tokens."""
    ops, alone = NativeStateOps(team_of(2)), Scene([(7, 3)], "float32")
    slot = int(alone.slots[0])
    slots = np.array([slot, (slot + 3) % SLOTS, (slot + 1) % SLOTS])
    starts, origins = np.array([7, 8, 9]), np.array([slot, slot, slots[1]])
    chain = StateRows.of(np.ones(3, np.int64), starts, slots, alone.device, origins)

    def check(run: Callable[[Tensor, StateRows], Tensor], state: Tensor) -> None:
        chained = state.clone()
        expected, found = run(state, alone.rows), run(chained, chain)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(chained[slots[2]], state[slot], rtol=1e-4, atol=1e-5)

    def of(*shape: int) -> Tensor:
        return alone.states(*shape, dtype=torch.float32)

    x, weight = alone.columns(40), alone.normal(40, 4)
    check(lambda state, rows: ops.conv(x, weight, None, state, rows, silu=True), of(4, 40))
    heads, dt, b, a = alone.columns(4, 20), alone.columns(4).abs(), alone.columns(2, 9), -alone.normal(4).abs()
    step = TimeStep(None, False, 0.0, 1e9)
    check(lambda state, rows: ops.ssd(heads, dt, a, b, b, None, step, state, rows), of(4, 9, 20))
    keys, g = alone.columns(2, 9), -alone.normal(3, 4).abs()
    for decays in (g, -alone.normal(3, 4, 9).abs()):
        ops = NativeStateOps(team_of(2))
        check(
            lambda state, rows, g=decays, ops=ops: ops.delta(keys, keys, heads, g, dt, state, rows, normalized=True),
            of(4, 9, 20),
        )
    decay = -alone.normal(40).exp()
    positive = of(3, 40)
    positive[:, 1].exp_()
    check(lambda state, rows: ops.wkv(x, x, decay, decay, state, rows), positive)
