"""What guesses may lose at most, in steps without guesses.

Every step earns SHARE, up to MOST, and one with guesses wins or loses what it took less or more than its tokens would
have taken without them. Once the account is empty there are no guesses until it has AGAIN, enough for several steps:
the first guesses after a pause say too little, since caches are cold and shares are old. So n steps lose
SHARE * n + FIRST at most, one step more, and what LEAST cuts off, whatever the guesses are worth and whatever was
expected of them.

What is spent to be able to guess at all, such as a draft model's reading of a prompt, is paid in parts: it should pay
off over the tokens that follow.
"""

SHARE = 0.01
FIRST = 4.0
"""The account at the start."""
AGAIN = 2.0
MOST = 8.0
"""What was won with some texts may be lost with others."""
LEAST = -6.0
"""One very slow step, which says more about the machine, shouldn't end guesses for long."""
PARTS = 64


class Allowance:
    """The account of one engine's steps of one kind."""

    def __init__(self) -> None:
        self.steps = FIRST
        """What may be lost, in steps."""
        self.open = True
        """Whether there may be guesses."""
        self._unpaid = 0.0

    def invest(self, steps: float) -> None:
        """So much was spent for guesses to come."""
        self._unpaid += steps

    def settle(self, gain: float) -> None:
        """A step has ended.

        Args:
            gain: what it won by guesses, in steps; negative if it lost.
        """
        part = self._unpaid / PARTS
        self._unpaid -= part
        self.steps = min(MOST, max(LEAST, self.steps + SHARE + gain - part))
        self.open = self.steps >= AGAIN or (self.open and self.steps > 0)
