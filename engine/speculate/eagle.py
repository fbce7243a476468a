"""Guesses by an EAGLE-3 checkpoint: one layer that continues the model's hidden states (`eagle_model.py`).

Its KV is its own, in a pool with as many blocks as the model's. The hidden states of tokens that a step computed wait
until the next guess, or until there are many; those of a prompt are read behind the steps, so many tokens each. One
pass then computes all that wait and yields the first guess, and a pass of one token yields each further one:

    position     | KV here           | waiting states | guesses, overwritten later
                 first               done             end

The last position that a pass computed waits again, so that there is one whenever guesses are asked for.

A sequence begins here with the first token whose states are known: not with those whose KV came from a prefix cache,
here or on the worker that computed the prompt. The layer sees none of the tokens before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvrelay.engine.attention.base import AttentionInputs, to_device
from kvrelay.engine.kv.blocks import BlockPool, Hold
from kvrelay.engine.kv.pool import KVPool
from kvrelay.engine.models.fast.parts import Parts
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.speculate.base import WARM_UP, Computed, Want
from kvrelay.engine.speculate.chains import draws_at, read_chains, wanting
from kvrelay.engine.speculate.draft import Part, plan_of
from kvrelay.engine.speculate.eagle_model import EagleModel

MOST_WAITING = 64
"""Limit of one sequence's tokens whose states wait for a guess; more are read behind a step."""
NO_SAMPLING = SamplingParams()
UNKNOWN = (0,)
"""Token list of a row whose token only the device has."""


@dataclass(slots=True, eq=False)
class Context:
    """State of one sequence in the layer."""

    hold: Hold
    first: int
    """Position of the first token here."""
    done: int
    """Position up to which the KV is in the blocks of `hold`."""
    prompt: int
    """The first position behind those whose states came first: of a prompt, or of its first chunk."""
    waiting: list[Tensor] = field(default_factory=list)
    """Hidden states of the positions from `done` on, [n, layers, hidden] each."""

    @property
    def end(self) -> int:
        """First position whose states aren't known."""
        return self.done + sum(map(len, self.waiting))

    def take(self, count: int) -> list[Tensor]:
        """The states of the first `count` positions that wait; they are `done`, but the last of all waits again."""
        taken: list[Tensor] = []
        self.done += count
        while count:
            states = self.waiting[0]
            taken.append(states[:count])
            self.waiting[:1] = [states[count:]] if len(states) > count else []
            count -= len(taken[-1])
        if not self.waiting:
            last = taken[-1]
            self.done, self.waiting = self.done - 1, [last if len(last) == 1 else last[-1:].clone()]
        return taken


