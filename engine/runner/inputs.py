"""A step's inputs on the device, at fixed addresses, and the host memory that they are copied from.

Copies are asynchronous: a plan is written into one of two sets of pinned memory, and its copy to the device is queued
behind the step before it. A set is written again when the step after the next is planned. Its copy is done by then,
because it was queued before a step that has ended.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvrelay.engine.attention.base import AttentionInputs, Places, slots_in, token_rows
from kvrelay.engine.kv.layout import CacheLayout
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.sampling.noise import SEED_MASK, noise_keys
from kvrelay.kernels.triton.sample import Choices

TOKEN_FIELDS = 3
"""Fields of a token beside its slots, of which there is one for each group of layers."""
ROW_FIELDS = 7
SMALL = 1024
"""Number of tokens up to which one copy of the whole buffer costs less than a copy of each field's used part."""


class HostInputs:
    """One set of host memory, and numpy arrays over it; fields as in `InputBuffers`."""

    def __init__(self, rows: int, tokens: int, width: int, groups: int, pinned: bool) -> None:
        self.longs = torch.zeros(TOKEN_FIELDS + groups, tokens, dtype=torch.int64, pin_memory=pinned)
        self.words = torch.zeros(ROW_FIELDS * rows, dtype=torch.int32, pin_memory=pinned)
        self.tables = torch.zeros(groups, rows * width, dtype=torch.int32, pin_memory=pinned)
        self.tokens, self.positions, self.feeds, *self.slots = self.longs.numpy()
        words = self.words.numpy()
        self.contexts, self.top_k = words[: 2 * rows].reshape(2, rows)
        self.temperature, self.top_p, self.min_p = words[2 * rows : 5 * rows].view(np.float32).reshape(3, rows)
        self.keys = words[5 * rows :].reshape(rows, 2)


