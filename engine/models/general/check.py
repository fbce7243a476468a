"""Logits of a way, chunked and ragged, against those of one whole forward pass of transformers' own.

Numbers are compared position by position. In float32 they must agree within EXACT, relative to the largest logit where
that is above 1. In bfloat16 and float16, two right orders of the same sums differ by about one rounding, 2**-8, in each
layer, while a wrong mask or position changes logits by about their own spread. So the mean difference there may be
ROUNDED of the spread of a position's logits, at 9 of 10 positions; a router of experts that flips at a tie may change
the rest.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from kvrelay.engine.models.general.inputs import OFFSET, Inputs
from kvrelay.engine.models.general.places import Placing
from kvrelay.engine.models.general.reading import set_attention
from kvrelay.engine.models.general.step import Step, UnfitError, Way
from kvrelay.engine.ranks.collective import NO_GROUP, Collective

EXACT = 1e-4
ROUNDED = 0.1
LENGTHS = (5, 23, 41)
CHUNK = 16
DECODED = 3
"""Last tokens of each prompt that are computed one by one, as decode does."""
BEYOND = 12
MOST = 320
"""Tokens of the longest prompt at most; a longer window isn't passed."""


class Prompts:
    """Random prompts with the logits that transformers' own code gives each of their tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        vocab_size: int,
        windows: tuple[int, ...],
        limit: int,
        group: Collective = NO_GROUP,
    ) -> None:
        """
        Args:
            windows: of the model's layers; one prompt is longer, if that isn't too long.
            limit: the model's longest context.
            group: of the ranks that share the layers, each of which makes the same prompts.
        """
        random = np.random.default_rng(7)
        passed = [window + BEYOND for window in windows if window + BEYOND <= MOST]
        lengths = [min(length, limit - 1) for length in (*LENGTHS[:2], max(LENGTHS[2], *passed, 0))]
        self.tokens: list[NDArray[np.int64]] = [random.integers(3, vocab_size, length) for length in lengths]
        set_attention(model, "eager")
        inputs = Inputs(model)
        self.logits: list[Tensor] = []
        with torch.inference_mode():
            for tokens in self.tokens:
                ids = torch.from_numpy(tokens).to(model.device)[None]
                wanted = torch.arange(len(tokens), device=model.device)
                self.logits.append(inputs.call(ids, None, None, wanted, {})[0].cpu())
            find_offset(model, inputs, self.tokens[0], self.logits[0])
        if not all(bool(logits.isfinite().all()) for logits in self.logits):
            raise UnfitError("its logits aren't finite")
        # Where a sum is missing, each rank has logits of its own.
        if any(not torch.equal(other, self.logits[0]) for other in group.gather(self.logits[0])):
            raise UnfitError("its ranks have different logits")


def find_offset(model: PreTrainedModel, inputs: Inputs, tokens: NDArray[np.int64], logits: Tensor) -> None:
    """Finds the number that the model calls its first position: those of RoBERTa's family begin behind the padding's.

    Args:
        logits: [T, V] of the tokens where the model itself numbers them.
    """
    ids = torch.from_numpy(tokens).to(model.device)[None]
    wanted = torch.arange(len(tokens), device=model.device)
    padding = getattr(model.config, "pad_token_id", None)
    for offset in (0, *((padding + 1,) if isinstance(padding, int) and padding >= 0 else ())):
        setattr(model, OFFSET, offset)
        found = inputs.call(ids, wanted[None], None, wanted, {})[0].cpu()
        if torch.allclose(found, logits, rtol=EXACT, atol=EXACT):
            return
    setattr(model, OFFSET, 0)


def difference(way: Way, prompts: Prompts, placing: Placing) -> tuple[float, float]:
    """The largest difference of logits, relative to the largest logit where that is above 1; and the mean difference,
    relative to the spread, that nine of ten positions don't exceed.

    Raises:
        UnfitError: the model's code can't be run in this way.
    """
    worst, means = 0.0, []
    with torch.inference_mode():
        for step, wanted, origins in steps(prompts.tokens, placing):
            logits = way.run(step, wanted).cpu()
            for found, (prompt, position) in zip(logits, origins, strict=True):
                largest, mean = apart(found, prompts.logits[prompt][position])
                worst = max(worst, largest)
                means.append(mean)
    return worst, float(np.quantile(means, 0.9))


def apart(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """As `difference`, of one position's logits."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf"), float("inf")
    gap = (found - expected).abs()
    return float(gap.max()) / max(1.0, float(expected.abs().max())), float(gap.mean()) / max(
        1e-6, float(expected.std())
    )


def agrees(found: tuple[float, float], dtype: torch.dtype) -> bool:
    """Whether such differences can be rounding errors alone."""
    worst, mean = found
    return worst <= EXACT if dtype == torch.float32 else mean <= ROUNDED


def slots_of(prompts: Prompts) -> int:
    """Slots of states that `steps` needs."""
    return len(prompts.tokens) + 1


def blocks_of(prompts: Prompts, block_size: int) -> int:
    """Blocks that `steps` needs."""
    return sum(-(-len(tokens) // block_size) for tokens in prompts.tokens) + 1


def steps(
    prompts: list[NDArray[np.int64]], placing: Placing
) -> list[tuple[Step, NDArray[np.int64], list[tuple[int, int]]]]:
    """Steps that compute all prompts side by side, in chunks and then token by token; each with the last token of each
    row, and (prompt, position) of these tokens.
    """
    size = placing.layout.block_size
    counts = [-(-len(tokens) // size) for tokens in prompts]
    order = np.random.default_rng(11).permutation(sum(counts))
    tables, used, width = [], 0, max(counts)
    for count in counts:
        tables.append(np.pad(order[used : used + count] + 1, (0, width - count)))
        used += count
    done = [0] * len(prompts)
    found = []
    while any(count < len(tokens) for count, tokens in zip(done, prompts, strict=True)):
        rows, lengths = [], []
        for row, tokens in enumerate(prompts):
            chunked = max(0, len(tokens) - DECODED - done[row])
            length = min(CHUNK, chunked) if chunked else min(1, len(tokens) - done[row])
            if length:
                rows.append(row)
                lengths.append(length)
        starts = [done[row] for row in rows]
        blocks = np.stack([tables[row] for row in rows])
        slots = np.array([[row + 1] for row in rows])
        step = Step(
            np.concatenate(
                [prompts[row][start : start + n] for row, start, n in zip(rows, starts, lengths, strict=True)]
            ),
            np.array(starts),
            np.array(lengths),
            tuple(slots if group.kind == "state" else blocks for group in placing.layout.groups),
        )
        for row, length in zip(rows, lengths, strict=True):
            done[row] += length
        found.append((step, np.cumsum(lengths) - 1, [(row, done[row] - 1) for row in rows]))
    return found
