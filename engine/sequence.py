"""One request's life on one engine."""

import enum
from dataclasses import dataclass, field

from kvrelay.engine.kv.blocks import Hold
from kvrelay.engine.lifetime import Lifetime
from kvrelay.engine.request import Request


class Status(enum.IntEnum):
    """Where a sequence is. The order is a rule: everything past PREEMPTED has ended, and left the scheduler."""

    WAITING = 0
    """For a row, and for blocks unless its KV came from elsewhere."""
    RUNNING = 1
    PREEMPTED = 2
    """Waiting again: its blocks were taken away, all its tokens are to be computed anew."""
    FINISHED = 3
    HANDED_OFF = 4
    """Its blocks left with its first token."""
    CANCELLED = 5
    FAILED = 6


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of a request and how far their KV has come. Changed by the scheduler only.

        tokens      | prompt                                        | completion      |
                    0                                               prompt_tokens     num_tokens
        KV          | cached        | computed           | to compute                 |
                    0               cached_tokens        num_computed                 num_tokens
        hold.blocks |       |       |       |       |       |

    Each step computes some of the tokens from num_computed on. A step that computes the last one yields the next
    token, and so "to compute" is at least one token for as long as the sequence lives. The three intervals of the
    second line may end anywhere: within the prompt while it is chunked, past it in decode, and, for a sequence whose
    KV came from another worker, at the prompt's end from the start (with nothing cached, and one completion token).
    """

    request: Request
    handle: int
    """The scheduler's number for it, in order of arrival."""
    hold: Hold
    """Its blocks: at least those of the first num_computed tokens. Without blocks unless RUNNING, or KV came along."""
    handoff: bool = False
    """Whether it leaves with its first token."""
    status: Status = Status.WAITING
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose KV is in the pool."""
    furthest: int = 0
    """The most that num_computed ever was: what is computed below it is computed a second time."""
    cached_tokens: int = 0
    """Tokens that the prefix cache spared when it was first scheduled."""
    recomputed_tokens: int = 0
    """Tokens computed a second time, here or after another worker had; 0 unless it was preempted."""
    scheduled: int = 0
    """Tokens of it in the plans in flight."""
    yields: int = 0
    """Tokens that the plans in flight will sample for it: what comes after `tokens`, and isn't known yet."""
    row: int = -1
    """Its row in the newest plan that it is in."""
    slot: int = -1
    """Its row in the block tables while RUNNING."""
    chain: list[bytes] = field(default_factory=list)
    """Prefix digests of its tokens' leading blocks, as far as they were needed."""
    lifetime: Lifetime = field(default_factory=Lifetime)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def reach(self) -> int:
        """Tokens whose KV is in the pool once the plans in flight are done."""
        return self.num_computed + self.scheduled

    @property
    def left(self) -> int:
        """Tokens to compute beyond the plans in flight, with those that they yield."""
        return len(self.tokens) + self.yields - self.num_computed - self.scheduled

    @property
    def generated(self) -> int:
        """Completion tokens so far, over all attempts."""
        return len(self.tokens) - self.request.prompt_tokens

    @property
    def ended(self) -> bool:
        return self.status > Status.PREEMPTED

    def __repr__(self) -> str:
        # Never the tokens: a representation ends up in logs.
        name = f"{self.request.request_id}/{self.request.attempt}"
        return f"Sequence({name}, {self.status.name}, {self.num_computed} of {self.num_tokens} tokens computed)"
