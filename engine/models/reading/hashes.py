"""Hashes of a checkpoint's tensors over all of their bytes, kept between starts. No torch.

The hash of a file's tensors is remembered in the user's cache, in one small JSON file for each file of weights, beside
what the file system says of it: device, inode, size, and the times of its last change. As long as all of these are the
same, the file isn't read again. A record that can't be read or written costs a second reading, and nothing else.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import xxhash

from kvrelay.machine.cache import user_cache

logger = logging.getLogger(__name__)

FRESH_SECONDS = 2.0
"""Age in seconds up to which a changed file may change again without another time: some file systems count in whole
seconds."""
MAX_RECORDS = 4096
"""Limit of the number of records; those of files that were hashed longest ago are removed first. A record of a large
file takes about 100 KB."""
READ_BYTES = 2**24

State = list[int]
"""A file's device, inode, size, and times of change of its contents and of its inode in nanoseconds."""


def hash_bytes(data: "memoryview | bytes") -> str:
    """XXH3 of 128 bits, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)


def hash_range(path: Path, begin: int, end: int) -> str:
    """`hash_bytes` of the bytes [begin, end) of a file, read in pieces.

    Raises:
        ValueError: the file ends before.
    """
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while begin < end:
            piece = file.read(min(READ_BYTES, end - begin))
            if not piece:
                raise ValueError(f"{path}: cut short at {begin} bytes")
            digest.update(piece)
            begin += len(piece)
    return digest.hexdigest()


def state_of(path: Path) -> State:
    """The state of a file, which another one takes the place of with each change of its contents.

    Raises:
        OSError: there is no such file.
    """
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def recall(path: Path) -> dict[str, str]:
    """The hashes of a file's tensors by name, from its record; empty if there is none of the file as it is now."""
    try:
        record = json.loads(_record(path).read_bytes())
        if record["state"] != state_of(path):
            return {}
        return {str(name): str(value) for name, value in record["hashes"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("the record of the hashes of %s can't be used, so it is hashed again: %s", path, error)
        return {}


def remember(path: Path, state: State, hashes: Mapping[str, str]) -> None:
    """Keeps the hashes of a file's tensors, unless the file changed since it had the `state`, or just before."""
    record = _record(path)
    try:
        if state_of(path) != state or time.time() - max(state[3:]) / 1e9 < FRESH_SECONDS:
            return
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=record.parent)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"path": str(path), "state": state, "hashes": dict(hashes)}, file)
            os.replace(name, record)
        except BaseException:
            os.unlink(name)
            raise
        by_age = sorted(record.parent.iterdir(), key=lambda each: each.stat().st_mtime)
        for old in by_age[:-MAX_RECORDS]:
            old.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("the hashes of %s can't be kept, so the next start hashes it again: %s", path, error)


def _record(path: Path) -> Path:
    return user_cache() / "hashes" / f"{sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
