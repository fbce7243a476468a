"""The checksum: the kernel agrees with its definition, and the changes that it must detect."""

import random
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton_compile import Compiler, each_architecture

from kvrelay.kernels.reference import kv_checksum
from kvrelay.kernels.triton import kv_checksum as kernel


def on_device(data: bytes, device: torch.device) -> int:
    padded = torch.frombuffer(bytearray(data) + bytes(1), dtype=torch.uint8)
    return int(kernel.kv_checksum(padded[:-1].to(device))) % 2**64


@pytest.mark.parametrize(
    "length", [0, 1, 7, 8, 9, 15, 16, 24, 31, 64, 4095, 8 * kernel.BLOCK, 8 * kernel.SPAN, 8 * kernel.SPAN + 21]
)
@pytest.mark.some(6)
def test_the_kernel_equals_its_definition(device: torch.device, length: int) -> None:
    data = random.Random(length).randbytes(length)
    assert on_device(data, device) == kv_checksum(data)
    assert on_device(bytes(length), device) == kv_checksum(bytes(length))


def test_the_definition_is_the_formula_on_plain_integers() -> None:
    def mix(x: int) -> int:
        x = (x ^ x >> 30) * kernel.M1 % 2**64
        x = (x ^ x >> 27) * kernel.M2 % 2**64
        return x ^ x >> 31

    for data in (b"", bytes(range(8)), bytes(range(200, 221))):
        total = mix(len(data) ^ kernel.LENGTH)
        for i in range(0, len(data), 8):
            total += mix(int.from_bytes(data[i : i + 8], "little") ^ (i // 8 + 1) * kernel.POSITION % 2**64)
        assert kv_checksum(data) == total % 2**64


@given(data=st.binary(min_size=1, max_size=4096), draw=st.data())
def test_any_change_within_a_word_changes_it(data: bytes, draw: st.DataObject) -> None:
    """A flipped bit is such a change."""
    first = draw.draw(st.integers(0, (len(data) - 1) // 8)) * 8
    size = min(8, len(data) - first)
    word = draw.draw(st.binary(min_size=size, max_size=size).filter(lambda word: word != data[first : first + size]))
    assert kv_checksum(data[:first] + word + data[first + size :]) != kv_checksum(data)


@given(
    data=st.one_of(st.binary(min_size=32, max_size=4096), st.integers(4, 500).map(bytes)),
    size=st.sampled_from([1, 8, 16]),
    draw=st.data(),
)
def test_parts_that_are_moved_cut_off_or_added_change_it(data: bytes, size: int, draw: st.DataObject) -> None:
    """Swapped parts, blocks that are shifted as a whole, truncation, and zeros at the end."""
    parts = [data[first : first + size] for first in range(0, len(data), size)]
    a, b = (draw.draw(st.integers(0, len(parts) - 1)) for _ in range(2))
    parts[a], parts[b] = parts[b], parts[a]
    shift = draw.draw(st.integers(1, 600)) * 8 % len(data)
    kept, zeros = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(1, 64))
    for changed in (b"".join(parts), data[shift:] + data[:shift], data[:kept], data + bytes(zeros)):
        assert (kv_checksum(changed) != kv_checksum(data)) == (changed != data)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"data is torch.int8 \[3\]"):
        kernel.kv_checksum(torch.zeros(3, dtype=torch.int8))
    with pytest.raises(ValueError, match="data isn't aligned"):
        kernel.kv_checksum(torch.zeros(30, dtype=torch.uint8)[3:])


def launch_blank(length: int) -> None:
    kernel.kv_checksum(torch.zeros(length, dtype=torch.uint8))


@pytest.mark.parametrize("length", [1, 1001])
@each_architecture
def test_compiled(compiler: Compiler, architecture: int, length: int) -> None:
    (compiled,) = compiler.compile(architecture, launch_blank, length)
    compiled.check_fits()
    assert re.search(r"ld\.global\S*\.v2\.b64", compiled.ptx), "no load of 16 bytes"


@pytest.mark.gpu
def test_on_a_gpu(gpu: torch.device) -> None:
    data = random.Random(0).randbytes(20_000_003)
    assert on_device(data, gpu) == kv_checksum(data)
