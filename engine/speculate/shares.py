"""How many guesses come true, of each kind and of each sequence.

While a sequence gets no guesses, its share returns slowly to that of all sequences here, and that one to FRESH. So
what changes is noticed, for a few steps in a hundred.
"""

FRESH = 0.8
"""Share of guesses that is expected of the first sequence: so much that it is tried."""
FOLLOW = 0.1
"""Weight of one guess in its sequence's share."""
FOLLOW_ALL = 0.02
"""Weight of one guess in the engine's share."""
RETURN = 0.002
"""How far a sequence's share returns in a step without guesses."""
RETURN_ALL = 0.001
"""The same of the engine's share."""


class Shares:
    """Those of one engine."""

    def __init__(self, kinds: int) -> None:
        """
        Args:
            kinds: of guesses (`Guess.kind`), which are followed apart.
        """
        self._all = [FRESH] * kinds
        self._own: dict[int, list[float]] = {}

    def expected(self, handle: int, kind: int) -> float:
        """The probability that a guess comes true, if those before it in its chain do."""
        own = self._own.get(handle)
        return self._all[kind] if own is None else own[kind]

    def learn(self, handle: int, kind: int, right: bool) -> None:
        """A guess was checked, and those before it in its chain had come true."""
        own = self._own.setdefault(handle, self._all.copy())
        own[kind] += FOLLOW * (right - own[kind])
        self._all[kind] += FOLLOW_ALL * (right - self._all[kind])

    def rest(self, handles: list[int], steps: int) -> None:
        """These sequences get no guesses for so many steps."""
        back = RETURN * steps
        self._all = [share + RETURN_ALL * steps * (FRESH - share) for share in self._all]
        for own in [self._own[handle] for handle in handles if handle in self._own]:
            own[:] = [share + back * (common - share) for share, common in zip(own, self._all, strict=True)]

    def forget(self, handle: int) -> None:
        """The sequence has ended."""
        self._own.pop(handle, None)
