"""Reads the header of a GGUF file: metadata, and the place of each tensor. No torch.

    magic, version, number of tensors, number of metadata pairs | pairs | tensors | padding | the tensors' bytes

Numbers are little-endian. A text is its length in 8 bytes and UTF-8. Every length is compared with the file's before
anything is made of it, so a damaged header costs no memory.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvrelay.machine.gguf import TYPES

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
MAX_HEADER_BYTES = 2**28
MAX_DIMENSIONS = 4
MAX_TEXT_SHOWN = 80
TEXT, ARRAY = 8, 9
_NAMES = {kind.number: name for name, kind in TYPES.items()}
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of the types of numbers in the metadata."""


class GGUFError(ValueError):
    """A GGUF file can't be read, or its model can't be served; the text names the file and the field."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file."""

    path: Path
    dtype: str
    """Name of its type, e.g. `Q4_1`."""
    shape: tuple[int, ...]
    """Shape with the outputs first, as torch has it; the file has it the other way round."""
    begin: int
    """Offset in bytes of its data from the start of the file."""
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a file: everything before the tensors' data."""

    path: Path
    metadata: Mapping[str, Any]
    """Values by key: numbers, booleans, texts, and lists of them."""
    tensors: Mapping[str, TensorInfo]

    def refuse(self, key: str, allowed: str) -> NoReturn:
        """Raises the GGUFError for a key of the metadata."""
        if key not in self.metadata:
            raise GGUFError(self.path, f"{key} is missing; allowed: {allowed}")
        shown = repr(self.metadata[key])
        shown = shown if len(shown) <= MAX_TEXT_SHOWN else f"{shown[:MAX_TEXT_SHOWN]}..."
        raise GGUFError(self.path, f"{key} is {shown}; allowed: {allowed}")

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """Below 2**31; the default, if there is one, stands for a key that is absent."""
        value = self.metadata.get(key, default)
        if type(value) is not int or not minimum <= value < 2**31:
            self.refuse(key, f"an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.metadata.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            self.refuse(key, "a number above 0")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            self.refuse(key, "a text")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if type(value) is not bool:
            self.refuse(key, "true, false")
        return value

    def entries(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """A list whose entries are of one type."""
        value = self.metadata.get(key, default)
        if not isinstance(value, list) or not all(type(entry) is kind for entry in value):
            self.refuse(key, f"a list of {kind.__name__}")
        return value


def read_header(path: Path) -> Header:
    """The header of one file.

    Raises:
        GGUFError: it isn't a GGUF file, is cut short or damaged, or has tensors of a type that can't be read; the text
            names the field.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise GGUFError(path, f"not a GGUF file: it doesn't begin with {MAGIC.decode()}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise GGUFError(path, error.strerror or str(error)) from None


class _Reader:
    """Reads one file from its beginning on."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, len(MAGIC)
        self._size = len(data)
        self._end = min(self._size, MAX_HEADER_BYTES)
        self._field = "version"
        """Field that is read, for messages."""

    def header(self) -> Header:
        version = self._number("I")
        if version not in VERSIONS:
            allowed = ", ".join(map(str, VERSIONS))
            swapped = "; it is written for big-endian machines" if version and not version & 0xFFFF else ""
            self._refuse(f"{version}; allowed: {allowed}{swapped}")
        # The smallest pair and the smallest tensor: lengths, types and offsets alone.
        tensors = self._count("number of tensors", 8 + 4 + 8 + 4 + 8)
        pairs = self._count("number of metadata pairs", 8 + 4 + 1)
        metadata: dict[str, Any] = {}
        for index in range(pairs):
            self._field = f"key of metadata pair {index}"
            key = self._text()
            self._field = key
            if key in metadata:
                self._refuse("there twice")
            metadata[key] = self._value(self._number("I"))
        alignment = metadata.get(ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1) or alignment > 2**20:
            self._field = ALIGNMENT
            self._refuse(f"{alignment!r}; allowed: a power of two from 8 to {2**20}")
        found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        for index in range(tensors):
            self._field = f"name of tensor {index}"
            name = self._text()
            self._field = f"tensor {name}"
            if name in found:
                self._refuse("there twice")
            found[name] = self._tensor(alignment)
        start = -(-self._at // alignment) * alignment
        infos = {
            name: TensorInfo(self._path, dtype, shape, start + offset, start + offset + size)
            for name, (dtype, shape, offset, size) in found.items()
        }
        self._check_places(infos)
        return Header(self._path, metadata, infos)

    def _tensor(self, alignment: int) -> tuple[str, tuple[int, ...], int, int]:
        """Type, shape, offset in the data, and bytes."""
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            self._refuse(f"of {dimensions} dimensions; allowed: 1 to {MAX_DIMENSIONS}")
        shape = tuple(reversed([self._number("Q") for _ in range(dimensions)]))
        number, offset = self._number("I"), self._number("Q")
        if number not in _NAMES:
            self._refuse(f"of type {number}; allowed: {', '.join(TYPES)}")
        dtype = _NAMES[number]
        _, block, size = TYPES[dtype]
        if not all(shape) or math.prod(shape) > 8 * self._size or shape[-1] % block:
            self._refuse(
                f"of {dtype} with shape {list(shape)}; allowed: rows of whole blocks of {block} in {self._size} bytes"
            )
        if offset % alignment or offset > self._size:
            self._refuse(f"at offset {offset}; allowed: multiples of {alignment} within {self._size} bytes")
        return dtype, shape, offset, math.prod(shape) // block * size

    def _check_places(self, tensors: Mapping[str, TensorInfo]) -> None:
        last, last_name = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].begin):
            self._field = f"tensor {name}"
            if tensor.begin < last:
                self._refuse(f"begins at byte {tensor.begin}, within tensor {last_name}")
            if tensor.end > self._size:
                self._refuse(f"ends at byte {tensor.end}; the file has {self._size}, so it is cut short or damaged")
            last, last_name = tensor.end, name

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            return self._number(self._format(kind))
        entry, count = self._number("I"), self._number("Q")
        if entry == TEXT:
            self._check(count, 8)
            return [self._text() for _ in range(count)]
        code = self._format(entry)
        self._check(count, struct.calcsize(code))
        numbers = struct.unpack_from(f"<{count}{code}", self._data, self._at)
        self._at += count * struct.calcsize(code)
        return list(numbers)

    def _format(self, kind: int) -> str:
        if kind not in _NUMBERS:
            self._refuse(f"of type {kind}; allowed: {', '.join(map(str, (*_NUMBERS, TEXT)))}, and arrays of these")
        return _NUMBERS[kind]

    def _number(self, code: str) -> Any:
        size = struct.calcsize(code)
        self._check(1, size)
        (number,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += size
        return number

    def _text(self) -> str:
        length = self._number("Q")
        self._check(length, 1)
        data = self._data[self._at : self._at + length]
        self._at += length
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            self._refuse(f"not UTF-8: {error}")

    def _count(self, field: str, size: int) -> int:
        """A number of things of at least `size` bytes each, of which that many fit into the rest of the header."""
        self._field = field
        count: int = self._number("Q")
        self._check(count, size)
        return count

    def _check(self, count: int, size: int) -> None:
        """Raises GGUFError unless the header has so many more values of so many bytes."""
        left = self._end - self._at
        if count * size > left:
            end = "of the file" if self._end == self._size else f"of the header's limit of {MAX_HEADER_BYTES} bytes"
            self._refuse(f"{count} x {size} bytes, {left} before the end {end}: cut short or damaged")

    def _refuse(self, problem: str) -> NoReturn:
        raise GGUFError(self._path, f"{self._field}: {problem}")
