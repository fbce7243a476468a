"""Shapings: how one sequence's logits change before its next token is chosen. No torch.

In this order, as in Hugging Face's `generate`, for each token id i of the vocabulary:

    l[i] += bias[i]
    l[i]  = l[i] / repetition if l[i] > 0 else l[i] * repetition      if the prompt or the completion has i
    l[i] -= frequency * count[i] + presence                           if the completion has i, count[i] times
    l[i]  = -inf                                                      if i would complete one of the bad words
    l[i]  = -inf                                                      unless the constraint allows i

All of this is a function of the request and of the tokens so far, so a sequence that continues on another worker, or
that was preempted, chooses the same tokens. What depends on the tokens is kept, and updated with each token.
"""

from collections.abc import Sequence
from copy import copy

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.constrain.grammar import Matcher
from kvrelay.engine.request import Request, SamplingParams

Ids = NDArray[np.int64]
Values = NDArray[np.float32]


class Shaping:
    """The changes of one sequence. Its owner pushes each token that the sequence gets."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], completion: Sequence[int], matcher: Matcher | None
    ) -> None:
        """
        Args:
            completion: the tokens behind the prompt so far.
            matcher: of the constraint; has followed `completion`.
        """
        self.params = params
        self.matcher = matcher
        self.bias_ids: Ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self.bias: Values = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._completion = list(completion)
        self._index: dict[int, int] = {}
        self._ids: Ids = np.empty(0, np.int64)
        self._counts: Values = np.empty(0, np.float32)
        if params.penalized:
            known = sorted({*completion, *(prompt if params.repetition_penalty != 1.0 else ())})
            self._index = {token: at for at, token in enumerate(known)}
            self._ids = np.array(known, np.int64)
            self._counts = np.zeros(len(known), np.float32)
            for token in completion:
                self._counts[self._index[token]] += 1

    @classmethod
    def of(cls, request: Request, tokens: Sequence[int]) -> "Shaping | None":
        """The shaping of a request that has these tokens, the prompt's included; None if nothing changes its logits."""
        if not request.sampling.shaped:
            return None
        prompt, completion = tokens[: request.prompt_tokens], tokens[request.prompt_tokens :]
        matcher = None if request.grammar is None else request.grammar.matcher(completion)
        return cls(request.sampling, prompt, completion, matcher)

    def push(self, token: int) -> None:
        """Takes the sequence's next token."""
        self._completion.append(token)
        if self.params.penalized:
            at = self._index.setdefault(token, len(self._index))
            if at == len(self._ids):
                room = np.zeros(max(64, at), np.int64)
                self._ids = np.concatenate((self._ids, room))
                self._counts = np.concatenate((self._counts, room.astype(np.float32)))
            self._ids[at] = token
            self._counts[at] += 1
        if self.matcher is not None:
            self.matcher.push(token)

    def after(self, token: int) -> "Shaping | None":
        """The shaping of the same sequence with one token more, which it may not get; None if the constraint forbids
        it.
        """
        matcher = None if self.matcher is None else self.matcher.after(token)
        if matcher is None and self.matcher is not None:
            return None
        shaping = copy(self)
        shaping.part()
        shaping.matcher = None
        shaping.push(token)
        shaping.matcher = matcher
        return shaping

    def part(self) -> None:
        """Copies what changes with each token: a shallow copy then shares nothing of it with its original."""
        self._completion, self._index = self._completion.copy(), self._index.copy()
        self._counts, self._ids = self._counts.copy(), self._ids.copy()

    def seen(self) -> tuple[Ids, Values]:
        """The token ids that have a penalty, and how often the completion has each."""
        count = len(self._index)
        return self._ids[:count], self._counts[:count]

    def banned(self) -> list[int]:
        """The tokens that would complete one of the bad words."""
        have = self._completion
        return [word[-1] for word in self.params.bad_words if have[len(have) - len(word) + 1 :] == list(word[:-1])]