class EagleProposer:
    """Implements `Proposer`."""

    last_state = False

    def __init__(self, model: EagleModel, pool: KVPool, parts: Parts, step_tokens: int, most: int) -> None:
        """
        Args:
            pool: of one layer; nobody else uses it.
            step_tokens: that are read behind a step at most.
            most: tokens of a guess at most.
        """
        self.layers = model.layers
        self._model = model
        self._layout = pool.layout
        self._pool = BlockPool(pool.num_blocks)
        # The host doesn't wait for the device before it has planned a pass for each guess.
        self._attention = parts.attention(pool, model.heads, max(most, WARM_UP.most))
        self._parts = parts
        self._step_tokens = step_tokens
        self._contexts: dict[int, Context] = {}
        self._behind: dict[int, Sequence[int]] = {}
        """Tokens, by handle, of sequences whose states are to be read behind a step."""

    def warm_up(self) -> None:
        states = torch.zeros(1, len(self.layers), self._model.states_width)
        self.observe([Computed(WARM_UP.handle, WARM_UP.tokens, 0, states)])
        self.propose([WARM_UP])

    def observe(self, computed: Sequence[Computed]) -> bool:
        places: list[tuple[list[Tensor], int]] = []
        for handle, tokens, start, states in computed:
            context = self._contexts.get(handle)
            if context is None or not context.first <= start <= context.end:
                self.forget(handle)
                hold = self._pool.share((), f"context of sequence {handle}")
                context = self._contexts[handle] = Context(hold, start, start, start + len(states))
            # A preempted sequence computes tokens again that are known here.
            if len(fresh := states[context.end - start :]):
                context.waiting.append(fresh)
                places.append((context.waiting, len(context.waiting) - 1))
            if context.end - context.done > MOST_WAITING:
                self._behind[handle] = tokens
        self._own(places)
        return bool(self._behind) and self._read()

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        """Guesses. A sequence has no guess until a step has computed the token before its last one here."""
        ready = []
        for want in wants:
            context = self._contexts.get(want.handle)
            known = context is not None and context.end == len(want.tokens) - 1 and want.handle not in self._behind
            if context is not None and known and self._extend(context, want.most - 1):
                ready.append((context, want))
        if not ready:
            return [[] for _ in wants]
        ready.sort(key=lambda pair: -pair[1].most)
        found = self._guess(ready)
        guesses = {want.handle: tokens for (_, want), tokens in zip(ready, found, strict=True)}
        return [guesses.get(want.handle, []) for want in wants]

    def forget(self, handle: int) -> None:
        context = self._contexts.pop(handle, None)
        self._behind.pop(handle, None)
        if context is not None:
            context.hold.release()

    def _own(self, places: Sequence[tuple[list[Tensor], int]]) -> None:
        """Copies states that wait in these places, because what their step has kept is large; single tokens in one go.
        Those in host memory stay there until they are read: the device may not have room for long prompts.
        """
        device = self._parts.device
        here = [(waiting, place) for waiting, place in places if waiting[place].device == device]
        single = [(waiting, place) for waiting, place in here if len(waiting[place]) == 1]
        with self._parts.running():
            for waiting, place in here:
                if len(waiting[place]) > 1:
                    waiting[place] = waiting[place].clone()
            if single:
                copied = torch.cat([waiting[place] for waiting, place in single]).unbind()
                for (waiting, place), states in zip(single, copied, strict=True):
                    waiting[place] = states[None]

    def _read(self) -> bool:
        """Computes the waiting states of the sequences that are behind, in the order in which they came.

        Returns:
            Whether there were prompts among it.
        """
        left, rows, prompts = self._step_tokens, [], False
        for handle, tokens in list(self._behind.items()):
            context = self._contexts[handle]
            if not self._extend(context, 0):
                # It begins anew with the tokens that come.
                self.forget(handle)
                continue
            waiting = context.end - context.done
            count = min(left, waiting)
            rows.append((context, tokens, count))
            prompts |= context.done + 1 < context.prompt
            left -= count
            if waiting - count <= MOST_WAITING:
                del self._behind[handle]
            if not left:
                break
        if rows:
            with self._parts.running():
                self._catch_up(rows)
        return prompts

    def _extend(self, context: Context, more: int) -> bool:
        """Takes blocks for what waits and `more` tokens behind it; False if there are too few."""
        lacking = self._layout.blocks_for(context.end - context.first + more) - len(context.hold.blocks)
        return lacking <= 0 or context.hold.extend(lacking)

    def _guess(self, rows: list[tuple[Context, Want]]) -> list[list[int]]:
        """Guesses for rows in descending order of their length; those that wait are computed first."""
        wants = [want for _, want in rows]
        levels: list[Tensor] = []
        with self._parts.running():
            hidden = self._catch_up([(context, want.tokens, context.end - context.done) for context, want in rows])
            for level in range(wants[0].most):
                count = wanting(wants, level)
                if level:
                    # The token before stands at the position behind the last one that is known.
                    places = [context.end - context.first + level - 1 for context, _ in rows[:count]]
                    parts = [
                        Part(context.hold.blocks, place, UNKNOWN, NO_SAMPLING)
                        for (context, _), place in zip(rows, places, strict=False)
                    ]
                    hidden = self._run(parts, hidden[:count], levels[-1][:count].clamp(min=0))
                levels.append(self._parts.guess(self._model.logits(hidden), draws_at(wants[:count], level)))
            return read_chains(levels)

    def _catch_up(self, rows: Sequence[tuple[Context, Sequence[int], int]]) -> Tensor:
        """Computes the first positions that wait in each context: so many, of a sequence with these tokens.

        Returns:
            [N, hidden] of the last position of each.
        """
        device = self._parts.device
        parts, states = [], []
        for context, tokens, count in rows:
            following = tokens[context.done + 1 : context.done + 1 + count]
            parts.append(Part(context.hold.blocks, context.done - context.first, following, NO_SAMPLING))
            states += context.take(count)
        # Those that came from another worker are in host memory.
        known = torch.cat([part.to(device, non_blocking=True) for part in states])
        hidden = self._run(parts, self._model.fuse(known))
        ends = np.cumsum([len(part.tokens) for part in parts])
        return hidden[to_device(ends - 1, device)]

    def _run(self, parts: Sequence[Part], features: Tensor, tokens: Tensor | None = None) -> Tensor:
        """[T, hidden] of the parts' tokens; `tokens`, int64 [T] on the device, if the parts don't have them."""
        device = self._parts.device
        plan = plan_of(parts, self._layout, 0)
        inputs = AttentionInputs.from_plan(plan, self._layout.block_size, device)
        self._attention.plan(inputs)
        if tokens is None:
            tokens = to_device(plan.tokens.astype(np.int64), device)
        return self._model.forward(features, tokens, inputs.positions, self._attention)
