"""Packed layers of a model on disk, so that a restart needn't quantize and pack them again.

A file holds one model for one way of packing:

    parts of the layers, each at a multiple of ALIGNMENT | index: JSON | length of the index and its xxh3, 8 bytes each

The index has each layer's facts and, of each part, type, shape, offset and xxh3. A file is written beside its place and
renamed when it is whole and on disk. So a reader sees a whole file or none, and what a killed worker leaves is removed
by a later writer. Each part is checked as it is read.
"""

import hashlib
import json
import logging
import math
import os
import struct
import tempfile
import time
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from kvrelay.kernels import codes
from kvrelay.kernels.cpu.packed import Arena, PackedFacts, PackedLinear
from kvrelay.kernels.cpu.program import Team
from kvrelay.kernels.ops import Linear
from kvrelay.machine.cache import user_cache

logger = logging.getLogger(__name__)

ALIGNMENT = 64
TRAILER = struct.Struct("<QQ")
SUFFIX, UNFINISHED = ".packed", ".part"
ABANDONED_SECONDS = 3600.0
"""Seconds after which a file that nobody has written to belongs to no worker."""


class DamagedCacheError(Exception):
    """A file isn't what was written."""


class PackedCache:
    """Finished layers of a model, by name, in one file."""

    def __init__(self, path: Path, team: Team, most_bytes: int, *, read: bool = True) -> None:
        """
        Args:
            path: of the model's file, in a folder of such files.
            most_bytes: of all files in the folder.
            read: whether a file that is there is used; else it is written anew.

        Raises:
            DamagedCacheError: the file is cut short, or its index isn't what was written.
        """
        self._path, self._team, self._most = path, team, most_bytes
        self._arena = Arena()
        self._made: dict[str, PackedLinear] = {}
        self._file: BufferedReader | None = None
        self._index: dict[str, Any] = {}
        if not read:
            return
        try:
            self._file = path.open("rb")
            self._index = _read_index(self._file)
            os.utime(path)
        except FileNotFoundError:
            pass
        except (OSError, struct.error, ValueError) as error:
            raise DamagedCacheError(f"{path}: {error!r}") from error

    def load(self, name: str) -> PackedLinear | None:
        """The layer; None if all layers are to be made.

        Raises:
            DamagedCacheError: the file has no such layer, or other bytes than were written.
        """
        if self._file is None:
            return None
        try:
            entry = self._index[name]
            parts = {end: _read_part(self._file, self._arena, *part) for end, part in entry["parts"].items()}
            return PackedLinear(self._team, PackedFacts(*entry["facts"]), **parts)
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise DamagedCacheError(f"{self._path}: layer {name}: {error!r}") from error

    def store(self, name: str, layer: Linear) -> None:
        """Keeps a layer that was made, if it is packed."""
        if isinstance(layer, PackedLinear):
            self._made[name] = layer

    def finish(self) -> None:
        """Writes the layers that were made, when all layers are here. Logs a warning if they can't be written."""
        if self._file is not None:
            self._file.close()
        elif size := sum([layer.nbytes for layer in self._made.values()]):
            if size > self._most:
                logger.warning("packed_cache_bytes is %d, less than the packed weights: %d", self._most, size)
                return
            began = time.monotonic()
            try:
                _write(self._path, self._made)
                _evict(self._path, self._most)
            except OSError as error:
                logger.warning("the packed weights can't be written to %s: %s", self._path, error)
                return
            logger.info("wrote %d bytes of packed weights to %s in %.1f s", size, self._path, time.monotonic() - began)


def packed_path(weights: str, team: Team) -> Path:
    """The file of a model's packed weights in the user's cache.

    Args:
        weights: what they are made of and how; the kernels, which are this CPU's, and the way of quantizing are added.
    """
    library = team.library._name  # noqa: SLF001  # ctypes has no other name for it
    digest = hashlib.sha256(f"{weights} {Path(library).name} ".encode())
    digest.update(Path(codes.__file__).read_bytes())
    return user_cache() / "packed" / f"{digest.hexdigest()[:24]}{SUFFIX}"


def _write(path: Path, layers: Mapping[str, PackedLinear]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            index = {}
            for layer_name, layer in layers.items():
                parts = {}
                for end, tensor in layer.parts().items():
                    file.write(bytes(-file.tell() % ALIGNMENT))
                    data = _bytes(tensor)
                    shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
                    parts[end] = dtype, shape, file.tell(), xxhash.xxh3_64_intdigest(data)
                    file.write(data)
                index[layer_name] = {"facts": layer.facts, "parts": parts}
            text = json.dumps(index).encode()
            file.write(text)
            file.write(TRAILER.pack(len(text), xxhash.xxh3_64_intdigest(text)))
            file.flush()
            os.fsync(file.fileno())
        Path(name).rename(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _evict(own: Path, most_bytes: int) -> None:
    """Removes other models' files, those that were used least recently first, until all fit, and abandoned ones."""
    for path in own.parent.glob(f"*{UNFINISHED}"):
        if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
            path.unlink(missing_ok=True)
    found = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in own.parent.glob(f"*{SUFFIX}"))
    total = sum(size for _, size, _ in found)
    for _, size, path in found:
        if total > most_bytes and path != own:
            path.unlink(missing_ok=True)
            total -= size


def _read_index(file: BufferedReader) -> dict[str, Any]:
    file.seek(-TRAILER.size, os.SEEK_END)
    end = file.tell()
    length, digest = TRAILER.unpack(file.read(TRAILER.size))
    if length > end:
        raise ValueError(f"an index of {length} bytes in {end}")
    file.seek(end - length)
    text = file.read(length)
    if xxhash.xxh3_64_intdigest(text) != digest:
        raise ValueError("the index isn't what was written")
    index: dict[str, Any] = json.loads(text)
    return index


def _read_part(file: BufferedReader, arena: Arena, dtype: str, shape: list[int], offset: int, digest: int) -> Tensor:
    kind = getattr(torch, dtype)
    tensor = arena.take(math.prod(shape) * kind.itemsize).view(kind).view(shape)
    data = _bytes(tensor)
    file.seek(offset)
    if file.readinto(data) != len(data):
        raise ValueError("it is cut short")
    if xxhash.xxh3_64_intdigest(data) != digest:
        raise ValueError("it isn't what was written")
    return tensor


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
