"""The block tables of the running sequences, in one matrix that each step copies its rows from."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class BlockTables:
    """int32 [rows, width]: row `slot` lists the pool blocks of one sequence; unused entries are 0.

    A row in use is only appended to, so a decode step costs one copy, whatever the lengths of its contexts.
    """

    def __init__(self, rows: int, width: int) -> None:
        self._matrix = np.zeros((rows, width), np.int32)
        self._used = [0] * rows
        self._vacant = list(range(rows - 1, -1, -1))

    @property
    def vacant(self) -> int:
        """Unused rows."""
        return len(self._vacant)

    def acquire(self) -> int:
        """Takes an unused row. There must be one."""
        return self._vacant.pop()

    def release(self, slot: int) -> None:
        """Clears the row and returns it."""
        self._matrix[slot, : self._used[slot]] = 0
        self._used[slot] = 0
        self._vacant.append(slot)

    def grow(self, slot: int, blocks: Sequence[int], used: int) -> None:
        """Appends to the row, which lists a prefix of `blocks[:used]`, the rest of these blocks."""
        known = self._used[slot]
        if used > known:
            self._matrix[slot, known:used] = blocks[known:used]
            self._used[slot] = used

    def gather(self, slots: Sequence[int]) -> NDArray[np.int32]:
        """A copy of the given rows, as wide as the longest of them."""
        width = max([self._used[slot] for slot in slots])
        # `take` would copy the whole matrix first, as these columns of it aren't contiguous.
        return self._matrix[slots, :width]
