"""The hash model: a runner whose output shows every wrong byte of KV.

The KV of a token is pseudo-random bytes of (token, position, layer), and the logits of the next token are noise from a
hash of all KV bytes of the sequence, read through its block table. So one wrong, stale or swapped byte changes every
later token, and `expected_tokens` says what an undisturbed run yields. Sampled tokens are drawn by the engine's own
sampler. A greedy row takes some ten microseconds.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.attention.base import CPU
from kvrelay.engine.kv.layout import FloatDtype, KVLayout
from kvrelay.engine.kv.pool import TORCH_DTYPES, KVPool, fields
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import PromptPart, StepOutput, StepPlan, TokenLogprobs
from kvrelay.engine.request import FinishReason, Request, SamplingParams
from kvrelay.engine.runner.base import FinishedStep, StepHandle
from kvrelay.engine.runner.fetches import Fetches
from kvrelay.engine.sampling.logprobs import Scores
from kvrelay.engine.sampling.sampler import Choice, Draw, choose, draws_of, sample, step_output
from kvrelay.engine.shaping import Shaping
from kvrelay.engine.states import StatesShape
from support.late_writes import LateWrites

VOCAB_SIZE = 251
LOGITS = 4.0
"""The largest logit; the smallest is about 0."""
GREEDY = SamplingParams(temperature=0.0)
STATES_WIDTH = 16
Bytes = NDArray[np.uint8]
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=4, block_size=8, dtype="float32")


def hash_spec(max_context: int = 256, vocab_size: int = VOCAB_SIZE) -> ModelSpec:
    return ModelSpec(
        architecture="HashModel",
        vocab_size=vocab_size,
        max_context=max_context,
        eos_token_ids=(),
        dtype="float32",
        fingerprint=f"hash-{vocab_size}",
        weights="float32",
    )


def kv_bytes(tokens: Sequence[int], first_position: int, layout: KVLayout = LAYOUT) -> Bytes:
    """The KV of consecutive tokens: uint8 [token, layer, k|v, head, bytes of a head], scales included."""
    return _kv_bytes_at(tokens, np.arange(first_position, first_position + len(tokens)), layout)


def _kv_bytes_at(tokens: Sequence[int], positions: Sequence[int] | NDArray[np.int64], layout: KVLayout) -> Bytes:
    head_bytes = layout.head_bytes
    layer_bytes = 2 * layout.kv_heads * head_bytes
    words = -(-layer_bytes // 8)
    token = np.asarray(tokens, np.uint64)[:, None, None]
    position = np.asarray(positions, np.uint64)[:, None, None]
    layer = np.arange(layout.layers, dtype=np.uint64)[None, :, None]
    word = np.arange(words, dtype=np.uint64)[None, None, :]
    seed = (((token << np.uint64(24)) + position << np.uint64(8)) + layer << np.uint64(12)) + word
    raw = _mix(_mix(seed)).view(np.uint8).reshape(len(tokens), layout.layers, words * 8)[:, :, :layer_bytes]
    return raw.reshape(len(tokens), layout.layers, 2, layout.kv_heads, head_bytes)


def hash_states(tokens: Sequence[int], first_position: int, layers: Sequence[int]) -> Tensor:
    """float32 [token, layers, STATES_WIDTH] the hidden states of consecutive tokens: ids, positions and layers."""
    positions = torch.arange(first_position, first_position + len(tokens))
    states = torch.empty(len(tokens), len(layers), STATES_WIDTH)
    states[:, :, 0] = torch.tensor(tokens)[:, None]
    states[:, :, 1] = positions[:, None]
    states[:, :, 2] = torch.tensor(layers)
    states[:, :, 3:] = ((states[:, :, 0] * 31 + states[:, :, 1] * 7 + states[:, :, 2]) % 8191)[:, :, None]
    return states


def expected_tokens(
    prompt: Sequence[int],
    n: int,
    layout: KVLayout = LAYOUT,
    vocab_size: int = VOCAB_SIZE,
    sampling: SamplingParams = GREEDY,
) -> list[int]:
    """The `n` tokens that the hash model yields after `prompt`."""
    return tokens_of_all([Case(prompt, n, sampling)], layout, vocab_size)[0]


class Case(NamedTuple):
    """A request to the hash model."""

    prompt: Sequence[int]
    count: int
    """Tokens to generate."""
    sampling: SamplingParams = GREEDY


def tokens_of_all(cases: Sequence[Case], layout: KVLayout = LAYOUT, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """The tokens that the hash model yields for each case. Side by side, a token takes a tenth of the time."""
    states = [xxhash.xxh3_64(kv_bytes(case.prompt, 0, layout).tobytes()) for case in cases]
    shapings = [Shaping(case.sampling, case.prompt, (), None) if case.sampling.shaped else None for case in cases]
    found: list[list[int]] = [[] for _ in cases]
    for done in range(max([case.count for case in cases], default=0)):
        rows = [row for row, case in enumerate(cases) if done < case.count]
        positions = [len(cases[row].prompt) + done for row in rows]
        draws = [
            Draw(cases[row].sampling, position, done, shapings[row])
            for row, position in zip(rows, positions, strict=True)
        ]
        tokens = choose_tokens([states[row].digest() for row in rows], draws, vocab_size).tokens
        for row, token, kv in zip(rows, tokens, _kv_bytes_at(tokens, positions, layout), strict=True):
            found[row].append(token)
            states[row].update(kv.tobytes())
            if (shaping := shapings[row]) is not None:
                shaping.push(token)
    return found


def expected_outcome(request: Request, max_context: int) -> tuple[list[int], FinishReason]:
    """The tokens after `request.tokens` and the reason for the last, by the rules of a request's end."""
    sampling = request.sampling
    done = len(request.tokens) - request.prompt_tokens
    most = min(sampling.max_tokens - done, max_context - len(request.tokens))
    tokens = expected_tokens(request.tokens, most)
    for count, token in enumerate(tokens, start=1):
        if token in sampling.stop_token_ids and done + count >= sampling.min_tokens:
            return tokens[:count], FinishReason.STOP
    return tokens, FinishReason.LENGTH