class InputBuffers:
    """Buffers on the device for the inputs of steps of at most R rows and T tokens.

    Attributes:
        tokens, positions: int64 [T]; 0 for a padding token.
        slots: int64 [T] of each group; -1 for a padding token.
        feeds: int64 [T] row of the step before whose sampled token this token is; -1 if `tokens` has it.
        contexts: int32 [R] tokens of each row's sequence, including this step's; 0 for a padding row.
        tables: int32 [R, W] of each group.
        choices: [R].
    """

    def __init__(
        self, rows: int, tokens: int, layout: CacheLayout, max_context: int, banned: int, device: torch.device
    ) -> None:
        """
        Args:
            layout: of what the model keeps, in groups that are full or of a window.
            max_context: tokens of the longest sequence.
            banned: token ids that may be forbidden to one row at most.
        """
        self._block_size, width = layout.block_size, -(-max_context // layout.block_size)
        self._windows, groups = [group.window for group in layout.side_groups], len(layout.groups)
        pinned = device.type == "cuda"
        self._sets = [HostInputs(rows, tokens, width, groups, pinned) for _ in range(2)]
        self._banned = [torch.zeros(rows, banned, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._longs = torch.zeros(TOKEN_FIELDS + groups, tokens, dtype=torch.int64, device=device)
        self._words = torch.zeros(ROW_FIELDS * rows, dtype=torch.int32, device=device)
        self.tables = torch.zeros(groups, rows, width, dtype=torch.int32, device=device)
        self.tokens, self.positions, self.feeds, *self.slots = self._longs
        for slots in self.slots:
            slots.fill_(-1)
        self.feeds.fill_(-1)
        self.contexts, top_k = self._words[: 2 * rows].view(2, rows)
        temperature, top_p, min_p = self._words[2 * rows : 5 * rows].view(torch.float32).view(3, rows)
        keys = self._words[5 * rows :].view(rows, 2)
        ban = torch.full((rows, banned), -1, dtype=torch.int32, device=device)
        self.choices = Choices(temperature, top_k, top_p, min_p, keys, ban)
        self._bans = False
        self._sampling: tuple[SamplingParams, ...] = ()
        self._columns = _columns(())
        self._least = np.zeros(0, np.int32)
        """The `min_tokens` of `_sampling`."""
        self.scored = False
        """Whether a row of the plan that was loaded last asks for log-probabilities of the token that it samples."""

    def load(
        self, plan: StepPlan, sampled: NDArray[np.int64], fill_rows: int = 0, fill_tokens: int = 0
    ) -> AttentionInputs:
        """Queues the copy of a plan to the device.

        Args:
            sampled: [S] the plan's rows that sample, in the order of `choices`.
            fill_rows: number to fill the rows up to, each with one token; a smaller one than the plan's fills none.
            fill_tokens: number to fill the tokens up to, those of filling rows included.
        """
        host = self._sets[0]
        self._sets.reverse()
        rows, tokens = plan.num_rows, plan.num_tokens
        end_rows, end_tokens = max(rows, fill_rows), max(tokens, fill_tokens)
        host.tokens[:tokens] = plan.tokens
        host.positions[:tokens], rows_of = token_rows(plan)
        host.feeds[:tokens] = -1 if plan.feeds is None else np.repeat(plan.feeds, plan.lengths)
        host.tokens[tokens:end_tokens] = host.positions[tokens:end_tokens] = 0
        host.feeds[tokens:end_tokens] = -1
        host.contexts[:rows] = plan.starts + plan.lengths
        host.contexts[rows:end_rows] = 0
        self._write_choices(host, plan, sampled)
        width = plan.block_tables.shape[1]
        for number, table in enumerate((plan.block_tables, *plan.side_tables)):
            slots = host.slots[number]
            slots[:tokens] = slots_in(table, host.positions[:tokens], rows_of, self._block_size)
            slots[tokens:end_tokens] = -1
            host.tables[number, : rows * width].numpy()[:] = table.reshape(-1)
        if self._longs.shape[1] <= SMALL:
            self._longs.copy_(host.longs, non_blocking=True)
        else:
            for device, memory in zip(self._longs, host.longs, strict=True):
                device[:end_tokens].copy_(memory[:end_tokens], non_blocking=True)
        self._words.copy_(host.words, non_blocking=True)
        for device, memory in zip(self.tables, host.tables, strict=True):
            device[:rows, :width].copy_(memory[: rows * width].view(rows, width), non_blocking=True)
        self._load_bans(plan, sampled)
        starts, lengths = np.full(end_rows, -1, np.int64), np.ones(end_rows, np.int64)
        starts[:rows], lengths[:rows] = plan.starts, plan.lengths
        return self.view(starts, lengths, end_tokens)

    def view(self, starts: NDArray[np.int64], lengths: NDArray[np.int64], tokens: int) -> AttentionInputs:
        """The part of the buffers that a step of rows [R] with these starts and lengths uses, and of so many tokens."""
        rows = len(lengths)
        first, *sides = (
            Places(slots[:tokens], table[:rows]) for slots, table in zip(self.slots, self.tables, strict=True)
        )
        return AttentionInputs(
            positions=self.positions[:tokens],
            slots=first.slots,
            block_tables=first.block_tables,
            contexts=self.contexts[:rows],
            starts=starts,
            lengths=lengths,
            windows=dict(zip(self._windows, sides, strict=True)),
        )

    def _write_choices(self, host: HostInputs, plan: StepPlan, sampled: NDArray[np.int64]) -> None:
        count = len(sampled)
        sampling = plan.sampling if count == plan.num_rows else tuple([plan.sampling[row] for row in sampled])
        if sampling != self._sampling:
            self._sampling, self._columns = sampling, _columns(sampling)
            self._least = np.array([params.min_tokens for params in sampling], np.int32)
            self.scored = any(params.logprobs is not None for params in sampling)
        temperature, top_k, top_p, min_p, seeds = self._columns
        host.temperature[:count], host.top_k[:count] = temperature, top_k
        host.top_p[:count], host.min_p[:count] = top_p, min_p
        host.temperature[count:] = 0.0
        if temperature.any():
            ends = (plan.starts + plan.lengths)[sampled]
            host.keys[:count] = noise_keys(seeds, ends)

    def _load_bans(self, plan: StepPlan, sampled: NDArray[np.int64]) -> None:
        """Rows that have fewer than their min_tokens must not stop. Special rows are left out (`gpu_step.py`)."""
        early = np.flatnonzero(plan.generated[sampled] < self._least)
        if not len(early) and not self._bans:
            return
        rows = [(index, int(sampled[index])) for index in early.tolist()]
        short = [(index, plan.sampling[row].stop_token_ids) for index, row in rows if not plan.is_special(row)]
        self._banned.reverse()
        memory = self._banned[0].fill_(-1)
        for index, tokens in short:
            memory[index, : len(tokens)] = torch.tensor(sorted(tokens), dtype=torch.int32)
        self.choices.banned.copy_(memory, non_blocking=True)
        self._bans = bool(short)


def _columns(sampling: Sequence[SamplingParams]) -> tuple[NDArray[np.generic], ...]:
    """temperature, top_k, top_p, min_p and seed of each row."""
    return (
        np.array([params.temperature for params in sampling], np.float32),
        np.array([params.top_k for params in sampling], np.int32),
        np.array([params.top_p for params in sampling], np.float32),
        np.array([params.min_p for params in sampling], np.float32),
        np.array([params.seed & SEED_MASK for params in sampling], np.uint64),
    )
