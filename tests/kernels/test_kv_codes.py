"""KV of 8 bits: every number comes back within half a step of its type, whatever the numbers are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kernels.kv_codes import LARGEST, dequantize, quantize

TYPES = list(LARGEST)
SMALLEST = torch.finfo(torch.float32).tiny
rows = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40)


@given(rows, st.sampled_from(TYPES))
def test_numbers_come_back_within_half_a_step(numbers: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(numbers, dtype=torch.float32)
    largest = x.abs().max().double()
    codes, scale = quantize(x, dtype)
    assert codes.dtype == dtype
    assert scale.dtype == torch.bfloat16
    assert codes.float().abs().max() <= LARGEST[dtype]
    if scale == 0:
        assert largest / LARGEST[dtype] < SMALLEST * 1.01
        assert not codes.float().any()
        return
    # Rounded up to bfloat16, a scale is larger by less than 2^-7.
    exact = largest / LARGEST[dtype]
    assert exact * (1 - 1e-6) <= scale.double() <= exact * (1 + 2**-7) + 1e-40
    found = codes.double() * scale.double()
    if dtype == torch.int8:
        step = scale.double() * (0.5 + 1e-5)
    else:  # three bits after the first one, and the numbers next to 0 are 2^-9 apart
        step = torch.maximum(x.double().abs() * 2**-4, scale.double() * 2**-10) * (1 + 1e-5)
    assert ((found - x.double()).abs() <= step).all()


@given(rows, st.integers(-20, 20), st.sampled_from(TYPES))
def test_a_power_of_two_changes_only_the_scale(numbers: list[float], power: int, dtype: torch.dtype) -> None:
    x = torch.tensor(numbers, dtype=torch.float32).clamp(-1e20, 1e20)
    x[x.abs() < 1e-20] = 0.0
    codes, scale = quantize(x, dtype)
    other_codes, other_scale = quantize(x * 2.0**power, dtype)
    assert torch.equal(codes.float(), other_codes.float())
    assert other_scale.double() == scale.double() * 2.0**power


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_have_scales_of_their_own(dtype: torch.dtype) -> None:
    x = torch.randn(7, 3, 16) * torch.tensor([1e-6, 1.0, 1e6])[:, None]
    codes, scales = quantize(x, dtype)
    assert scales.shape == (7, 3)
    for row in range(7):
        for head in range(3):
            one, scale = quantize(x[row, head], dtype)
            assert torch.equal(codes[row, head].float(), one.float())
            assert scales[row, head] == scale


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows(bad: float, dtype: torch.dtype) -> None:
    x = torch.ones(2, 8)
    x[0, 3] = bad
    found = dequantize(*quantize(x, dtype))
    assert not found[0].isfinite().any()
    assert found[1].isfinite().all()
