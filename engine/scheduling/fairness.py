"""Shares of the holders of requests in the time of steps.

A step takes as long for a holder of one sequence as for one of hundreds that are in it. So where sequences of k holders
run, a step has no more tokens than may cost k times the cheapest holder's own:

    seconds(step) <= k * seconds(the cheapest holder's part alone)

Each holder gets as many tokens as it can use, up to the same share for all who can use more (max-min). A holder whose
sequences are the only ones that run, or come soon, has no limit. Only sequences of one rank share so: those of greater
ranks take what these leave, and don't shorten their steps. The costs are those that were fitted to the engine's
steps (`costs/step.py`); where weights bound a step, as on GPUs, tokens cost so little that nobody is limited.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvrelay.costs.step import StepCost, StepWork, pairs
from kvrelay.engine.sequence import Sequence

K = TypeVar("K", bound=Hashable)


class Most(NamedTuple):
    """Limits of a step."""

    tokens: int
    rows: int
    spare: int
    """Number of sequences that may run beyond these rows: those of holders of few, which need not wait for others to
    end."""


@dataclass(slots=True)
class StepShares:
    """Tokens that a step has for each holder; what the scheduler hands out is taken away."""

    total: int
    """Tokens of the whole step."""
    decodes: Counter[int]
    """Tokens of each holder's sequences that decode."""
    chunks: Counter[int]
    """Tokens of each holder's prompts."""


def shares_of_step(
    cost: StepCost | None,
    running: Iterable[Sequence],
    decodes: Iterable[Sequence],
    coming: Collection[int],
    most: Most,
    step: int,
) -> StepShares | None:
    """The shares of the holders whose sequences run, or are to come soon; None if there is only one.

    A holder whose sequences can't take part in this step, since they or their masks aren't there yet, counts as one
    with a single token: a long step would keep it waiting.

    Args:
        cost: of this engine's steps; None before it is known: then their time isn't limited.
        decodes: those of `running` that can compute the one token that they lack.
        coming: holders whose sequences come soon.
        most: of the step.
        step: its number.
    """
    chunks: Counter[int] = Counter(dict.fromkeys(coming, 0))
    prompts = 0
    for sequence in running:
        lack = sequence.expected - sequence.reach
        chunks[sequence.holder] += lack if lack > 1 else 0
        prompts += lack > 1
    if len(chunks) < 2:
        return None
    rows: Counter[int] = Counter()
    context = 0
    for sequence in decodes:
        rows[sequence.holder] += 1
        context += sequence.expected
    each = context / rows.total() if rows else 0.0
    rows = Counter(max_min(rows, most.rows - min(prompts, most.spare)))
    wanted = {holder: max(1, rows[holder] + lack) for holder, lack in chunks.items()}
    total = most.tokens
    if cost is not None:
        parts = {holder: _work(chunks[holder], rows[holder] or not chunks[holder], each) for holder in wanted}
        allowed = len(wanted) * min(cost.seconds(part) for part in parts.values())
        total = _tokens_within(cost, allowed, rows.total(), each, prompts=bool(prompts))
        total = min(most.tokens, max(len(wanted) * min(wanted.values()), total))
    for holder, share in max_min(wanted, total).items():
        # If the share is too small for all, prompts get half of it. Where the share is one token, prompts and decodes
        # take turns.
        half = (share + step % 2) // 2
        chunks[holder] = min(chunks[holder], max(share - rows[holder], half))
        rows[holder] = share - chunks[holder]
    return StepShares(total, rows, chunks)


def _work(prompt_tokens: int, rows: int, context: float) -> StepWork:
    """A step of a chunk at a prompt's begin and of so many rows, each with so many tokens of context."""
    return StepWork(prompt_tokens, pairs(0, prompt_tokens), rows, int(rows * context))


def _tokens_within(cost: StepCost, seconds: float, rows: int, context: float, *, prompts: bool) -> int:
    """Tokens of a step of at most `seconds`: as many of these rows as fit, and as much of a prompt beside them."""
    decodes = _work(0, rows, context)
    added = cost.seconds(decodes) - cost.fixed
    if added and cost.fixed + added > seconds:
        return int(rows * (seconds - cost.fixed) / added)
    return rows + (cost.tokens_within(seconds, 0, decodes) if prompts else 0)


def max_min(wanted: Mapping[K, int], total: int) -> dict[K, int]:
    """Shares of `total`: each gets what it wants, up to a share that is the same for all who want more."""
    shares: dict[K, int] = {}
    for place, key in enumerate(sorted(wanted, key=wanted.__getitem__)):
        shares[key] = min(wanted[key], total // (len(wanted) - place))
        total -= shares[key]
    return shares
