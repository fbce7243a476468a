"""What a sequence may become on an engine, and where it ends."""

from dataclasses import dataclass

from kvrelay.engine.request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that bound every sequence of an engine."""

    block_size: int
    total_blocks: int
    """Blocks of the KV pool."""
    max_context: int
    """Prompt plus completion, in tokens, at most."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    @property
    def widest(self) -> int:
        """Blocks of the longest sequence."""
        return min(self.blocks_for(self.max_context), self.total_blocks)

    def longest(self, request: Request) -> int:
        """Tokens that a sequence ends with at most, whatever they are."""
        return min(request.prompt_tokens + request.sampling.max_tokens, self.max_context)

    def check(self, request: Request) -> None:
        """Refuses a request that no step could ever finish.

        So a sequence that is alone always fits.

        Raises:
            ValueError: names field, value and limit.
        """
        length = len(request.tokens)
        generated = length - request.prompt_tokens
        max_tokens = request.sampling.max_tokens
        if not 1 <= request.prompt_tokens <= length:
            raise ValueError(f"prompt_tokens is {request.prompt_tokens}; allowed: 1 to the tokens given ({length})")
        if generated >= max_tokens:
            raise ValueError(f"max_tokens is {max_tokens}; {generated} completion tokens are there already")
        if length >= self.max_context:
            raise ValueError(f"tokens has {length} ids; max_context leaves room for {self.max_context - 1}")
        most = self.longest(request)
        if self.blocks_for(most) > self.total_blocks:
            capacity = self.total_blocks * self.block_size
            raise ValueError(f"prompt plus max_tokens come to {most} tokens; the KV pool holds {capacity}")

    def finish_reason(self, request: Request, length: int, token: int) -> FinishReason | None:
        """Why `token` is the last of a sequence of `length` tokens (with it); None if it isn't."""
        sampling = request.sampling
        if token in sampling.stop_token_ids and length - request.prompt_tokens >= sampling.min_tokens:
            return FinishReason.STOP
        if length >= self.longest(request):
            return FinishReason.LENGTH
        return None
