"""The part of a dimension that one of several ranks holds. No torch."""

from dataclasses import dataclass

from kvrelay.engine.ranks.collective import Place

WIDTH = 16
"""Divisor of each rank's part of the vocabulary and of the MLP's width: packed weights are in blocks of as many outputs
(`kernels.cpu.packed.BLOCK`)."""


@dataclass(frozen=True, slots=True)
class Span:
    """Some numbers of a dimension, and zeros behind them."""

    begin: int
    end: int
    size: int
    """Numbers that are held: `end - begin`, and the zeros."""
    of: int
    """Numbers of the whole dimension."""

    @property
    def count(self) -> int:
        """Numbers without the zeros."""
        return self.end - self.begin

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the dimension, without zeros."""
        return self.count == self.size == self.of

    def within(self, offset: int, of: int) -> "Span":
        """The same numbers of a longer dimension, in which this one begins at `offset`."""
        return Span(self.begin + offset, self.end + offset, self.size, of)


def whole(count: int) -> Span:
    """All of a dimension."""
    return Span(0, count, count, count)


def even_span(count: int, place: Place, unit: int = WIDTH) -> Span:
    """The rank's part of a dimension that the ranks of a stage share in whole units, as evenly as these allow.

    All ranks' parts have the same size, with zeros behind those that have less.
    """
    of = place.degree.tensor
    if of == 1:
        return whole(count)
    units, number = -(-count // unit), place.rank % of
    begin, end = number * units // of * unit, (number + 1) * units // of * unit
    return Span(min(begin, count), min(end, count), -(-units // of) * unit, count)
