"""Guesses by a draft model: a small model with the same tokens, which computes a few of them for one step of the large.

Its KV is its own, in a pool with as many blocks as the target's, and is computed on the worker that decodes: a prompt
whose KV came from elsewhere is read here once more, which takes a small model little time. Each pass catches up with
what the target has kept, so a draft that wasn't kept is overwritten by the next pass:

    target      | known tokens                                  | drafts ...
    KV here     | agrees with the target    | to compute        |
                0                           len(common prefix)

The draft model samples with the target's parameters, and so with its noise, which depends on (seed, position) alone.
Both then tend to choose the same token, also where each spreads its probability over many.

The probability that a draft is kept is that of two coupled draws being equal: at most sum over v of min(p[v], q[v]) for
any coupling, which the rejection rule min(1, p/q) reaches (Leviathan, Kalman, Matias 2023, theorem 3.5), and at least
sum min(p, q) / (2 - sum min(p, q)) for draws that share exponential noise (Daliri, Musco, Suresh 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvrelay.engine.kv.blocks import BlockPool, Hold
from kvrelay.engine.kv.layout import KVLayout
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.runner.base import ChainRunner
from kvrelay.engine.speculate.base import Computed, Want


class Part(NamedTuple):
    """Tokens of one sequence that a guessing model computes."""

    blocks: Sequence[int]
    """Blocks of the sequence in the guessing model's own KV pool."""
    start: int
    """Number of tokens before these."""
    tokens: Sequence[int]
    sampling: SamplingParams


def plan_of(parts: Sequence[Part], layout: KVLayout, more: int) -> StepPlan:
    """The step that computes each part as a row, whose block tables have room for `more` tokens behind it."""
    used = [layout.blocks_for(part.start + len(part.tokens) + more) for part in parts]
    tables = np.zeros((len(parts), max(used)), np.int32)
    for row, part in enumerate(parts):
        tables[row, : used[row]] = part.blocks[: used[row]]
    return StepPlan(
        step=0,
        handles=tuple(range(len(parts))),
        tokens=np.array([token for part in parts for token in part.tokens], np.int32),
        starts=np.array([part.start for part in parts], np.int32),
        lengths=np.array([len(part.tokens) for part in parts], np.int32),
        block_tables=tables,
        sample=np.ones(len(parts), np.bool_),
        sampling=tuple([part.sampling for part in parts]),
        generated=np.zeros(len(parts), np.int32),
    )


@dataclass(slots=True, eq=False)
class Draft:
    """State of one sequence in the draft model."""

    hold: Hold
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    """Tokens whose KV is in the blocks of `hold`."""
    known: int = 0
    """Number of the first of these tokens that are certainly the target's: as many as it had when it asked last."""


class DraftProposer:
    """Implements `Proposer`."""

    layers = ()
    last_state = False

    def __init__(self, runner: ChainRunner, max_batch_tokens: int) -> None:
        """
        Args:
            runner: of the draft model; nobody else uses it or its pool.
            max_batch_tokens: of one of its steps.
        """
        self._runner = runner
        self._pool = BlockPool(runner.pool.num_blocks)
        self._most = max_batch_tokens
        self._drafts: dict[int, Draft] = {}

    def check(self, target: ModelSpec) -> None:
        """Raises ValueError, naming both sizes, unless the draft model has the tokens of the target."""
        mine, theirs = self._runner.spec.vocab_size, target.vocab_size
        if mine != theirs:
            raise ValueError(f"speculation.draft_model has {mine} tokens; allowed: those of the served model, {theirs}")

    def warm_up(self) -> None:
        self._runner.warm_up()

    def observe(self, computed: Sequence[Computed]) -> bool:
        """See `Proposer.observe`."""
        return False

    def propose(self, wants: Sequence[Want]) -> list[list[int]]:
        """Guesses. A sequence whose prompt isn't computed yet gets no guess; each call computes a part of it."""
        ready: list[tuple[Draft, Want, list[int]]] = []
        guesses: list[list[int]] = [[] for _ in wants]
        budget = self._most
        for guess, want in zip(guesses, wants, strict=True):
            draft = self._draft(want)
            # The last token's logits are needed, so it is computed in any case.
            common, most = min(draft.known, len(want.tokens) - 1), min(len(draft.tokens), len(want.tokens) - 1)
            while common < most and draft.tokens[common] == want.tokens[common]:
                common += 1
            del draft.tokens[common:]
            draft.known = common
            lacking = len(want.tokens) - common
            length = min(len(want.tokens) + want.most - 1, self._runner.spec.max_context)
            if budget < 1 or length < len(want.tokens) or not self._extend(draft, length):
                continue
            if lacking > budget:
                self._chain([(draft, list(want.tokens[common : common + budget]))], 1)
                budget = 0
                continue
            ready.append((draft, want, guess))
            budget -= lacking
        limit = self._runner.spec.max_context
        while ready:
            # The first pass of a chain computes what the target has kept, each later one the guess before.
            rows = [(draft, guess[-1:] or list(want.tokens[len(draft.tokens) :])) for draft, want, guess in ready]
            count = min(
                min(want.most - len(guess), limit + 1 - len(draft.tokens) - len(tokens))
                for (_, want, guess), (draft, tokens) in zip(ready, rows, strict=True)
            )
            chains = self._chain(rows, count)
            for (_, _, guess), chain in zip(ready, chains, strict=True):
                guess += chain
            if len(chains[0]) < count:
                break
            ready = [
                (draft, want, guess)
                for draft, want, guess in ready
                if len(guess) < want.most and len(draft.tokens) < limit
            ]
        return guesses

    def forget(self, handle: int) -> None:
        draft = self._drafts.pop(handle, None)
        if draft is not None:
            draft.hold.release()

    def _draft(self, want: Want) -> Draft:
        draft = self._drafts.get(want.handle)
        if draft is None:
            hold = self._pool.share((), f"draft of {want.request}")
            draft = self._drafts[want.handle] = Draft(hold, undisturbed(want.request.sampling))
        return draft

    def _extend(self, draft: Draft, length: int) -> bool:
        lacking = self._runner.layout.blocks_for(length) - len(draft.hold.blocks)
        return lacking <= 0 or draft.hold.extend(lacking)

    def _chain(self, rows: Sequence[tuple[Draft, list[int]]], count: int) -> list[list[int]]:
        """Computes tokens behind those that the draft model has, and guesses `count` more (`ChainRunner.chain`)."""
        parts = [Part(draft.hold.blocks, len(draft.tokens), tokens, draft.sampling) for draft, tokens in rows]
        chains = self._runner.chain(plan_of(parts, self._runner.layout, count - 1), count)
        for (draft, tokens), chain in zip(rows, chains, strict=True):
            # The last token's KV isn't computed.
            draft.tokens += tokens + chain[: count - 1]
        return chains


def undisturbed(asked: SamplingParams) -> SamplingParams:
    """Sampling parameters of guesses for a request, without what depends on more than the last token: the model adds
    that."""
    return SamplingParams(
        temperature=asked.temperature, top_k=asked.top_k, top_p=asked.top_p, min_p=asked.min_p, seed=asked.seed
    )
