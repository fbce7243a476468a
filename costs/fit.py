"""A line that follows measured times: `seconds = coefficients . features`, fitted by least squares of relative errors.

Samples come in strata, e.g. steps of about the same size. Each stratum is a recursive least-squares sum in which an old
sample fades when a new one of the same stratum comes. So an hour of small steps doesn't make the fit forget what large
ones cost. No coefficient is negative, hence the predicted time never falls when a feature grows.

Features come in the order of their weight: until enough strata were seen, the last ones count as free. A few samples of
small steps would otherwise be explained by a feature that grows with the square of a step's size.
"""

import math
from collections.abc import Collection, Sequence
from operator import mul

import numpy as np

STRATUM_SAMPLES = 32
"""Number of newer samples of a stratum after which a sample weighs 1/e."""
ALL_SAMPLES = 4096
"""Number of newer samples of any stratum after which a sample weighs 1/e."""
FORGOTTEN = 8
"""Multiple of ALL_SAMPLES after which a stratum without newer samples is dropped."""
ERROR_SAMPLES = 64
"""Number of newer samples after which a sample's error counts 1/e in `LinearFit.error`."""
OUTLIER = 4.0
"""Multiple of the mean relative error from which a sample counts less: its weight falls with its error."""
LEAST_OUTLIER = 0.25
"""Relative error below which no sample is an outlier."""
RIDGE = 1e-4
"""Weight of the preference for small coefficients, relative to that of the samples. It decides where samples don't: of
steps of one size only, half of the time counts as fixed."""
KEEP = 1 - 1 / STRATUM_SAMPLES
RESTORED = 1 / 16
"""Weight of the sums of an earlier fit: the machine may be faster or slower now, which a few samples show."""
REFRESH = 8
"""Number of samples after which the coefficients are computed again."""


class LinearFit:
    """A fit of `size` coefficients. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._strata: dict[int, tuple[list[float], int]] = {}
        """(sums, number of the latest sample) of each stratum. The sums are X'X and X'y as one list, row by row; a row
        of X and y is divided by the whole time."""
        self.samples = 0
        """Number of samples so far."""
        self._fresh = 0
        self.error = 0.0
        """Mean of |predicted - measured| / measured of the latest samples, each predicted before it was measured."""
        self._coefficients: tuple[float, ...] | None = None

    @property
    def coefficients(self) -> tuple[float, ...] | None:
        """[size] seconds for one of each feature, none negative; None before the first sample."""
        if self._fresh and (self._fresh >= REFRESH or self.samples < 4 * REFRESH):
            self._coefficients, self._fresh = self._solved(), 0
        return self._coefficients

    @property
    def strata(self) -> Collection[int]:
        """Numbers of the strata that aren't forgotten."""
        return self._strata.keys()

    def predict(self, features: Sequence[float]) -> float | None:
        """Seconds for these features; None before the first sample."""
        coefficients = self.coefficients
        return None if coefficients is None else sum(map(mul, coefficients, features))

    def add(
        self, features: Sequence[float], seconds: float, stratum: int = 0, of: float | None = None, count: int = 1
    ) -> None:
        """Takes a sample; one that took no time is left out.

        Args:
            features: [size] none negative.
            seconds: measured time.
            stratum: samples of the same number fade each other.
            of: the whole time, where `seconds` is a part of it: errors are relative to it.
            count: samples that this one is the mean of.

        Raises:
            ValueError: `features` has another length than the fit.
        """
        if len(features) != self._size:
            raise ValueError(f"features has {len(features)} numbers; this fit has {self._size}")
        if seconds <= 0.0:
            return
        whole, weight = of or seconds, 1.0
        if (expected := self.predict(features)) is not None:
            off = abs(expected - seconds) / whole
            limit = max(LEAST_OUTLIER, OUTLIER * self.error)
            weight = min(1.0, limit / off) if off else 1.0
            share = 1 / min(self.samples, ERROR_SAMPLES)
            self.error += share * (min(off, 1.0) - self.error)
        # A few numbers: lists are faster than arrays.
        row = [each / whole for each in features]
        columns = [*row, seconds / whole]
        added = [weight * one * other for one in row for other in columns]
        sums, _ = self._strata.get(stratum, ([0.0] * len(added), 0))
        self.samples += 1
        self._fresh += 1
        keep, weight = KEEP**count, float(count)
        self._strata[stratum] = (
            [keep * old + weight * new for old, new in zip(sums, added, strict=True)],
            self.samples,
        )

    def state(self) -> list[list[float]]:
        """The sums, one flat list of numbers for each stratum, to be kept in a file and given to `restore`."""
        return [[float(stratum), *sums] for stratum, (sums, _) in self._strata.items()]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Begins with the sums of an earlier fit of the same size, which soon count less than new samples.

        Raises:
            ValueError: they aren't of such a fit.
        """
        for numbers in state:
            if len(numbers) != 1 + self._size * (self._size + 1) or not all(map(math.isfinite, numbers)):
                raise ValueError(f"state has a stratum of {len(numbers)} numbers; this fit has other ones")
            self.samples += 1
            self._strata[int(numbers[0])] = [RESTORED * each for each in numbers[1:]], self.samples
        self._fresh = len(state)

    def _solved(self) -> tuple[float, ...]:
        """Least squares without negative coefficients: those that would be negative are 0, the worst first."""
        oldest = self.samples - FORGOTTEN * ALL_SAMPLES
        for stratum in [stratum for stratum, (_, latest) in self._strata.items() if latest < oldest]:
            del self._strata[stratum]
        total = np.zeros(self._size * (self._size + 1))
        for sums, latest in self._strata.values():
            total += math.exp((latest - self.samples) / ALL_SAMPLES) * np.asarray(sums)
        square = total.reshape(self._size, self._size + 1)
        gram, target = square[:, :-1], square[:, -1]
        # Columns of equal length, so that the ridge means the same for each.
        scale = np.sqrt(np.diag(gram))
        used = [each for each in range(max(2, len(self._strata) - 1)) if each < self._size and scale[each] > 0.0]
        found = np.zeros(self._size)
        while used:
            lengths = scale[used]
            normed = gram[np.ix_(used, used)] / np.outer(lengths, lengths) + RIDGE * np.eye(len(used))
            part = np.linalg.solve(normed, target[used] / lengths)
            if (part >= 0.0).all():
                found[used] = part / lengths
                break
            used.pop(int(part.argmin()))
        return tuple(found.tolist())
