"""Limits of the requests that an engine accepts, and of where their sequences end. Behind the router, this is the only
such check.
"""

from dataclasses import dataclass

from kvrelay.engine.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """The sizes that bound every sequence of an engine."""

    block_size: int
    total_blocks: int
    """Blocks of the KV pool."""
    max_context: int
    """Largest number of tokens of a prompt and its completion together."""
    vocab_size: int

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    @property
    def table_width(self) -> int:
        """Blocks of the longest sequence."""
        return min(self.blocks_for(self.max_context), self.total_blocks)

    def check(self, request: Request) -> None:
        """Refuses a request that the engine could never finish, so a sequence that is alone always fits.

        Raises:
            ValueError: names field, value and limit.
        """
        prompt, length, most = request.prompt_tokens, len(request.tokens), request.most_tokens
        max_tokens, capacity = request.sampling.max_tokens, self.total_blocks * self.block_size
        if not 1 <= prompt <= length:
            raise ValueError(f"prompt_tokens is {prompt}; allowed: 1 to the tokens given ({length})")
        if length >= most:
            raise ValueError(f"max_tokens is {max_tokens}; {length - prompt} completion tokens are there already")
        if most > self.max_context:
            raise ValueError(f"prompt_tokens plus max_tokens is {most}; allowed: up to {self.max_context}")
        if most > capacity:
            raise ValueError(f"prompt_tokens plus max_tokens is {most}; the KV pool holds {capacity} tokens")
        request.sampling.check()
        if (request.sampling.constraint is None) != (request.grammar is None):
            raise ValueError("constraint and its compiled form differ; allowed: both or none")
        for token, _ in request.sampling.logit_bias:
            self.check_token("logit_bias", token)
        for word in request.sampling.bad_words:
            for token in word:
                self.check_token("bad_words", token)
        for token in (min(request.tokens), max(request.tokens)):
            self.check_token("tokens", token)

    def check_token(self, field: str, token: int) -> None:
        """Raises ValueError unless `token` is an id of the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"{field} has the id {token}; allowed: 0 to {self.vocab_size - 1}")

    @staticmethod
    def finish_reason(request: Request, length: int, token: int) -> FinishReason | None:
        """Why `token` is the last of a sequence of `length` tokens, including it; None if it isn't the last."""
        sampling = request.sampling
        if token in sampling.stop_token_ids and length - request.prompt_tokens >= sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= request.most_tokens else None
