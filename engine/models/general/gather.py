"""A batch of rows, padded on the left: the model's cache writes new KV to blocks and gives all of the rows' KV back.

    column        0 . . . . . . . . . L - 1
    row 0         - - - 0 1 2 3 4 5 6 7 8       the row's last token is in the last column
    row 1         0 1 2 3 4 5 6 7 8 9 10 11     queries are the last T columns; what a shorter row has there before its
                                    ^ queries   own tokens is computed for nothing, and not written

Masks are transformers' own; a mask of the columns that have tokens says where the padding is. States are copied from
their slots before, and written back after.

Where even that doesn't suit a model, a sequence is computed again from its tokens, which are kept as if they were KV.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvrelay.engine.models.general.inputs import Inputs
from kvrelay.engine.models.general.observe import cache_argument
from kvrelay.engine.models.general.places import LayerPlaces, Place
from kvrelay.engine.models.general.reading import set_attention
from kvrelay.engine.models.general.states import number_of_states
from kvrelay.engine.models.general.step import Step, UnfitError, host
from kvrelay.engine.models.general.store import Store

PADDED = 1.5
"""Largest size of a batch of chunks, padding included, relative to their tokens."""


@dataclass(eq=False)
class Batch:
    """Rows that one forward pass computes."""

    step: Step
    store: Store
    queries: int
    """Columns of queries, T."""
    columns: int
    """All columns, L."""
    written_from: NDArray[np.int64]
    """[B] first position of each row that is written."""
    positions: Tensor = field(init=False)
    """int64 [B, L] position of each column's token in its row; 0 where there is padding."""
    mask: Tensor = field(init=False)
    """int64 [B, L], 0 where there is padding."""
    _slots: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _written: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positions = np.arange(self.columns)[None] - (self.columns - self.step.contexts[:, None])
        self._positions = positions
        self.positions = host(np.maximum(positions, 0), self.store.device)
        self.mask = host((positions >= 0).astype(np.int64), self.store.device)
        kept = positions[:, self.past :] >= self.written_from[:, None]
        # [B, T] whether a query's numbers are written.
        self._kept = host(kept, self.store.device)
        rows, queries = np.nonzero(kept)
        self._written_rows, self._written_positions = rows, positions[:, self.past :][rows, queries]

    @property
    def past(self) -> int:
        """Columns before the queries."""
        return self.columns - self.queries

    def write(self, place: Place, numbers: Tensor) -> None:
        """Writes the rows' own numbers of [B, heads, T, dim]."""
        if place.track not in self._written:
            table, positions, size = self._table(place), self._written_positions, self.store.size
            blocks = host(table[self._written_rows, positions // size], self.store.device)
            self._written[place.track] = blocks, host(positions % size, self.store.device)
        self.store.write(place, self._written[place.track], numbers.transpose(1, 2)[self._kept])

    def read(self, place: Place, columns: int, dtype: torch.dtype) -> Tensor:
        """[B, heads, columns, dim] of the last columns."""
        if (place.track, columns) not in self._slots:
            positions = self._positions[:, self.columns - columns :]
            # What a mask hides, and padding, is read from the row's last token, never from memory that nobody has
            # written, or that holds another sequence's numbers.
            window = self.store.placing.layout.groups[self.store.groups[place.track]].window
            first = np.maximum(self.step.starts - window + 1, 0) if window else np.zeros_like(self.step.starts)
            positions = np.where(positions < first[:, None], self.step.contexts[:, None] - 1, positions)
            size = self.store.size
            blocks = np.take_along_axis(self._table(place), positions // size, 1)
            slots = host(blocks, self.store.device), host(positions % size, self.store.device)
            self._slots[place.track, columns] = slots
        return self.store.read(place, self._slots[place.track, columns], dtype).transpose(1, 2).contiguous()

    def _table(self, place: Place) -> NDArray[np.int64]:
        return self.step.tables[self.store.groups[place.track]]


class Gathered:
    """State and methods that all gathering layers share. Queries see all tokens, or those of the layer's window."""

    def __init__(self, places: LayerPlaces, batch: Batch, *given: int) -> None:
        """
        Args:
            given: for the class of transformers behind this one.
        """
        super().__init__(*given)
        self.places, self.batch = places, batch

    @property
    def columns(self) -> int:
        """The last columns that a query may see."""
        window = self.places.cache.window
        return min(self.batch.past, window - 1) + self.batch.queries if window else self.batch.columns

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes new keys and values [B, heads, T, dim], and reads those of the last columns."""
        if key_states.shape[0] != self.batch.mask.shape[0] or key_states.shape[2] != self.batch.queries:
            raise UnfitError(f"keys have the shape {list(key_states.shape)}")
        read = []
        for place, numbers in ((self.places.keys, key_states), (self.places.values, value_states)):
            if place is None:
                raise UnfitError("a layer has keys that it hadn't at first")
            self.batch.write(place, numbers)
            # Without a past, all that there is was just computed.
            read.append(self.batch.read(place, self.columns, numbers.dtype) if self.batch.past else numbers)
        return read[0], read[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns, self.batch.columns - self.columns

    def get_seq_length(self) -> int:
        return self.batch.past


class GatherLayer(Gathered, DynamicLayer):
    """A layer with keys and values."""


class GatherIndexedLayer(Gathered, DynamicIndexedLayer):
    """A layer that also keeps keys of an indexer."""

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        if self.places.indexer is None:
            raise UnfitError("a layer has an indexer that it hadn't at first")
        self.batch.write(self.places.indexer, indexer_key_states[:, None])
        if not self.batch.past:
            return indexer_key_states
        return self.batch.read(self.places.indexer, self.batch.columns, indexer_key_states.dtype)[:, 0]


class GatherWindowLayer(Gathered, DynamicSlidingWindowLayer):
    """As `GatherLayer`, in a class by which transformers finds the layers that have a window."""


class GatherHybridLayer(Gathered, LinearAttentionAndFullAttentionLayer):
    """A layer with states, keys and values."""


class GatherHybridWindowLayer(Gathered, LinearAttentionAndSlidingWindowAttentionLayer):
    """As `GatherHybridLayer`, with a window."""


class GatherWay:
    """Implements `Way`."""

    name = "gather"

    def __init__(
        self, model: PreTrainedModel, store: Store, team: object = None, *, whole: bool = False, single: bool = False
    ) -> None:
        """
        Args:
            whole: whether chunks of a prompt are computed from its beginning on, without a state to begin with.
            single: whether each row has a forward pass of its own.
        """
        self._model, self._store = model, store
        self._whole, self._single = whole, single
        self._argument = cache_argument(model)
        self._inputs = Inputs(model)
        self._has_states = any(layer.states for layer in store.placing.layers)
        self._has_tokens = any(layer.keys is not None for layer in store.placing.layers)

    def run(self, step: Step, wanted: NDArray[np.int64]) -> Tensor:
        """See `Way.run`."""
        set_attention(self._model, "eager")
        self._store.write_tokens(step)
        found: dict[int, Tensor] = {}
        for rows in self._batches(step):
            self._run_batch(step, rows, wanted, found)
        return torch.stack([found[int(token)] for token in wanted]) if len(wanted) else torch.empty(0, 0)

    def _batches(self, step: Step) -> list[NDArray[np.int64]]:
        """Rows of each forward pass: those of one token together, and chunks that need little padding."""
        if self._single:
            return [np.array([row]) for row in range(len(step.lengths))]
        kinds: dict[tuple[int, int], list[int]] = {}
        for row, (length, start) in enumerate(zip(step.lengths.tolist(), step.starts.tolist(), strict=True)):
            whole = self._whole and length > 1
            kinds.setdefault((start + length, -1) if whole else (length, int(start > 0)), []).append(row)
        if self._has_states:
            # Padding between a state and the next token would change the state, so chunks of a batch have one length.
            return [np.array(rows) for rows in kinds.values()]
        single = [row for row, length in enumerate(step.lengths.tolist()) if length == 1]
        batches, batch, tokens = [single] if single else [], list[int](), 0
        longest = 0
        for row in sorted(range(len(step.lengths)), key=lambda row: -step.lengths[row]):
            length = int(step.lengths[row])
            if length == 1:
                continue
            longest = longest or length
            if batch and longest * (len(batch) + 1) > PADDED * (tokens + length):
                batches.append(batch)
                batch, tokens, longest = [], 0, length
            batch.append(row)
            tokens += length
        return [np.array(rows) for rows in ([*batches, batch] if batch else batches)]

    def _run_batch(
        self, step: Step, rows: NDArray[np.int64], wanted: NDArray[np.int64], found: dict[int, Tensor]
    ) -> None:
        part, written_from = step.part(rows), step.starts[rows]
        if self._whole and int(part.lengths.max()) > 1:
            part = self._from_beginning(step, rows)
        batch = Batch(part, self._store, int(part.lengths.max()), int(part.contexts.max()), written_from)
        cache = Cache(layers=[self._layer(places, batch) for places in self._store.placing.layers])
        tokens = np.zeros((len(rows), batch.queries), np.int64)
        for row, (first, length) in enumerate(zip(part.firsts, part.lengths, strict=True)):
            tokens[row, batch.queries - length :] = part.tokens[first : first + length]
        columns: list[tuple[int, int, int]] = []
        """(row, column, token) of each wanted token."""
        for row, number in enumerate(rows.tolist()):
            first, length = int(step.firsts[number]), int(step.lengths[number])
            columns += [
                (row, batch.queries - length + int(token) - first, int(token))
                for token in wanted[(wanted >= first) & (wanted < first + length)]
            ]
        needed = sorted({column for _, column, _ in columns}) or [batch.queries - 1]
        device = self._store.device
        logits = self._inputs.call(
            host(tokens, device),
            batch.positions[:, batch.past :],
            batch.mask if self._has_tokens else None,
            torch.tensor(needed, device=device),
            {self._argument: cache},
        )
        for row, column, token in columns:
            found[token] = logits[row, needed.index(column)]
        self._keep_states(cache, batch)

    def _from_beginning(self, step: Step, rows: NDArray[np.int64]) -> Step:
        """The rows' whole sequences as one step."""
        tokens = [self._store.sequence(step, int(row)) for row in rows]
        lengths = np.array([len(one) for one in tokens])
        tables = tuple([table[rows] for table in step.tables])
        return Step(np.concatenate(tokens), np.zeros_like(lengths), lengths, tables)

    def _layer(self, places: LayerPlaces, batch: Batch) -> DummyLayer | LinearAttentionLayer | DynamicLayer:
        window = (places.cache.window,) if places.cache.window else ()
        if not places.states:
            if places.keys is None:
                return DummyLayer()
            if places.indexer is not None:
                return GatherIndexedLayer(places, batch)
            return (GatherWindowLayer if window else GatherLayer)(places, batch, *window)
        count = number_of_states(places)
        layer: LinearAttentionLayer
        if places.keys is None:
            layer = LinearAttentionLayer(count)
        else:
            layer = (GatherHybridWindowLayer if window else GatherHybridLayer)(places, batch, *window, count)
        if batch.step.starts[0] > 0:
            for place in places.states:
                number = place.state.number
                state = self._store.state(place, self._state_slots(place.track, batch))
                getattr(layer, place.state.name)[number] = state
                layer.has_previous_state[number] = True
                layer.dtype, layer.device = state.dtype, state.device
                if place.state.name == "conv_states":
                    layer.is_conv_states_initialized[number] = True
                    layer.conv_kernel_size[number] = state.shape[-1]
                else:
                    layer.is_recurrent_states_initialized[number] = True
        return layer

    def _keep_states(self, cache: Cache, batch: Batch) -> None:
        for places, layer in zip(self._store.placing.layers, cache.layers, strict=True):
            for place in places.states:
                state = getattr(layer, place.state.name)[place.state.number]
                if state is None or state.shape[1:] != place.state.shape:
                    raise UnfitError(f"a state has another shape than {list(place.state.shape)}")
                self._store.set_state(place, self._state_slots(place.track, batch), state)

    def _state_slots(self, track: int, batch: Batch) -> Tensor:
        return host(batch.step.tables[self._store.groups[track]][:, 0], self._store.device)


class AgainWay:
    """Implements `Way` without a cache: each step computes the whole of each sequence."""

    name = "again"

    def __init__(self, model: PreTrainedModel, store: Store, team: object = None) -> None:
        self._model, self._store = model, store
        self._inputs = Inputs(model)

    def run(self, step: Step, wanted: NDArray[np.int64]) -> Tensor:
        """See `Way.run`."""
        set_attention(self._model, "eager")
        self._store.write_tokens(step)
        device = self._store.device
        found = []
        for row, (first, start, length) in enumerate(
            zip(step.firsts.tolist(), step.starts.tolist(), step.lengths.tolist(), strict=True)
        ):
            own = wanted[(wanted >= first) & (wanted < first + length)] - first + start
            if not len(own):
                continue
            tokens = host(self._store.sequence(step, row), device)[None]
            positions = torch.arange(tokens.shape[1], device=device)[None]
            found.append(self._inputs.call(tokens, positions, None, host(own, device), {})[0])
        return torch.cat(found) if found else torch.empty(0, 0)
