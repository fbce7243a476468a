"""Sequences served by a `GeneralRunner` with plans made by hand, and the logits that whole forward passes give."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrelay.engine.kv.layout import LayerGroup
from kvrelay.engine.plan import StepPlan, TokenLogprobs
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.runner.general import GeneralRunner

TOP = 5
SCORED = SamplingParams(temperature=0.0, logprobs=TOP)


@dataclass
class Served:
    """One sequence, and where what it keeps lies."""

    tokens: list[int]
    prompt: int
    tables: list[list[int]]
    """Tables of each layer group: the block of each logical block, or the state's slot."""
    computed: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of each completion token."""


class Driver:
    """Serves all sequences side by side: chunks first, then one token each."""

    def __init__(
        self, runner: GeneralRunner, prompts: list[list[int]], most: int, known: list[list[int]] | None = None
    ) -> None:
        """
        Args:
            most: completion tokens.
            known: whole sequences, for a rank that chooses no tokens.
        """
        self.runner, self._most, self._known = runner, most, known
        self._random = np.random.default_rng(0)
        size = runner.cache_layout.block_size
        self._free: list[list[int]] = []
        for index, _ in enumerate(runner.cache_layout.groups):
            counts = [
                pool.num_blocks for pool, group in zip(runner.pools, runner.store.groups, strict=True) if group == index
            ]
            self._free.append(self._random.permutation(counts[0] if counts else 1000).tolist())
        self.sequences = []
        for prompt in prompts:
            blocks = -(-(len(prompt) + most) // size)
            tables = [self._take(index, 1 if group.kind == "state" else blocks) for index, group in self._groups()]
            self.sequences.append(Served(list(prompt), len(prompt), tables))

    def serve(self, chunk: int, *, moves: bool = False) -> list[Served]:
        """Computes prompts in chunks, then completions token by token; the sequences.

        Args:
            moves: whether all that is kept moves to other blocks in the middle of the completions.
        """
        while any(served.computed < served.prompt for served in self.sequences):
            self.step(chunk)
        for step in range(self._most):
            if moves and step == self._most // 2:
                self.move()
            self.step(1)
        return self.sequences

    def check(self, model: PreTrainedModel) -> None:
        """All sequences have the tokens and the log-probabilities of whole forward passes of transformers' own."""
        for served in self.sequences:
            tokens, expected = greedy(model, served.tokens[: served.prompt], self._most)
            assert served.tokens[served.prompt :][: self._most] == tokens
            for scores, logprobs in zip(served.logprobs, expected, strict=False):
                assert scores.top_logprobs == pytest.approx(logprobs[list(scores.top_ids)].tolist(), abs=1e-3)

    def step(self, budget: int) -> None:
        """Computes up to `budget` tokens of each sequence."""
        lengths = [min(budget, len(served.tokens) - served.computed) for served in self.sequences]
        width = max(len(served.tables[0]) for served in self.sequences)
        tables = [
            np.array([self._table(served, index, group, width) for served in self.sequences], np.int32)
            for index, group in self._groups()
        ]
        samples = [served.computed + n == len(served.tokens) for served, n in zip(self.sequences, lengths, strict=True)]
        plan = StepPlan(
            step=0,
            handles=tuple(range(len(self.sequences))),
            tokens=np.concatenate([
                np.array(served.tokens[served.computed : served.computed + n], np.int32)
                for served, n in zip(self.sequences, lengths, strict=True)
            ]),
            starts=np.array([served.computed for served in self.sequences], np.int32),
            lengths=np.array(lengths, np.int32),
            block_tables=tables[0],
            sample=np.array(samples),
            sampling=(SCORED,) * len(lengths),
            generated=np.zeros(len(lengths), np.int32),
            side_tables=tuple(tables[1:]),
        )  # fmt: skip
        out = self.runner.launch(plan).result()
        assert not out.nonfinite
        assert not out.refused
        for row, (served, length) in enumerate(zip(self.sequences, lengths, strict=True)):
            served.computed += length
            token = out.tokens[row]
            if token is not None and out.logprobs is not None and (scores := out.logprobs[row]) is not None:
                served.tokens.append(token)
                served.logprobs.append(scores)
            elif self._known is not None and served.computed == len(served.tokens):
                served.tokens.append(self._known[row][len(served.tokens)])

    def move(self) -> None:
        """Moves all that every sequence keeps to other blocks, and damages the old ones."""
        for index, group in self._groups():
            pools = [pool for pool, of in zip(self.runner.pools, self.runner.store.groups, strict=True) if of == index]
            for served in self.sequences:
                old = served.tables[index]
                new = self._take(index, len(old))
                for pool in pools:
                    pool.bytes[new] = pool.bytes[old]
                    pool.bytes[old] = 0x55 if group.kind == "state" else 0
                served.tables[index] = new

    def _table(self, served: Served, index: int, group: LayerGroup, width: int) -> list[int]:
        """A row of a table, in which what nobody may read is block 0."""
        if group.kind == "state":
            return served.tables[index]
        first = group.first_needed(served.computed) // self.runner.cache_layout.block_size
        own = served.tables[index]
        return [0] * first + own[first:] + [0] * (width - len(own))

    def _take(self, index: int, count: int) -> list[int]:
        # Block 0 is nobody's: tables name it where nothing may be read.
        taken = [block for block in self._free[index] if block][:count]
        self._free[index] = [block for block in self._free[index] if block not in taken]
        return taken

    def _groups(self) -> list[tuple[int, LayerGroup]]:
        return list(enumerate(self.runner.cache_layout.groups))


def logits(model: PreTrainedModel) -> Tensor:
    """[T, V] logits of some tokens."""
    with torch.inference_mode():
        return model(torch.arange(3, 40)[None], use_cache=False).logits[0]


def greedy(model: PreTrainedModel, prompt: list[int], most: int) -> tuple[list[int], list[Tensor]]:
    """Greedy tokens by whole forward passes of transformers' own, and the log-probabilities [V] before each."""
    tokens, found = list(prompt), []
    with torch.inference_mode():
        for _ in range(most):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
            found.append(logits.log_softmax(-1))
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], found
