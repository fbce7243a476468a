"""A prompt's token ids, as a router keeps them: packed as on the wire, in one to five bytes each."""

import asyncio
from collections.abc import Sequence

from kvrelay.internal.v1.worker_pb2 import Submit

PART_TOKENS = 16384
"""Token ids that are converted at a time, in about a millisecond; then others have their turn on the event loop."""


class Prompt:
    """Token ids that wait to be submitted. Immutable.

    A list of Python integers would take ten times the memory, and some 10 ms to be converted for a Submit of 128k ids.
    """

    __slots__ = ("_length", "_packed")

    def __init__(self, *parts: Sequence[int]) -> None:
        """`parts` are the ids in order."""
        self._length = sum(map(len, parts))
        # Serialized messages of one kind merge when they are joined: lists become one list.
        self._packed = b"".join(Submit(token_ids=part).SerializeToString() for part in parts)

    @classmethod
    async def of(cls, token_ids: Sequence[int]) -> "Prompt":
        """The same as the constructor, in parts, so that the event loop is not held."""
        whole = cls()
        for start in range(0, len(token_ids), PART_TOKENS):
            part = cls(token_ids[start : start + PART_TOKENS])
            whole._packed += part._packed
            whole._length += part._length
            await asyncio.sleep(0)
        return whole

    @classmethod
    def of_packed(cls, packed: bytes, length: int) -> "Prompt":
        """The prompt of `length` tokens that has these ids as `packed`."""
        whole = cls()
        whole._packed, whole._length = packed, length
        return whole

    @property
    def packed(self) -> bytes:
        """The ids, as a serialized Submit."""
        return self._packed

    def __len__(self) -> int:
        """Number of tokens."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return len(self._packed)

    def submit(self, generated: Sequence[int]) -> Submit:
        """A Submit with these ids followed by `generated`, and nothing else."""
        submit = Submit.FromString(self._packed)
        submit.token_ids.extend(generated)
        return submit
