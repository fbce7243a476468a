"""Reports of a scheduler to the rest of its worker."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvrelay.engine.kv.blocks import Hold
from kvrelay.engine.kv.writes import KVWrites
from kvrelay.engine.plan import TokenLogprobs
from kvrelay.engine.request import FinishReason
from kvrelay.engine.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor

OnStart = Callable[[Sequence], None]
"""Called with each sequence that starts to run, or starts again, before the step that computes it; or that stops, since
others take its blocks."""
OnLaunch = Callable[[list[Sequence], KVWrites], None]
"""Called with each step that runs by itself once it is launched: the sequence of each row, and the step's KV writes,
which go up to `reach` of the sequences."""


class Progress(NamedTuple):
    """Effect of one step on one sequence."""

    sequence: Sequence
    computed: int
    """Tokens whose KV is in the pool now. Fewer than in an earlier report if the sequence was preempted since."""
    token: int | None = None
    """The sampled token; None for a failure, and for a chunk that isn't the last."""
    token_index: int = 0
    """Index of the token in the completion. A step that keeps drafts reports several tokens of a sequence, in order."""
    finish: FinishReason | None = None
    """Reason why the token is the last; None if it isn't."""
    hold: Hold | None = None
    """The blocks of a handed-off sequence, with its first token. The receiver of this report must release it."""
    error: str | None = None
    """Reason why the sequence failed; None if it didn't."""
    refused: bool = False
    """Whether the sequence failed because of what its request asks for."""
    again: bool = False
    """Whether the sequence failed for no reason of its own: its request may be computed again at once."""
    logprobs: TokenLogprobs | None = None
    """Log-probabilities of the token, if they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens from `prompt_first` on."""
    prompt_first: int = 0
    states: "Tensor | None" = None
    """[n, layers, hidden] hidden states of the last n tokens before `computed`, some of which leave with their KV, as
    the sequence's `states` asks for them: the step's own memory on the model's device, all layers that it has kept
    (`Runner.fetch`). None if it asks for none."""
    state_places: tuple[int, ...] = ()
    """Places in `states` of the layers that leave with the KV."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks for the KV of a request's tokens, which comes from another worker, and for one more token.

    Either `hold` goes back to `Scheduler.resume`, or the reservation must be released.
    """

    hold: Hold
    have: tuple[int, ...]
    """The token of each layer group before which no KV has to come, a multiple of the block size: it is in the blocks
    already, which are read-only, or outside of the window."""

    def comes_from(self, first: abc.Sequence[int]) -> None:
        """Notes the first token of each layer group whose KV is transferred, or is here. A block that begins before it
        is of no use to other sequences."""
        for side, token in zip(self.hold.sides, first[1:], strict=True):
            side.complete = -(-token // side.side.block_size)

    def release(self) -> None:
        self.hold.release()
