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
from kvrelay.engine.kv.layout import CacheLayout, FloatDtype, KVLayout, LayerGroup
from kvrelay.engine.kv.pool import TORCH_DTYPES, KVPool, fields
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import PromptPart, StepOutput, StepPlan, TokenLogprobs, kept_of
from kvrelay.engine.ranks.collective import Place
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
STATE_LAYOUT = KVLayout(layers=3, kv_heads=1, head_dim=64, block_size=1, dtype="raw", planes=1)
POISON = b"a window or a state is not what the first group's bytes say"


def window_of(tokens: int, layout: KVLayout = LAYOUT) -> LayerGroup:
    """A group of layers that see the last `tokens` tokens."""
    return LayerGroup("window", (layout,), tokens)


STATE = LayerGroup("state", (STATE_LAYOUT,))


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
    expert_loads = None

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout = LAYOUT,
        spec: ModelSpec | None = None,
        *,
        lag: int = 0,
        sides: Sequence[tuple[LayerGroup, int]] = (),
    ) -> None:
        """
        Args:
            lag: with 1, a step is computed when its result is asked for.
            sides: layer groups behind the first, with the blocks, or slots, of each.
        """
        self.lag = lag
        self.spec = hash_spec() if spec is None else spec
        self.layout = layout
        self.pool = KVPool(layout, num_blocks)
        memory = self.pool.bytes.numpy()
        # Noise, as in memory that others have used.
        memory[...] = np.random.default_rng(num_blocks).integers(0, 256, memory.shape, np.uint8)
        self.parts = _by_slot(self.pool)
        """Views [block, slot, layer, k|v, head, bytes] of the pool: numbers and, if there are any, their scales."""
        self.cache_layout = CacheLayout(
            (LayerGroup("full", (layout,)), *[group for group, _ in sides]), layout.block_size
        )
        self.whole_cache_layout = self.cache_layout
        self.pools = (self.pool, *[KVPool(group.tracks[0], blocks) for group, blocks in sides])
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
        self._copy_slots(plan, before=True)
        offsets = np.cumsum(plan.lengths) - plan.lengths
        for row, (offset, start, length) in enumerate(zip(offsets, plan.starts, plan.lengths, strict=True)):
            tokens = plan.tokens[offset : offset + length].tolist()
            if plan.drafts is not None and plan.drafts[row]:
                self._copy_states(plan, row - 1, row)
            self.fill(plan.block_tables[row], tokens, int(start), [table[row] for table in plan.side_tables])
        rows = np.flatnonzero(plan.sample)
        digests = [self._digest(plan, row, int(plan.starts[row] + plan.lengths[row])) for row in rows]
        choice = choose_tokens(digests, draws_of(plan, rows), self.spec.vocab_size)
        logprobs = tuple([self._prompt_logprobs(plan, part) for part in plan.prompt_parts])
        self._copy_slots(plan, before=False)
        out = step_output(plan, rows, choice, logprobs)
        if plan.drafts is not None:
            own, kept = 0, kept_of(plan, out)
            for row, draft in enumerate(plan.drafts):
                own = own if draft else row
                if draft and kept[row]:
                    self._copy_states(plan, row, own)
        return dataclasses.replace(out, states=self._states(plan))

    def _states(self, plan: StepPlan) -> Tensor | None:
        ends = np.cumsum(plan.lengths)
        parts = [
            hash_states(plan.tokens[end - length : end].tolist(), int(start), plan.keep)
            for start, length, end in zip(plan.starts, plan.lengths, ends, strict=True)
            if plan.keep
        ]
        return torch.cat(parts) if parts else None

    def _digest(self, plan: StepPlan, row: int, num_tokens: int) -> bytes:
        held = np.ascontiguousarray(self.held_bytes(plan.block_tables[row], num_tokens))
        sound = all(
            self._side_holds(number, table[row], held, 0) for number, table in enumerate(plan.side_tables, start=1)
        )
        return xxhash.xxh3_64_digest(held if sound else held.tobytes() + POISON)

    def _side_holds(self, number: int, table: Sequence[int] | NDArray[np.int32], held: Bytes, behind: int) -> bool:
        """Whether a group has what a token needs that is so many tokens behind those with the KV `held`: the last of
        them itself, or the next one."""
        group, pool = self.cache_layout.groups[number], self.pools[number]
        if group.kind == "state":
            return np.array_equal(pool.bytes.numpy()[table[0]], _state_after(held, None))
        first = max(0, len(held) + behind - group.window)
        return np.array_equal(_held(_by_slot(pool), table, first, len(held), pool.layout.block_size), held[first:])

    def sides_hold(self, tables: Sequence[Sequence[int]], num_tokens: int) -> bool:
        """Whether the groups behind the first have what a token behind the first `num_tokens` ones needs.

        Args:
            tables: of all groups, as `Hold.tables`.
        """
        held = np.ascontiguousarray(self.held_bytes(tables[0], num_tokens))
        return all(self._side_holds(number, table, held, 1) for number, table in enumerate(tables[1:], start=1))

    def _copy_slots(self, plan: StepPlan, *, before: bool) -> None:
        for copy in plan.copies:
            if copy.before == before:
                memory = self.pools[copy.group].bytes
                memory[copy.target] = memory[copy.source]

    def _copy_states(self, plan: StepPlan, source: int, target: int) -> None:
        """Copies the states of a plan's row to another row's slots."""
        for group, pool, table in zip(self.cache_layout.side_groups, self.pools[1:], plan.side_tables, strict=True):
            if group.kind == "state":
                pool.bytes[table[target, 0]] = pool.bytes[table[source, 0]]

    def _prompt_logprobs(self, plan: StepPlan, part: PromptPart) -> tuple[TokenLogprobs, ...]:
        ends = range(part.first, part.first + len(part.targets))
        logits = _logits([self._digest(plan, part.row, end) for end in ends], self.spec.vocab_size)
        return tuple(Scores(logits, torch.from_numpy(part.targets.astype(np.int64)), [part.top] * len(ends)).read())

    def fill(
        self,
        blocks: Sequence[int] | NDArray[np.int32],
        tokens: Sequence[int],
        first_position: int,
        side_tables: Sequence[Sequence[int] | NDArray[np.int32]] = (),
    ) -> None:
        """Writes the KV of consecutive tokens through the block tables, as computing them does; of no further group if
        its table isn't given."""
        data = self._kv_of(tokens, first_position)
        _write(self.parts, blocks, data, first_position, self.layout.block_size)
        for group, pool, table in zip(self.cache_layout.side_groups, self.pools[1:], side_tables, strict=False):
            if group.kind == "state":
                slot = pool.bytes.numpy()[table[0]]
                slot[...] = _state_after(data, slot if first_position else None)
            else:
                # What comes from another worker has no blocks before the window.
                size = pool.layout.block_size
                gap = int(np.argmax(np.asarray(table) >= 0)) * size
                first = max(0, gap - first_position)
                _write(_by_slot(pool), table, data[first:], first_position + first, size)

    def _kv_of(self, tokens: Sequence[int], first_position: int) -> NDArray[np.uint8]:
        """The part of `kv_bytes` that the pool holds."""
        return kv_bytes(tokens, first_position, self.layout)

    def held_bytes(self, blocks: Sequence[int] | NDArray[np.int32], num_tokens: int) -> NDArray[np.uint8]:
        """The KV of a sequence's first tokens as it is in the pool, in the shape of `kv_bytes`."""
        return _held(self.parts, blocks, 0, num_tokens, self.layout.block_size)

    def holds_kv_of(self, blocks: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether the pool has the KV of exactly these tokens in `blocks`."""
        return np.array_equal(self.held_bytes(blocks, len(tokens)), kv_bytes(tokens, 0, self.layout))


class RankHashRunner(HashRunner):
    """A rank of the hash model: its pool has the rank's layers and heads only. A token depends on the KV bytes of all
    ranks, so a wrong byte at one of them changes it."""

    def __init__(self, place: Place, num_blocks: int, layout: KVLayout, spec: ModelSpec, *, lag: int = 0) -> None:
        """`layout` is that of the whole model."""
        self.place = place
        self.whole = layout
        degree = place.degree
        self._slices = [
            (degree.layers(rank, layout.layers), degree.kv_heads(rank, layout.kv_heads)) for rank in range(degree.ranks)
        ]
        """Layers and heads of each rank."""
        layers, heads = self._slices[place.rank]
        super().__init__(
            num_blocks, dataclasses.replace(layout, layers=len(layers), kv_heads=len(heads)), spec, lag=lag
        )
        self.whole_cache_layout = CacheLayout.of(layout)

    def _kv_of(self, tokens: Sequence[int], first_position: int) -> NDArray[np.uint8]:
        layers, heads = self._slices[self.place.rank]
        data = kv_bytes(tokens, first_position, self.whole)
        return data[:, layers.start : layers.stop, :, heads.start : heads.stop]

    def held_bytes(self, blocks: Sequence[int] | NDArray[np.int32], num_tokens: int) -> NDArray[np.uint8]:
        """The KV of all ranks, as `HashRunner.held_bytes`. All ranks call it."""
        own = np.ascontiguousarray(super().held_bytes(blocks, num_tokens))
        parts = self.place.all.gather(torch.from_numpy(own)).numpy()
        whole = self.whole
        held = np.empty((num_tokens, whole.layers, 2, whole.kv_heads, whole.head_bytes), np.uint8)
        for part, (layers, heads) in zip(parts, self._slices, strict=True):
            held[:, layers.start : layers.stop, :, heads.start : heads.stop] = part
        return held


def _by_slot(pool: KVPool) -> list[Bytes]:
    """Views [block, slot, layer, k|v, head, bytes] of a pool: numbers and, if there are any, their scales."""
    layout = pool.layout
    return [np.moveaxis(part, 3 if layout.order == "NHD" else 4, 1) for part in fields(pool.bytes.numpy(), layout)]


def _write(
    parts: list[Bytes], blocks: Sequence[int] | NDArray[np.int32], data: Bytes, first_position: int, size: int
) -> None:
    positions = np.arange(first_position, first_position + len(data))
    where = np.asarray(blocks)[positions // size]
    for part in parts:
        part[where, positions % size] = data[..., : part.shape[-1]]
        data = data[..., part.shape[-1] :]


def _held(
    parts: list[Bytes], blocks: Sequence[int] | NDArray[np.int32], first: int, end: int, size: int
) -> NDArray[np.uint8]:
    """The KV of tokens [first, end) of a sequence, in the shape of `kv_bytes`."""
    used = np.asarray(blocks, np.int64)[first // size : -(-end // size)]
    slots = np.concatenate([part[used] for part in parts], -1)
    before = first // size * size
    return slots.reshape(-1, *slots.shape[2:])[first - before : end - before]


def _state_after(kv: Bytes, state: Bytes | None) -> Bytes:
    """A state [layer, 1, bytes] behind tokens with this KV; `state` is that before them, None if there are none."""
    shape = STATE_LAYOUT.layers, 1, STATE_LAYOUT.head_dim
    now = bytes(np.prod(shape)) if state is None else state.tobytes()
    for token in kv:
        seed = xxhash.xxh3_64_intdigest(now + token.tobytes())
        now = _mix(np.arange(len(now) // 8, dtype=np.uint64) + np.uint64(seed)).tobytes()
    return np.frombuffer(now, np.uint8).reshape(shape)


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
