"""Guesses by an EAGLE-3 checkpoint: one layer that continues the model's hidden states (`eagle_model.py`).

Its KV is its own, in a pool with as many blocks as the model's. The hidden states of tokens that a step computed wait
until the next guess, or until there are many. One pass then computes all of them and yields the first guess, and a pass
of one token yields each further one:

    position     | KV here           | waiting states | guesses, overwritten later
                 first               done             end

The last position that a pass computed waits again, so that there is one whenever guesses are asked for.

A sequence whose KV came from another worker, or from the prefix cache, begins here with the first token that this
worker computes; the layer sees none of the tokens before. The states of a prompt are not handed over: those of three
layers are a fifth as long as the KV of an 8B model, and every request would wait for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs
from kvrelay.engine.kv.blocks import BlockPool, Hold
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.models.parts import Parts
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampling.sampler import Draw
from kvrelay.engine.speculate.base import WARM_UP, Computed, Guess, Want
from kvrelay.engine.speculate.draft import Part, plan_of, undisturbed
from kvrelay.engine.speculate.eagle_model import STATES, EagleModel

MOST_WAITING = 64
"""Tokens of a sequence whose states wait for a guess, at most."""
NO_SAMPLING = SamplingParams()


@dataclass(slots=True, eq=False)
class Context:
    """What the layer has of one sequence."""

    hold: Hold
    first: int
    """Position of the first token here."""
    done: int
    """The KV of positions before it is in the blocks of `hold`."""
    waiting: list[Tensor] = field(default_factory=list)
    """[n, STATES, hidden] each, of the positions from `done` on."""

    @property
    def end(self) -> int:
        """The first position whose states aren't known."""
        return self.done + sum(map(len, self.waiting))


class EagleProposer:
    """Implements `Proposer`."""

    passes = True
    kinds = 1

    def __init__(self, model: EagleModel, pool: KVPool, parts: Parts) -> None:
        """
        Args:
            pool: of one layer; nobody else uses it.
        """
        self.layers = model.config.layers
        self._model = model
        self._layout = pool.layout
        self._pool = BlockPool(pool.num_blocks)
        self._attention = parts.attention(pool, model.config.heads)
        self._sample = parts.sample
        self._contexts: dict[int, Context] = {}

    def warm_up(self) -> None:
        states = torch.zeros(1, STATES, self._model.states_width)
        self.observe([Computed(WARM_UP.handle, WARM_UP.tokens, 0, states)])
        self.propose([WARM_UP])

    def observe(self, computed: Sequence[Computed]) -> None:
        full: dict[int, tuple[Context, Sequence[int]]] = {}
        for handle, tokens, start, states in computed:
            context = self._contexts.get(handle)
            if context is None or not context.first <= start <= context.end:
                self.forget(handle)
                hold = self._pool.share((), f"context of sequence {handle}")
                context = self._contexts[handle] = Context(hold, start, start)
            # A preempted sequence computes what is known here once more.
            if len(fresh := states[context.end - start :]):
                context.waiting.append(fresh.clone())
            if context.end - context.done > MOST_WAITING:
                full[handle] = context, tokens
        ready = []
        for handle, (context, tokens) in full.items():
            if self._extend(context, 0):
                ready.append((context, tokens))
            else:
                # It begins anew with the tokens that come.
                self.forget(handle)
        if ready:
            with torch.inference_mode():
                self._catch_up(ready)

    def propose(self, wants: Sequence[Want]) -> list[Guess]:
        """A sequence has no guess until a step has computed the token before its last one here."""
        guesses: dict[int, list[int]] = {want.handle: [] for want in wants}
        ready = []
        for want in wants:
            context = self._contexts.get(want.handle)
            if context is not None and context.end == len(want.tokens) - 1 and self._extend(context, want.most - 1):
                ready.append((context, want))
        if ready:
            with torch.inference_mode():
                self._guess(ready, guesses)
        return [Guess(guesses[want.handle]) for want in wants]

    def forget(self, handle: int) -> None:
        context = self._contexts.pop(handle, None)
        if context is not None:
            context.hold.release()

    def _extend(self, context: Context, more: int) -> bool:
        """Takes blocks for what waits and `more` tokens behind it; False if there are too few."""
        lacking = self._layout.blocks_for(context.end - context.first + more) - len(context.hold.blocks)
        return lacking <= 0 or context.hold.extend(lacking)

    def _guess(self, rows: list[tuple[Context, Want]], guesses: dict[int, list[int]]) -> None:
        """Appends to the guesses, by handle."""
        hidden = self._catch_up([(context, want.tokens) for context, want in rows])
        level = 0
        while True:
            draws = [Draw(undisturbed(want.request.sampling), len(want.tokens) + level, 0) for _, want in rows]
            tokens, nonfinite = self._sample(self._model.logits(hidden), draws)
            going = []
            for row, ((_, want), token) in enumerate(zip(rows, tokens, strict=True)):
                if row not in nonfinite:
                    guesses[want.handle].append(token)
                    if level + 1 < want.most:
                        going.append(row)
            if not going:
                return
            rows, tokens = [rows[row] for row in going], [tokens[row] for row in going]
            # The first of these tokens stands at the position behind the last one that is known.
            parts = [
                Part(context.hold.blocks, context.end - context.first + level, [token], NO_SAMPLING)
                for (context, _), token in zip(rows, tokens, strict=True)
            ]
            hidden = self._run(parts, hidden[going])
            level += 1

    def _catch_up(self, rows: Sequence[tuple[Context, Sequence[int]]]) -> Tensor:
        """Computes the positions that wait in each context, whose sequence has these tokens.

        Returns:
            [N, hidden] of the last position of each.
        """
        parts, states = [], []
        for context, tokens in rows:
            following = tokens[context.done + 1 : context.end + 1]
            parts.append(Part(context.hold.blocks, context.done - context.first, following, NO_SAMPLING))
            states += context.waiting
        hidden = self._run(parts, self._model.fuse(torch.cat(states)))
        for context, _ in rows:
            context.done, context.waiting = context.end - 1, [context.waiting[-1][-1:].clone()]
        ends = torch.tensor([len(part.tokens) for part in parts]).cumsum(0)
        return hidden[ends - 1]

    def _run(self, parts: Sequence[Part], features: Tensor) -> Tensor:
        """[T, hidden] of the parts' tokens."""
        plan = plan_of(parts, self._layout, 0)
        inputs = AttentionInputs.from_plan(plan, self._layout.block_size)
        self._attention.plan(inputs)
        return self._model.forward(features, torch.from_numpy(plan.tokens).long(), inputs.positions, self._attention)
