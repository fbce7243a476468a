"""Costs of the two ways in which ranks that hold whole experts exchange a layer's rows.

    all_reduce   all ranks have all rows; what their experts compute is added up over all of them
    all_to_all   each rank has the experts' layer of its own rows: a part of the sum behind attention, rows to the ranks
                 of their experts and back, and in the end all ranks' rows

A rank receives these numbers from others, with n ranks, T rows of width h, and f times a row that goes to another rank:

    all_reduce   2 (n - 1) T h                                  two sums, for which each rank reads all parts
    all_to_all   2 (n - 1) T h / n + (f T / n) (2 h + 2 top)    experts' numbers and shares go with a row
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal

Exchange = Literal["all_reduce", "all_to_all"]
ITEM = 4
"""Bytes of a number: rows are float32."""


@dataclass(frozen=True, slots=True)
class ExchangeShape:
    """Sizes of a layer of experts over ranks, each with as many experts."""

    ranks: int
    experts: int
    top: int
    """Experts of a row."""
    hidden: int

    @property
    def asked(self) -> float:
        """Other ranks that a row goes to, on average, if its experts are any of all with equal chances."""
        each = self.experts // self.ranks
        return (self.ranks - 1) * (1 - comb(self.experts - each, self.top) / comb(self.experts, self.top))

    def all_reduce_bytes(self, rows: int) -> int:
        """Bytes that a rank receives from others, for a layer and `rows` rows of all ranks together."""
        return 2 * (self.ranks - 1) * rows * self.hidden * ITEM

    def all_to_all_bytes(self, rows: int, sent: int, returned: int) -> int:
        """Bytes that a rank receives from others, for a layer.

        Args:
            rows: of all ranks together, which `ranks` divides.
            sent: rows that other ranks send to this one, for its experts.
            returned: rows of this rank's that other ranks send back.
        """
        parts = 2 * (self.ranks - 1) * (rows // self.ranks) * self.hidden
        return (parts + sent * (self.hidden + 2 * self.top) + returned * self.hidden) * ITEM

    def expected_bytes(self, rows: int) -> int:
        """As `all_to_all_bytes`, on average, if each row goes to `asked` other ranks."""
        sent = round(self.asked * rows / self.ranks)
        return self.all_to_all_bytes(rows, sent, sent)


@dataclass(frozen=True, slots=True)
class ExchangeCosts:
    """Measured seconds of one layer of experts in both ways, with what it computes; in between, on straight lines."""

    rows: Sequence[int]
    """Ascending numbers of rows that were measured, two or more."""
    all_reduce: Sequence[float]
    all_to_all: Sequence[float]

    def cheaper(self, rows: int) -> Exchange:
        """The way that takes less time for so many rows; `all_reduce` if both take the same."""
        saved = self._at(self.all_reduce, rows) - self._at(self.all_to_all, rows)
        return "all_to_all" if saved > 0 else "all_reduce"

    def _at(self, seconds: Sequence[float], rows: int) -> float:
        right = min(max(1, bisect_left(self.rows, rows)), len(self.rows) - 1)
        begin, end = self.rows[right - 1], self.rows[right]
        return seconds[right - 1] + (seconds[right] - seconds[right - 1]) * (rows - begin) / (end - begin)