class HashRunner:
    """A `kvrelay.engine.runner.base.Runner`. `steps` counts what it ran."""

    prefill_attention = ""

    def __init__(
        self, num_blocks: int, layout: KVLayout = LAYOUT, spec: ModelSpec | None = None, *, lag: int = 0
    ) -> None:
        """
        Args:
            lag: with 1, a step is computed when its result is asked for.
        """
        self.lag = lag
        self.spec = hash_spec() if spec is None else spec
        self.layout = layout
        self.pool = KVPool(layout, num_blocks)
        memory = self.pool.bytes.numpy()
        # Noise, as in memory that others have used.
        memory[...] = np.random.default_rng(num_blocks).integers(0, 256, memory.shape, np.uint8)
        self.parts = [np.moveaxis(part, 3 if layout.order == "NHD" else 4, 1) for part in fields(memory, layout)]
        """Views [block, slot, layer, k|v, head, bytes] of the pool: numbers and, if there are any, their scales."""
        self.steps = 0
        self.states_shape: StatesShape | None = StatesShape(layout.layers, STATES_WIDTH)
        self._last: HashStep | None = None
        self._fetches = Fetches(CPU)

    def fetch(
        self, states: Tensor, places: tuple[int, ...], dtype: FloatDtype, then: Callable[[Tensor], object]
    ) -> None:
        if self.lag:
            self._fetches.fetch(states, places, TORCH_DTYPES[dtype], then)
        else:
            then(states[:, list(places)].to(TORCH_DTYPES[dtype]))

    def warm_up(self, keep: tuple[int, ...] = ()) -> None:
        pass

    def launch(self, plan: StepPlan) -> StepHandle:
        if not self.lag:
            return FinishedStep(self.run(plan))
        self._last = HashStep(self, plan, self._last)
        return self._last

    def run(self, plan: StepPlan) -> StepOutput:
        """Computes a plan whose tokens are all known."""
        check_plan(plan, self.layout.block_size, self.pool.num_blocks)
        self.steps += 1
        offsets = np.cumsum(plan.lengths) - plan.lengths
        for row, (offset, start, length) in enumerate(zip(offsets, plan.starts, plan.lengths, strict=True)):
            self.fill(plan.block_tables[row], plan.tokens[offset : offset + length].tolist(), int(start))
        rows = np.flatnonzero(plan.sample)
        digests = [self._digest(plan, row, int(plan.starts[row] + plan.lengths[row])) for row in rows]
        choice = choose_tokens(digests, draws_of(plan, rows), self.spec.vocab_size)
        logprobs = tuple([self._prompt_logprobs(plan, part) for part in plan.prompt_parts])
        return dataclasses.replace(step_output(plan, rows, choice, logprobs), states=self._states(plan))

    def _states(self, plan: StepPlan) -> Tensor | None:
        ends = np.cumsum(plan.lengths)
        parts = [
            hash_states(plan.tokens[end - length : end].tolist(), int(start), plan.keep)
            for start, length, end in zip(plan.starts, plan.lengths, ends, strict=True)
            if plan.keep
        ]
        return torch.cat(parts) if parts else None

    def _digest(self, plan: StepPlan, row: int, num_tokens: int) -> bytes:
        return xxhash.xxh3_64_digest(np.ascontiguousarray(self.held_bytes(plan.block_tables[row], num_tokens)))

    def _prompt_logprobs(self, plan: StepPlan, part: PromptPart) -> tuple[TokenLogprobs, ...]:
        ends = range(part.first, part.first + len(part.targets))
        logits = _logits([self._digest(plan, part.row, end) for end in ends], self.spec.vocab_size)
        return tuple(Scores(logits, torch.from_numpy(part.targets.astype(np.int64)), [part.top] * len(ends)).read())

    def fill(self, blocks: Sequence[int] | NDArray[np.int32], tokens: Sequence[int], first_position: int) -> None:
        """Writes the KV of consecutive tokens through a block table, as computing them does."""
        positions = np.arange(first_position, first_position + len(tokens))
        size = self.layout.block_size
        where = np.asarray(blocks)[positions // size]
        data = kv_bytes(tokens, first_position, self.layout)
        for part in self.parts:
            part[where, positions % size] = data[..., : part.shape[-1]]
            data = data[..., part.shape[-1] :]

    def held_bytes(self, blocks: Sequence[int] | NDArray[np.int32], num_tokens: int) -> NDArray[np.uint8]:
        """The KV of a sequence's first tokens as it is in the pool, in the shape of `kv_bytes`."""
        used = np.asarray(blocks, np.int64)[: -(-num_tokens // self.layout.block_size)]
        slots = np.concatenate([part[used] for part in self.parts], -1)
        return slots.reshape(-1, *slots.shape[2:])[:num_tokens]

    def holds_kv_of(self, blocks: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether the pool has the KV of exactly these tokens in `blocks`."""
        return np.array_equal(self.held_bytes(blocks, len(tokens)), kv_bytes(tokens, 0, self.layout))


class HashStep:
    """A step that is computed when its result is asked for: as late as a device may."""

    def __init__(self, runner: HashRunner, plan: StepPlan, before: "HashStep | None") -> None:
        self._runner = runner
        self._plan = plan
        self._before = before
        self.out: StepOutput | None = None
        self.written = LateWrites()

    def result(self) -> StepOutput:
        assert self.out is None, "asked twice"
        plan = self._plan
        if plan.feeds is not None and (plan.feeds >= 0).any():
            assert self._before is not None
            assert self._before.out is not None, "steps are computed in order"
            tokens = plan.tokens.copy()
            first = np.cumsum(plan.lengths) - plan.lengths
            for row in np.flatnonzero(plan.feeds >= 0):
                assert plan.lengths[row] == 1
                assert tokens[first[row]] == 0
                token = self._before.out.tokens[plan.feeds[row]]
                assert token is not None, "fed by a row that yields no token"
                tokens[first[row]] = token
            plan = dataclasses.replace(plan, tokens=tokens)
        self.out = self._runner.run(plan)
        self._before = None
        self.written.end()
        return self.out


def check_plan(plan: StepPlan, block_size: int, num_blocks: int) -> None:
    """Asserts what `StepPlan` promises."""
    rows = plan.num_rows
    assert rows > 0
    drafts = np.zeros(rows, bool) if plan.drafts is None else plan.drafts
    assert len(set(plan.handles)) == rows - drafts.sum()
    assert rows == len(plan.handles) == len(plan.sampling)
    for row in np.flatnonzero(drafts):
        assert plan.handles[row] == plan.handles[row - 1]
        assert plan.starts[row] == plan.starts[row - 1] + plan.lengths[row - 1]
        assert plan.lengths[row] == 1
        assert plan.sample[row - 1]
        assert plan.sample[row]
    assert plan.starts.shape == plan.lengths.shape == plan.sample.shape == plan.generated.shape == (rows,)
    assert plan.lengths.min() >= 1
    assert plan.starts.min() >= 0
    assert plan.num_tokens == plan.lengths.sum()
    for array in (plan.tokens, plan.starts, plan.lengths, plan.generated, plan.block_tables):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
    used = -(-(plan.starts + plan.lengths) // block_size)
    assert plan.block_tables.shape[0] == rows
    assert plan.block_tables.shape[1] >= used.max()
    assert plan.block_tables.min() >= 0
    assert plan.block_tables.max() < num_blocks


def _logits(digests: Sequence[bytes], vocab_size: int) -> Tensor:
    """float32 [R, V] that follow from digests; the largest is at (digest modulo vocabulary)."""
    numbers = np.array([int.from_bytes(digest, "little") for digest in digests], np.uint64)
    noise = _mix(numbers[:, None] + np.arange(vocab_size, dtype=np.uint64)) >> np.uint64(40)
    logits = torch.from_numpy(noise.astype(np.float32) * np.float32(LOGITS / 2**24))
    logits[range(len(numbers)), (numbers % np.uint64(vocab_size)).astype(np.int64)] = LOGITS
    return logits


def choose_tokens(digests: Sequence[bytes], draws: Sequence[Draw], vocab_size: int) -> Choice:
    """The token of each row. A greedy one of which nothing else is asked needs no logits, and its `min_tokens` forbid
    nothing, whatever rows are beside it."""
    plain = [not draw.shaping and draw.params.greedy and draw.params.logprobs is None for draw in draws]
    draws = [
        draw._replace(generated=max(draw.generated, draw.params.min_tokens)) if alone else draw
        for draw, alone in zip(draws, plain, strict=True)
    ]
    if all(plain):
        return Choice([int.from_bytes(digest, "little") % vocab_size for digest in digests], [], {}, None)
    return choose(_logits(digests, vocab_size), draws, sample)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every input bit moves every output bit."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
