"""How many groups of layers the last chunk of a prompt leaves in, by what frames and computation are measured to take.

Layers leave while later ones compute, so only the last group's time on the link is left to wait for; but each group
costs a frame, and where the link's work takes a core from the computation, that work is paid for either way.

    ready(g)  = C g / G                                   group g of G, of a chunk that computes for C seconds
    sent(g)   = max(ready(g), sent(g - 1)) + a + b n / G  frames cost a each, and b a byte; the chunk has n bytes
    exposed   = sent(G) - C + s (G - 1) (a + b n / G)     s: share of the link's time that computation loses

G is the one with the least exposed time; 1 where nothing is known yet of the link or the computation.
"""

from dataclasses import dataclass

MEMORY = 32
"""Frames or steps after which an observation counts for about a third of what it did."""
CHOICES = (1, 2, 4, 8, 16)


class LinkCost:
    """Seconds that frames of a link take: `overhead` each, and `per_byte`; a line fitted to what was seen lately."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0

    def observe(self, nbytes: int, seconds: float) -> None:
        keep = 1 - 1 / MEMORY
        self._weight = self._weight * keep + 1
        self._x = self._x * keep + nbytes
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + nbytes * nbytes
        self._xy = self._xy * keep + nbytes * seconds

    def fit(self) -> tuple[float, float]:
        """(overhead, per_byte), neither negative. Frames of one size only tell no overhead: then it is 0."""
        if not self.known:
            return 0.0, 0.0
        spread = self._weight * self._xx - self._x * self._x
        mean = self._y / self._x if self._x else 0.0
        if spread <= 1e-9 * self._weight * self._xx:
            return 0.0, mean
        slope = (self._weight * self._xy - self._x * self._y) / spread
        overhead = (self._y - slope * self._x) / self._weight
        if slope < 0:
            return self._y / self._weight, 0.0
        return (overhead, slope) if overhead >= 0 else (0.0, mean)


class ComputeCost:
    """Seconds that a token of a prompt takes to compute, as seen lately."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0

    @property
    def per_token(self) -> float | None:
        """None while nothing was seen."""
        return self._seconds / self._tokens if self._tokens else None

    def observe(self, tokens: int, seconds: float) -> None:
        keep = 1 - 1 / MEMORY
        self._tokens = self._tokens * keep + tokens
        self._seconds = self._seconds * keep + seconds


@dataclass(frozen=True, slots=True)
class Overlap:
    """What the choice depends on, of one chunk."""

    compute_seconds: float
    nbytes: int
    overhead: float
    per_byte: float
    contention: float
    """Share of the link's time that the computation loses to it: 0 on a GPU, 1 where there is one core for both."""

    def exposed(self, groups: int) -> float:
        """Seconds from the end of an undisturbed computation to the last byte."""
        share = self.nbytes / groups
        sent = 0.0
        for group in range(1, groups + 1):
            sent = max(sent, self.compute_seconds * group / groups) + self.overhead + self.per_byte * share
        lost = self.contention * (groups - 1) * (self.overhead + self.per_byte * share)
        return sent - self.compute_seconds + lost

    def groups(self, layers: int) -> int:
        """The best number of groups for a model of so many layers."""
        return min((each for each in CHOICES if each <= layers), key=self.exposed)


def borders(layers: int, groups: int) -> tuple[int, ...]:
    """After how many layers each group but the last is complete."""
    return tuple(layers * group // groups for group in range(1, groups))
