"""Runs sequences through a CpuRunner's model, chunk by chunk, and collects the logits of every token."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.kv.layout import CacheLayout
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.runner.base import Runner
from kvrelay.engine.runner.cpu import CpuRunner, build_cpu_runner

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class PagedSequence:
    """A sequence whose KV lies in `blocks`, of all pools, as far as it is computed."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)

    @property
    def left(self) -> int:
        return len(self.tokens) - self.computed


class PagedSequences:
    """Sequences on blocks that are dealt out in random order, the same in all pools."""

    def __init__(self, runner: Any, seed: int = 0) -> None:
        """`runner`: a `CpuRunner`, or one with the same `forward`, pools and layouts."""
        self.runner = runner
        # `make_plan` has another use for block 0 where there are windows.
        first = len(runner.cache_layout.side_groups[:1])
        self._free = list(range(first, min(pool.num_blocks for pool in runner.pools)))
        random.Random(seed).shuffle(self._free)

    def add(self, tokens: Sequence[int], extra: int = 0) -> PagedSequence:
        """A sequence with blocks for `tokens` and `extra` more."""
        blocks = [self._free.pop() for _ in range(self.runner.layout.blocks_for(len(tokens) + extra))]
        return PagedSequence(list(tokens), blocks)

    def compute(self, *work: tuple[PagedSequence, int]) -> None:
        """One step: so many tokens of each sequence."""
        runner = self.runner
        plan = make_plan([(sequence, count, GREEDY) for sequence, count in work], runner.cache_layout)
        with torch.inference_mode():
            logits = runner.model.logits(runner.forward(plan))
        for (sequence, count), rows in zip(work, logits.split([count for _, count in work]), strict=True):
            sequence.logits.append(rows.clone())
            sequence.computed += count


def logits_of(folder: Path, tokens: Sequence[int], dtype: Dtype = "float32", **options: Any) -> torch.Tensor:
    """Logits [tokens, vocabulary] of a checkpoint on the CPU, in one step.

    Args:
        options: of `EngineConfig`.
    """
    return logits_by(build_cpu_runner(folder, dtype, EngineConfig(kv_memory_bytes=2**22, threads=1, **options)), tokens)


def logits_by(runner: CpuRunner, tokens: Sequence[int], *counts: int) -> torch.Tensor:
    """Logits [tokens, vocabulary], in steps of so many tokens; in one step if no counts are given."""
    sequences = PagedSequences(runner)
    sequence = sequences.add(tokens)
    for count in counts or (len(sequence.tokens),):
        sequences.compute((sequence, count))
    return torch.cat(sequence.logits)


Work = Sequence[tuple[PagedSequence, int, SamplingParams]]
"""Rows of a step: so many tokens of each sequence."""


def step(runner: Runner, work: Work, **changes: Any) -> StepOutput:
    """Runs one step and appends what it yields.

    Args:
        changes: of the plan.
    """
    out = runner.launch(dataclasses.replace(make_plan(work, runner.cache_layout), **changes)).result()
    for (sequence, count, _), token in zip(work, out.tokens, strict=True):
        sequence.computed += count
        if token is not None:
            sequence.tokens.append(token)
    return out


def make_plan(rows: Work, layout: CacheLayout | None = None) -> StepPlan:
    """A plan that computes so many tokens of each sequence and samples from those that it catches up with.

    Args:
        layout: of all that the model keeps; None if it is one group. Of a window, block 0 takes the place of blocks
            that no token of the step needs.
    """
    tables = np.zeros((len(rows), max(len(sequence.blocks) for sequence, _, _ in rows)), np.int32)
    for table, (sequence, _, _) in zip(tables, rows, strict=True):
        table[: len(sequence.blocks)] = sequence.blocks
    sides = []
    for group in () if layout is None else layout.side_groups:
        sides.append(tables.copy())
        for table, (sequence, _, _) in zip(sides[-1], rows, strict=True):
            table[: group.first_needed(sequence.computed) // group.tracks[0].block_size] = 0
    return StepPlan(
        step=0,
        handles=tuple(range(100, 100 + len(rows))),
        tokens=np.concatenate([np.array(s.tokens[s.computed : s.computed + count], np.int32) for s, count, _ in rows]),
        starts=np.array([sequence.computed for sequence, _, _ in rows], np.int32),
        lengths=np.array([count for _, count, _ in rows], np.int32),
        block_tables=tables,
        sample=np.array([count == sequence.left for sequence, count, _ in rows]),
        sampling=tuple(params for _, _, params in rows),
        generated=np.zeros(len(rows), np.int32),
        side_tables=tuple(sides),
    )
