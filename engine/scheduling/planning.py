"""Plans and reports: turns what the scheduler has decided into a plan, and brings what a step yields beside tokens to
its reports.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.kv.blocks import Hold
from kvrelay.engine.plan import NOT_READY, PromptPart, StepOutput, StepPlan, kept_of
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.scheduling.limits import SequenceLimits
from kvrelay.engine.scheduling.progress import Progress
from kvrelay.engine.sequence import Sequence
from kvrelay.engine.shaping import Shaping
from kvrelay.engine.speculate.speculation import NO_CHAIN, Chain, Speculation

if TYPE_CHECKING:
    from torch import Tensor


class BlockTables:
    """The block tables of the running sequences, in one matrix that each step copies its rows from.

    int32 [rows, width]: row `slot` lists the pool blocks of one sequence; unused entries are 0.

    A row in use is only appended to, so a decode step costs one copy, whatever the lengths of its contexts.
    """

    def __init__(self, rows: int, width: int) -> None:
        self._matrix = np.zeros((rows, width), np.int32)
        self._used = [0] * rows
        self._vacant = list(range(rows - 1, -1, -1))

    @property
    def vacant(self) -> int:
        """Unused rows."""
        return len(self._vacant)

    def acquire(self) -> int:
        """Takes an unused row. There must be one."""
        return self._vacant.pop()

    def release(self, slot: int) -> None:
        """Clears the row and returns it."""
        self._matrix[slot, : self._used[slot]] = 0
        self._used[slot] = 0
        self._vacant.append(slot)

    def grow(self, slot: int, blocks: Rows[int], used: int) -> None:
        """Appends to the row, which lists a prefix of `blocks[:used]`, the rest of these blocks."""
        known = self._used[slot]
        if used > known:
            self._matrix[slot, known:used] = blocks[known:used]
            self._used[slot] = used

    def gather(self, slots: Rows[int]) -> NDArray[np.int32]:
        """A copy of the given rows, as wide as the longest of them."""
        width = max([self._used[slot] for slot in slots])
        # `take` would copy the whole matrix first, as these columns of it aren't contiguous.
        return self._matrix[slots, :width]


class Row(NamedTuple):
    """One sequence's part of a step."""

    sequence: Sequence
    length: int
    """Number of tokens that the step computes."""
    chain: Chain = NO_CHAIN
    """Drafts behind the last token; each is a row of the plan."""

    @property
    def rows(self) -> int:
        """Number of rows that the plan has for it."""
        return 1 + len(self.chain.drafts)


def continues_unseen(sequence: Sequence, length: int, speculation: Speculation | None) -> bool:
    """Whether the token that makes a sequence `length` tokens long can be computed while that one isn't known yet. Not
    while drafts are in flight, and not if it should have drafts, which can only follow a known token.
    """
    held = speculation is not None and (sequence.yields > 1 or speculation.holds_back(sequence))
    return not held and sequence.continues_unseen(length)


def has_mask(sequence: Sequence) -> bool:
    """Whether the next token of a sequence can be chosen in the next step. If not, a step without the row goes on."""
    matcher = None if sequence.shaping is None else sequence.shaping.matcher
    # What leaves with its first token isn't computed twice: its KV may be on its way once it was computed. Nor is what
    # has a state, which would have the token twice.
    once = sequence.handoff or any(side.side.is_state for side in sequence.hold.sides)
    return matcher is None or matcher.ready(surely=once)


def settled(plan: StepPlan, out: StepOutput, rows: list[Sequence]) -> tuple[StepOutput, list[bool]]:
    """The output of a step without the tokens of rows whose masks weren't there, and [R] which rows count: as
    `kept_of`. What they computed is computed again, and what the plan had of their prompts'
    log-probabilities is reported then.
    """
    late = [row for row, why in out.refused if why == NOT_READY]
    if not late:
        return out, kept_of(plan, out)
    for part in plan.prompt_parts:
        if part.row in late:
            rows[part.row].unscored = part.first
    tokens = tuple([None if row in late else token for row, token in enumerate(out.tokens)])
    return replace(out, tokens=tokens), kept_of(plan, out)


