"""What was asked: frozen values that no part of the system changes."""

import enum
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    """Why a sequence ended by itself (cancels and failures are not finishes)."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Validated by the router; see `kvrelay/v1/inference.proto` for the limits.

    `stop_token_ids` already holds the model's end-of-sequence ids unless `ignore_eos` was asked for, so that a
    sequence stops by one rule. Stop strings never get here: they are the router's, which has the text.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One placement of a request on this engine.

    `tokens` is the prompt followed, on a later attempt, by the completion tokens that the client already has;
    `prompt_tokens` says where the prompt ends. Sampling counts completion tokens from there, so that a request
    resumed elsewhere ends where, and draws what, it would have.
    """

    request_id: str
    attempt: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """(request_id, attempt): what every message about this placement carries."""
        return self.request_id, self.attempt
