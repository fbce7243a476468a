"""Guesses for the hash model, right ones and wrong ones, in an order that never changes; and a record of guesses."""

from collections.abc import Sequence

import torch
import xxhash

from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.sampling.sampler import Draw
from kvrelay.engine.speculate.base import Computed, Want
from support.hash_runner import LAYOUT, VOCAB_SIZE, choose_tokens, hash_states, kv_bytes


class HashGuesses:
    """A `Proposer` that knows the model. One guess in `wrong_every` is wrong, and so are those behind it."""

    layers: tuple[int, ...] = ()
    last_state = False

    def __init__(self, layout: KVLayout = LAYOUT, vocab_size: int = VOCAB_SIZE, wrong_every: int = 3) -> None:
        self._layout = layout
        self._vocab_size = vocab_size
        self.wrong_every = wrong_every
        self._states: dict[int, tuple[xxhash.xxh3_64, int]] = {}

    def warm_up(self) -> None:
        pass

    def observe(self, computed: Sequence[Computed]) -> bool:
        return False

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        return [self._propose(want) for want in wants]

    def forget(self, handle: int) -> None:
        self._states.pop(handle, None)

    def _propose(self, want: Want) -> list[int]:
        state, known = self._states.get(want.handle) or (xxhash.xxh3_64(), 0)
        state.update(kv_bytes(want.tokens[known:], known, self._layout).tobytes())
        length, prompt = len(want.tokens), want.request.prompt_tokens
        self._states[want.handle] = state, length
        guesses: list[int] = []
        state = state.copy()
        for position in range(length, length + want.most):
            if (position * 7 + prompt) % self.wrong_every == 0:
                return guesses + [(position + guess) % self._vocab_size for guess in range(want.most - len(guesses))]
            draw = Draw(want.request.sampling, position, position - prompt)
            guesses += choose_tokens([state.digest()], [draw], self._vocab_size).tokens
            state.update(kv_bytes(guesses[-1:], position, self._layout).tobytes())
        return guesses


class HashHeads(HashGuesses):
    """Guesses as `HashGuesses`, but only for sequences of whose prompt it has hidden states, without a gap.

    A wrong state is an AssertionError, which ends the engine.
    """

    layers = (0, 2)

    def __init__(self, layout: KVLayout = LAYOUT) -> None:
        super().__init__(layout)
        self.known: dict[int, tuple[int, int]] = {}
        """Tokens whose states came, by handle: the first one and the end."""

    def observe(self, computed: Sequence[Computed]) -> bool:
        for handle, tokens, start, states in computed:
            expected = hash_states(tokens[start : start + len(states)], start, self.layers)
            assert torch.equal(states, expected), f"hidden states of tokens from {start} on are others"
            first, end = self.known.get(handle, (start, start))
            self.known[handle] = (first if first <= start <= end else start, start + len(states))
        return False

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        return [self._propose(want) if self._has(want) else [] for want in wants]

    def forget(self, handle: int) -> None:
        super().forget(handle)
        self.known.pop(handle, None)

    def _has(self, want: Want) -> bool:
        first, end = self.known.get(want.handle, (0, 0))
        return first < len(want.request.tokens) and end == len(want.tokens) - 1


class Recorded:
    """A proposer's guesses, by request and by the number of tokens before the guess."""

    def __init__(self, engine: Engine) -> None:
        assert engine.scheduler.speculation is not None
        self.guesses: dict[tuple[str, int], list[int]] = {}
        self._proposer = engine.scheduler.speculation.proposer
        self._propose = self._proposer.propose
        self._proposer.propose = self.propose  # type: ignore[method-assign]  # watched

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        found = self._propose(wants)
        for want, guess in zip(wants, found, strict=True):
            self.guesses[want.request.request_id, len(want.tokens)] = guess
        return found
