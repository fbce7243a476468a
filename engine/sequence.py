"""The life of one request on one engine."""

import enum
from dataclasses import dataclass, field

from kvrelay.engine.kv.blocks import Hold
from kvrelay.engine.lifetime import Lifetime
from kvrelay.engine.request import Request
from kvrelay.engine.shaping import Shaping
from kvrelay.engine.states import StatesLayout


class Status(enum.IntEnum):
    """Status of a sequence. The order matters: every status after PREEMPTED means that it has left the scheduler."""

    WAITING = 0
    """Waiting for a row, and for blocks unless its KV came from another worker."""
    RUNNING = 1
    PREEMPTED = 2
    """Waiting again. Its blocks were taken away, so all its tokens must be computed anew."""
    FINISHED = 3
    HANDED_OFF = 4
    """Gone with its blocks, after its first token."""
    CANCELLED = 5
    FAILED = 6


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of a request and how far their KV is computed. Only the scheduler changes it.

        tokens      | prompt                                        | completion      |
                    0                                               prompt_tokens     num_tokens
        KV          | cached        | computed           | to compute                 |
                    0               cached_tokens        num_computed                 num_tokens
        hold.blocks |       |       |       |       |       |

    Each step computes some tokens from num_computed on. The step that computes the last one yields the next token, so
    "to compute" is at least one token as long as the sequence lives. The three intervals of the second line may end
    anywhere: within the prompt while it is computed in chunks, after it in decode. If the KV came from another worker,
    they end at the prompt's end from the start, with nothing cached and one completion token.

    A step may also compute drafts, guesses of the tokens behind the last one. Their KV goes behind num_computed, which
    passes those that are kept when the step is committed; the next step overwrites the rest.
    """

    request: Request
    handle: int
    """Number that the scheduler gave the sequence, in order of arrival."""
    order: tuple[int, int, float, int]
    """Place of the sequence among all: (rank, priority, time at which its first token is late, handle). The scheduler
    serves the smallest first."""
    hold: Hold
    """Blocks of the sequence, at least those of the first num_computed tokens. Empty unless it runs or its KV came with
    it."""
    handoff: bool = False
    """Whether it leaves with its first token."""
    states: StatesLayout | None = None
    """Hidden states that leave with it; None if none do."""
    status: Status = Status.WAITING
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose KV is in the pool."""
    furthest: int = 0
    """The largest value that num_computed has had: tokens below it are computed a second time."""
    cached_tokens: int = 0
    """Tokens that the prefix cache had when it was first scheduled."""
    recomputed_tokens: int = 0
    """Tokens computed a second time, here or after another worker had computed them; 0 unless it was preempted."""
    scheduled: int = 0
    """Number of the sequence's tokens in the plans in flight."""
    yields: int = 0
    """Tokens that the plans in flight will sample for it: they come after `tokens` and aren't known yet."""
    row: int = -1
    """Row of the sequence in the newest plan that it is in."""
    turn: int = -1
    """Number of that plan; before the first one, the number of the plan that was next when the sequence started to
    run."""
    slot: int = -1
    """Row of the sequence in the block tables while RUNNING."""
    chain: list[bytes] = field(default_factory=list)
    """Prefix digests of its tokens' leading blocks, as far as they were needed."""
    shaping: Shaping | None = None
    """Changes of the sequence's logits before its next token is chosen."""
    unscored: int = 0
    """The first token of the prompt whose log-probabilities are asked for and in no plan yet; 0 if none is left."""
    proposed: int = 0
    """Drafts of its tokens that were checked."""
    accepted: int = 0
    """Drafts of its tokens that were kept."""
    lifetime: Lifetime = field(default_factory=Lifetime)

    @classmethod
    def of(
        cls, request: Request, handle: int, hold: Hold, handoff: bool, tokens: list[int], submitted: float
    ) -> "Sequence":
        """A sequence that has these tokens, and the KV of none of them, since the time `submitted`."""
        unscored = int(request.sampling.prompt_logprobs is not None and request.prompt_tokens > 1)
        shaping, urgency = Shaping.of(request, tokens), request.urgency
        return cls(
            request,
            handle,
            (urgency.rank, urgency.priority, urgency.due, handle),
            hold,
            handoff,
            tokens=tokens,
            shaping=shaping,
            unscored=unscored,
            lifetime=Lifetime(submitted),
        )

    def take_kv(self, length: int, moment: float) -> None:
        """Notes that the KV of the first `length` tokens, which is in the blocks, came from another worker now, at
        `moment`."""
        self.unscored = 0
        self.chain = self.hold.chain
        self.num_computed = self.furthest = length
        self.lifetime.committed = moment

    @property
    def holder(self) -> int:
        """Holder of the request, as `Request.holder`."""
        return self.request.holder

    @property
    def rank(self) -> int:
        """Rank of the request's class, as `Urgency.rank`."""
        return self.order[0]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def reach(self) -> int:
        """Tokens whose KV is in the pool once the plans in flight are committed."""
        return self.num_computed + self.scheduled

    @property
    def expected(self) -> int:
        """Tokens of the sequence once the plans in flight are committed."""
        return len(self.tokens) + self.yields

    @property
    def generated(self) -> int:
        """Completion tokens so far, over all attempts."""
        return len(self.tokens) - self.request.prompt_tokens

    @property
    def ended(self) -> bool:
        return self.status > Status.PREEMPTED

    def continues_unseen(self, length: int) -> bool:
        """Whether the token that makes it `length` tokens long can be computed while that one isn't known yet."""
        last = self.handoff or length >= self.request.most_tokens
        return not last and not self.request.sampling.follows_tokens

    def advance(self, end: int) -> None:
        """Notes that the KV of the first `end` tokens is in the pool now."""
        if self.num_computed < self.furthest:
            self.recomputed_tokens += min(end, self.furthest) - self.num_computed
        self.num_computed = end
        self.furthest = max(end, self.furthest)

    def __repr__(self) -> str:
        return f"Sequence({self.request}, {self.status.name}, {self.num_computed} of {self.num_tokens} tokens computed)"
