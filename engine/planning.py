"""Turns what the scheduler has decided into a plan, and brings what a step yields beside tokens to its reports."""

from collections.abc import Sequence as Rows

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.plan import PromptPart, StepOutput, StepPlan
from kvrelay.engine.progress import Progress
from kvrelay.engine.sequence import Sequence


def build_plan(
    step: int, rows: Rows[tuple[Sequence, int]], block_tables: NDArray[np.int32], *, behind: bool
) -> StepPlan:
    """The plan that computes so many tokens of each sequence; they are in flight from now on.

    Args:
        block_tables: [R, W] of the rows, with the blocks of all these tokens.
        behind: whether another plan is in flight.
    """
    tokens: list[int] = []
    starts, sample, generated, feeds = [], [], [], []
    parts: list[PromptPart] = []
    for row, (sequence, length) in enumerate(rows):
        known, expected = len(sequence.tokens), sequence.expected
        start = sequence.reach
        end = start + length
        tokens += sequence.tokens[start:end] if start < known else (0,)
        feeds.append(-1 if start < known else sequence.row)
        starts.append(start)
        sample.append(end == expected)
        generated.append(expected - sequence.request.prompt_tokens)
        sequence.scheduled += length
        sequence.yields += end == expected
        sequence.row = row
        if sequence.unscored:
            parts += _prompt_part(row, sequence, start, end)
    shapings = [sequence.shaping for sequence, _ in rows]
    return StepPlan(
        step=step,
        handles=tuple([sequence.handle for sequence, _ in rows]),
        tokens=np.array(tokens, np.int32),
        starts=np.array(starts, np.int32),
        lengths=np.array([length for _, length in rows], np.int32),
        block_tables=block_tables,
        sample=np.array(sample, np.bool_),
        sampling=tuple([sequence.request.sampling for sequence, _ in rows]),
        generated=np.array(generated, np.int32),
        feeds=np.array(feeds, np.int32) if behind else None,
        shapings=tuple(shapings) if any(shapings) else None,
        prompt_parts=tuple(parts),
    )


def _prompt_part(row: int, sequence: Sequence, start: int, end: int) -> list[PromptPart]:
    """What the step of tokens [start, end) yields of the prompt's log-probabilities: the logits at a token are those of
    the next one. None if a preempted sequence only computes again what was reported before.
    """
    first, last = sequence.unscored, min(end + 1, sequence.request.prompt_tokens)
    if first >= last:
        return []
    sequence.unscored = last if last < sequence.request.prompt_tokens else 0
    targets = np.array(sequence.tokens[first:last], np.int32)
    return [PromptPart(row, first - 1 - start, targets, sequence.request.sampling.prompt_logprobs or 0, first)]


def with_logprobs(
    plan: StepPlan, sequences: Rows[Sequence], out: StepOutput, reports: Rows[Progress]
) -> list[Progress]:
    """The reports of a step, each with the log-probabilities of its row in `out`."""
    rows = {sequence.handle: row for row, sequence in enumerate(sequences)}
    prompts = {part.row: (part, found) for part, found in zip(plan.prompt_parts, out.prompt_logprobs, strict=True)}
    complete = []
    for report in reports:
        row = rows[report.sequence.handle]
        if out.logprobs is not None:
            report = report._replace(logprobs=out.logprobs[row])
        if row in prompts:
            part, found = prompts[row]
            report = report._replace(prompt_logprobs=found, prompt_first=part.first)
        complete.append(report)
    return complete