def add_drafts(speculation: Speculation, rows: list[Row], room: int, make_room: Callable[[Hold, int], int]) -> None:
    """Adds drafts to the rows of sequences that decode.

    Args:
        room: rows of the plan that are left.
        make_room: as `PrefixIndex.make_room`, of a hold and a number of tokens.
    """
    if not speculation.begin(len(rows)):
        return
    places = [
        place
        for place, (sequence, length, _) in enumerate(rows)
        # A chunk that isn't the last may have one token, too.
        if length == 1 == sequence.num_tokens - sequence.reach
        and not (sequence.handoff or sequence.yields or sequence.unscored)
    ]
    chains = speculation.propose([rows[place].sequence for place in places], room)
    for place, chain in zip(places, chains, strict=False):  # no chain, or one for each
        sequence, length = rows[place].sequence, rows[place].sequence.num_tokens
        count = len(chain.drafts)
        if count and (count := make_room(sequence.hold, length + count) - length):
            rows[place] = rows[place]._replace(chain=chain.first(count))


def tables_of(rows: list[Row], tables: BlockTables, limits: SequenceLimits) -> NDArray[np.int32]:
    """[R, W] the block tables of the plan's rows, with the blocks of all tokens that they compute."""
    slots: list[int] = []
    for sequence, length, chain in rows:
        slot, count = sequence.slot, len(chain.drafts)
        tables.grow(slot, sequence.hold.blocks, limits.blocks_for(sequence.reach + length + count))
        slots += [slot] * (1 + count) if count else (slot,)
    return tables.gather(slots)


def side_tables_of(rows: list[Row], width: int) -> tuple[NDArray[np.int32], ...]:
    """The tables of the groups behind the first, as `StepPlan.side_tables`; `width` is that of the first one's."""
    found = []
    for number, side in enumerate(rows[0].sequence.hold.sides):
        table = np.zeros((sum([row.rows for row in rows]), 1 if side.side.is_state else width), np.int32)
        spare = iter(side.side.spare)
        at = 0
        for row in rows:
            own = row.sequence.hold.sides[number]
            used = own.hold.blocks[: width - own.first]
            table[at : at + row.rows, own.first : own.first + len(used)] = used
            # Kernels may load keys before the window, which they then give no weight: they must be numbers.
            table[at : at + row.rows, : own.first] = own.hold.blocks[0]
            if side.side.is_state:
                table[at + 1 : at + row.rows, 0] = list(islice(spare, row.rows - 1))
            at += row.rows
        found.append(table)
    return tuple(found)


