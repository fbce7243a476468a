"""Bytes of a hand-off, and the seconds of it that a request waits for.

A prompt's KV is sent chunk by chunk while later chunks are computed. So only the last chunk's bytes are exposed, unless
the link is slower than the computing:

    computing   | chunk 1 | chunk 2 | chunk 3 |
    link                  |  bytes 1 |  bytes 2 |  bytes 3 | + fixed: announcing, verifying, the first step's start
                                              |<------- exposed ------->|
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.costs.fit import LinearFit


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Bytes of a sequence's cache, by layer group."""

    token: float = 0.0
    """Bytes of one token in the groups that keep all tokens."""
    windows: tuple[tuple[float, int], ...] = ()
    """(bytes of one token, tokens kept) of each group that keeps the latest tokens only."""
    fixed: float = 0.0
    """Bytes that don't depend on the length: states."""

    def between(self, first: float, end: float) -> float:
        """Bytes of a hand-off after which the receiver has `end` tokens, of which it had the first `first` before."""
        sent = max(0.0, end - first)
        found = self.token * sent + self.fixed
        return found + sum([each * min(sent, kept) for each, kept in self.windows]) if self.windows else found


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Coefficients of the hand-offs over one link, in seconds; none negative."""

    fixed: float = 0.0
    """Any hand-off, behind the last chunk's computation."""
    byte: float = 0.0

    def exposed(self, total: float, last: float, computing: float) -> float:
        """Seconds from the first token to the decode worker's first step for it.

        Args:
            total: bytes of the whole hand-off.
            last: bytes of the chunk that is computed last; at most `total`.
            computing: seconds in which later chunks are computed while earlier ones are sent.
        """
        return self.fixed + max(self.byte * last, self.byte * total - computing)


class LinkFit:
    """Fits a LinkCost to the hand-offs over one link. Not thread-safe."""

    def __init__(self) -> None:
        self._fit = LinearFit(2)

    @property
    def error(self) -> float:
        """Mean relative error of the predictions."""
        return self._fit.error

    @property
    def handoffs(self) -> int:
        """Number of hand-offs taken so far."""
        return self._fit.samples

    def add(self, exposed_bytes: float, seconds: float) -> None:
        """Takes a hand-off.

        Args:
            exposed_bytes: bytes that were sent after the prompt's last chunk was computed.
            seconds: from then to the end of the hand-off.
        """
        self._fit.add((1.0, exposed_bytes), seconds, int(exposed_bytes).bit_length())

    def cost(self) -> LinkCost | None:
        """The coefficients; None before the first hand-off."""
        found = self._fit.coefficients
        return None if found is None else LinkCost(*found)


def typical(links: Sequence[LinkCost]) -> LinkCost:
    """Coefficients for a link that isn't known yet: the medians of those that are; all 0 if none is."""
    if not links:
        return LinkCost()
    fixed, byte = sorted(link.fixed for link in links), sorted(link.byte for link in links)
    return LinkCost(fixed[len(fixed) // 2], byte[len(byte) // 2])
