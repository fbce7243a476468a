"""What a scheduler tells the rest of its worker."""

from dataclasses import dataclass
from typing import NamedTuple

from kvrelay.engine.kv.blocks import Hold
from kvrelay.engine.request import FinishReason
from kvrelay.engine.sequence import Sequence


class Progress(NamedTuple):
    """What one step did for one sequence."""

    sequence: Sequence
    computed: int
    """Tokens whose KV is in the pool now. Smaller than in an earlier report if the sequence was preempted since."""
    token: int | None = None
    """The token that was sampled; None for a chunk that isn't the last, and for a failure."""
    finish: FinishReason | None = None
    """Why the token is the last; None if it isn't."""
    hold: Hold | None = None
    """The blocks of a handed-off sequence, with its first token: the taker must release it."""
    error: str | None = None
    """Why the sequence failed; None if it didn't."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How much an engine has to do. Blocks: free + cached + held == total."""

    total: int
    free: int
    cached: int
    held: int
    waiting: int
    running: int
    pending_tokens: int
    """Tokens that the waiting and running sequences have yet to compute."""
    free_slots: int = 0
    """How many more reservations would be given, for as long as there are blocks."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks for KV that comes from elsewhere: room for the request's tokens and one more.

    Either `hold` goes back to `Scheduler.resume`, or this is released.
    """

    hold: Hold
    have_tokens: int
    """Leading tokens whose KV is in the blocks already (a multiple of the block size): not to be written."""

    def release(self) -> None:
        self.hold.release()