def build_plan(
    step: int, rows: Rows[Row], block_tables: NDArray[np.int32], keep: tuple[int, ...], *, behind: bool
) -> StepPlan:
    """The plan that computes so many tokens of each sequence; they are in flight from now on.

    Args:
        block_tables: [R, W] of the plan's rows, with the blocks of all these tokens.
        keep: layers whose inputs this worker's own proposer needs; they come first in the plan's.
        behind: whether another plan is in flight.
    """
    tokens: list[int] = []
    handles: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    sample: list[bool] = []
    generated: list[int] = []
    feeds: list[int] = []
    drafts: list[bool] = []
    sampling: list[SamplingParams] = []
    shapings: list[Shaping | None] = []
    parts: list[PromptPart] = []
    for sequence, length, chain in rows:
        known, expected = len(sequence.tokens), sequence.expected
        start = sequence.reach
        end = start + length
        row, completion = len(starts), expected - sequence.request.prompt_tokens
        tokens += sequence.tokens[start:end] if start < known else (0,)
        feeds.append(-1 if start < known else sequence.row)
        starts.append(start)
        lengths.append(length)
        sample.append(end == expected)
        generated.append(completion)
        sequence.scheduled += length
        sequence.yields += end == expected
        sequence.row, sequence.turn = row, step
        if sequence.unscored:
            parts += _prompt_part(row, sequence, start, end)
        if sequence.states is not None:
            keep += tuple([layer for layer in sequence.states.layers_of(end == expected) if layer not in keep])
        handles.append(sequence.handle)
        sampling.append(sequence.request.sampling)
        drafts.append(False)
        shapings.append(sequence.shaping)
        if chain.drafts:
            count = len(chain.drafts)
            handles += [sequence.handle] * count
            sampling += [sequence.request.sampling] * count
            drafts += [True] * count
            tokens += chain.drafts
            feeds += [-1] * count
            starts += range(end, end + count)
            lengths += [1] * count
            sample += [True] * count
            generated += range(completion + 1, completion + 1 + count)
            shapings += chain.shapings or [None] * count
            sequence.scheduled += count
            sequence.yields += count
    return StepPlan(
        step=step,
        handles=tuple(handles),
        tokens=np.array(tokens, np.int32),
        starts=np.array(starts, np.int32),
        lengths=np.array(lengths, np.int32),
        block_tables=block_tables,
        sample=np.array(sample, np.bool_),
        sampling=tuple(sampling),
        generated=np.array(generated, np.int32),
        feeds=np.array(feeds, np.int32) if behind else None,
        shapings=tuple(shapings) if any(shapings) else None,
        drafts=np.array(drafts, np.bool_) if any(drafts) else None,
        prompt_parts=tuple(parts),
        keep=keep,
    )


def _prompt_part(row: int, sequence: Sequence, start: int, end: int) -> list[PromptPart]:
    """The prompt's log-probabilities that the step of tokens [start, end) yields: the logits at a token are those of
    the next one. Empty if a preempted sequence only computes again what was reported before.
    """
    first, last = sequence.unscored, min(end + 1, sequence.request.prompt_tokens)
    if first >= last:
        return []
    sequence.unscored = last if last < sequence.request.prompt_tokens else 0
    targets = np.array(sequence.tokens[first:last], np.int32)
    return [PromptPart(row, first - 1 - start, targets, sequence.request.sampling.prompt_logprobs or 0, first)]


def with_output(plan: StepPlan, out: StepOutput, reports: list[tuple[int, Progress]]) -> list[Progress]:
    """The reports of a step, each of one row, with what that row has in `out` beside its token."""
    if out.states is not None:
        reports = _with_states(plan, out.states, reports)
    return _with_logprobs(plan, out, reports) if out.has_logprobs else [report for _, report in reports]


def _with_states(plan: StepPlan, states: "Tensor", reports: Rows[tuple[int, Progress]]) -> list[tuple[int, Progress]]:
    """The reports with the hidden states that leave with their sequences."""
    complete, ends = [], plan.lengths.cumsum().tolist()
    for row, report in reports:
        wanted = report.sequence.states
        layers = () if wanted is None or report.error is not None else wanted.layers_of(report.token is not None)
        if wanted is not None and layers:
            first = ends[row] - (1 if wanted.last else int(plan.lengths[row]))
            places = tuple([plan.keep.index(layer) for layer in layers])
            report = report._replace(states=states[first : ends[row]], state_places=places)
        complete.append((row, report))
    return complete


def _with_logprobs(plan: StepPlan, out: StepOutput, reports: Rows[tuple[int, Progress]]) -> list[Progress]:
    """The reports with their log-probabilities."""
    prompts = {part.row: (part, found) for part, found in zip(plan.prompt_parts, out.prompt_logprobs, strict=True)}
    complete = []
    for row, report in reports:
        if out.logprobs is not None:
            report = report._replace(logprobs=out.logprobs[row])
        if row in prompts:
            part, found = prompts[row]
            report = report._replace(prompt_logprobs=found, prompt_first=part.first)
        complete.append(report)
    return complete
