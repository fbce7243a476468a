"""Requests as the engine gets them: frozen values that no part of the system changes."""

import enum
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrelay.engine.constrain.grammar import Constraint, Grammar

MAX_LOGPROBS = 20
"""Likeliest tokens that a request may ask for beside each of its own."""
MIN_REPETITION_PENALTY = 2.0**-7
"""Smallest repetition penalty: a logit that is divided by it stays finite."""


class FinishReason(enum.IntEnum):
    """Reason why a sequence ended by itself (a cancel or a failure is not a finish).

    The numbers are those of `kvrelay.v1.FinishReason` in `proto/kvrelay/v1/inference.proto`, so that one number means
    the same from the engine to the client.
    """

    STOP = 1
    """An end-of-sequence token or a stop id."""
    LENGTH = 2
    """`max_tokens` was reached."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; `kvrelay/v1/inference.proto` has the ranges and says what each field means.

    `stop_token_ids` includes the model's end-of-sequence ids unless `ignore_eos` was asked for, so that one rule ends a
    sequence. The engine knows no stop strings: the router has the text.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each with the number that is added to its logit."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the completion never has."""
    logprobs: int | None = None
    """Number of likeliest tokens that are reported beside each token; None reports nothing."""
    prompt_logprobs: int | None = None
    """Number of likeliest tokens that are reported beside each token of the prompt; None reports nothing."""
    constraint: Constraint | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Whether the logits of tokens that were there before change."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def shaped(self) -> bool:
        """Whether logits change before the token is chosen, other than by `min_tokens`, temperature and filters."""
        return self.follows_tokens or bool(self.logit_bias)

    @property
    def follows_tokens(self) -> bool:
        """Whether the choice of a token depends on which tokens came before it, beside the model's own logits."""
        return self.penalized or bool(self.bad_words) or self.constraint is not None

    def check(self) -> None:
        """Raises ValueError, naming field, value and range, unless the sampler can draw with these values."""
        # NaN fails each comparison.
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; allowed: 0 or more, finite")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k is {self.top_k}; allowed: 0 to {2**31 - 1}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; allowed: above 0, up to 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}; allowed: 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(value := getattr(self, name)):
                raise ValueError(f"{name} is {value}; allowed: finite numbers")
        if not MIN_REPETITION_PENALTY <= self.repetition_penalty < math.inf:
            limit = f"{MIN_REPETITION_PENALTY:g} or more, finite"
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; allowed: {limit}")
        for token, bias in self.logit_bias:
            if not math.isfinite(bias):
                raise ValueError(f"logit_bias of token {token} is {bias}; allowed: finite numbers")
        if not all(self.bad_words):
            raise ValueError("bad_words has an empty sequence; allowed: at least one token each")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise ValueError(f"{name} is {count}; allowed: 0 to {MAX_LOGPROBS}")


class Urgency(NamedTuple):
    """How soon a request wants its tokens; of two, the scheduler serves the one that compares as smaller first."""

    rank: int = 0
    """Priority of its class: requests of a greater rank get what those of smaller ones leave."""
    priority: int = 0
    """Priority of this request within its class; the smallest goes first."""
    due: float = math.inf
    """Time from which on the request's first token is late, on the scheduler's clock."""
    yields: bool = False
    """Whether the class is less urgent than `interactive`."""


@dataclass(frozen=True, slots=True)
class Request:
    """One placement of a request on this engine.

    `tokens` is the prompt, followed on a later attempt by the completion tokens that the client already has;
    `prompt_tokens` says where the prompt ends. `max_tokens` and `min_tokens` count from there, and the noise of
    sampling depends on the position, so a request that is resumed elsewhere draws the same tokens and ends alike.
    """

    request_id: str
    attempt: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""
    grammar: Grammar | None = None
    """Compiled form of `sampling.constraint`, where there is one."""
    holder: int = 0
    """Holder of the request: a digest of the tenant, or of the client's address; 0 where that is unknown."""
    expected_tokens: int = 0
    """Completion tokens that the request is expected to have in the end; 0: `max_tokens`."""

    urgency: Urgency = field(default_factory=Urgency)

    @property
    def key(self) -> tuple[str, int]:
        """(request_id, attempt): every message about this placement carries it."""
        return self.request_id, self.attempt

    def __str__(self) -> str:
        # Never the tokens: this text ends up in logs.
        return f"{self.request_id}/{self.attempt}"

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of the prompt and the completion together."""
        return self.prompt_tokens + self.sampling.max_tokens
