"""The decoder as a program of native CPU kernels, recorded once: computes what `Decoder` does, in float32.

A layer is six instructions:

    qkv        norm of residual, projection, bias
    write      norm and rotation of queries and keys; keys and values into the pool
    attention
    output     projection, added to residual
    mlp        norm of residual, gate and up, silu(gate) * up
    down       projection, added to residual

In a layer with experts, these are in the place of the last two:

    norm
    router     scores of all experts
    route      the chosen ones of each row, and their shares
    sort       pairs of a row and an expert, by experts
    up, down   products of each expert with its pairs
    combine    sum of a row's results, added to residual
    mlp, down  of an MLP that computes all rows, if there is one

Few models have layer norms, or norms behind projections: these are instructions of their own (`native/norm.h`).

Behind the layers, a step that only chooses tokens has the last norm, the head, the choice and, if it goes on with what
it has chosen, the beginning of the next pass (`native/passes.h`).

Where ranks share the layers, the output and down projections store what this rank has of their results, and the sum of
all ranks' parts is added to the residual: by an instruction if the ranks share memory, else between two programs. Ranks
with whole experts may exchange rows instead (`dispatch.py`), between programs too: then there are two lists of
programs, and each step takes one of them.

Activations are float32 whatever the type of weights and KV. Their buffers are kept and grow to the largest step.
"""

import ctypes
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.costs.exchange import Exchange, ExchangeCosts, ExchangeShape
from kvrelay.engine.attention.base import Attention
from kvrelay.engine.attention.native import NativeAttention
from kvrelay.engine.config import ExpertExchange
from kvrelay.engine.models.fast.decoder import NO_TAPS, Layer, Norm, Taps, Weights, tap
from kvrelay.engine.models.fast.dispatch import Dispatch
from kvrelay.engine.models.fast.spares import SpareExperts
from kvrelay.engine.models.loads import ExpertLoads
from kvrelay.engine.models.reading.config import ModelConfig, undispatched
from kvrelay.engine.models.reading.experts import ExpertsTraits
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.ranks.collective import ALONE, Place
from kvrelay.engine.ranks.shared import SharedMemoryCollective
from kvrelay.engine.ranks.spans import even_span
from kvrelay.engine.sampling.native import pack_draws
from kvrelay.engine.sampling.sampler import Draw
from kvrelay.kernels.cpu.experts import Gate, PackedExperts, Pairs, route_floats, route_step
from kvrelay.kernels.cpu.packed import (
    BLOCK,
    EMBED,
    LINEAR,
    NORM,
    SQUARES,
    Arena,
    EmbedArgs,
    Epilogue,
    LinearArgs,
    NormArgs,
    PackedLinear,
    rows_of,
)
from kvrelay.kernels.cpu.passes import FOLLOW, GATHER, PassArgs
from kvrelay.kernels.cpu.program import Buffer, Program, Team
from kvrelay.kernels.cpu.reduce import ALL_REDUCE, ReduceArgs
from kvrelay.kernels.cpu.sample import SAMPLE, SampleArgs, workspace_floats
from kvrelay.kernels.ops import Linear

logger = logging.getLogger(__name__)

MEASURED_ROWS = (1, 16, 64, 256)
"""Rows of the steps by which the costs of both ways of exchanging experts' rows are measured."""
MEASURED_TIMES = 4
"""Times that each of them is measured."""
Step = tuple[str, ctypes.Structure]
"""Name of a kernel and its arguments."""


def fits(config: ModelConfig) -> bool:
    """Whether the kernels support a model's shape: its gate and up projections must end at a block's border."""
    experts = config.traits.experts
    if experts is not None and experts.dense_layers == 0:
        return True
    return not config.traits.gated or config.intermediate_size % BLOCK == 0


@dataclass(frozen=True, slots=True)
class _Tap:
    """A pause of the program in front of a layer."""

    layer: int


@dataclass(frozen=True, slots=True)
class _Sum:
    """A pause of the program, in which all ranks' `part` are added up."""

    part: Tensor
    out: Tensor
    width: int
    add: bool
    """Whether the sum is added to `out`, and doesn't replace it."""


@dataclass(frozen=True, slots=True)
class _Move:
    """A pause of the program, in which rows are exchanged with other ranks."""

    move: Literal["scatter", "send", "collect"]
    """The call of `Dispatch`."""
    layer: int
    """Number of the layer among those with experts."""


Pause = _Sum | _Move | _Tap


class NativeDecoder:
    """A model, or what one rank has of it, ready to run. Not thread-safe."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        attention: NativeAttention,
        team: Team,
        place: Place = ALONE,
        exchange: ExpertExchange = "auto",
    ) -> None:
        """
        Args:
            config: of what this rank computes.
            weights: with linear layers made by `kernels.cpu.packed.packer(team)`.
            place: of the rank.
            exchange: the way in which ranks with whole experts exchange rows; `auto` sums until `measure` was called.

        Raises:
            ValueError: the rank is of the first pipeline stage, and the weights have no head or no norm before it; or
                rows can't be exchanged in the way that `exchange` names.
        """
        if place.stage == 0 and (weights.norm is None or weights.head is None):
            raise ValueError("the weights have no head or no norm before it")
        self.config = config
        self.place = place
        self._vocabulary = even_span(config.vocab_size, place)
        self._group = group = place.group
        self._shared = group if isinstance(group, SharedMemoryCollective) else None
        # Rows of a tied embedding are looked up in the packed head, so it is held once.
        self._embedding = None if config.tie_embeddings else weights.embedding
        self._layers = tuple(map(_with_float_norms, weights.layers))
        attention.turn_by(weights.rotary)
        self._rotations = [config.distinct_ropes.index(rope) for rope in config.ropes]
        self._attention = attention
        self._team = team
        self._exchange = exchange
        self._costs: ExchangeCosts | None = None
        why = self._undispatched()
        if exchange == "all_to_all" and why:
            raise ValueError(f"expert_exchange is all_to_all; allowed: auto, all_reduce, because {why}")
        self.expert_loads = self._make_loads()
        """Loads of the experts; None without layers of experts."""
        self._dispatches = not why and exchange != "all_reduce" and self.expert_loads is not None
        self._spares = self._make_spares(self.expert_loads)
        norm = weights.norm
        self._norm = None if norm is None else norm.weight.float()
        self._last_norm = None if norm is None else norm.times(config.traits.logits_scale, torch.float32)
        gates = {"silu": Epilogue.SILU_MUL, "gelu_tanh": Epilogue.GELU_MUL}
        self._activation = gates[config.activation] if config.traits.gated else Epilogue.GELU
        self._head = None if weights.head is None else _packed(weights.head)
        self._rows = ctypes.c_int64()
        self._tokens = ctypes.c_void_p()
        self._cuts: tuple[int, ...] = ()
        """Layers, in ascending order, in front of which a program of its own begins."""
        self._numbers, self._largest = Buffer(np.int64), Buffer(np.float32)
        """Buffers of a step that chooses: its tokens, the places of the rows' last tokens, and the chosen tokens; and
        the largest logit of each choice."""
        self._packed = Buffer(np.uint8)
        self._passes = ctypes.c_int64()
        self._pass_args = PassArgs(
            rows=ctypes.addressof(self._rows),
            tokens=ctypes.addressof(self._tokens),
            passes=ctypes.addressof(self._passes),
            step=attention.step,
            width=config.hidden_size,
        )
        self._choosing: Program | None = None
        """Layers and all that is behind them; None until it is recorded anew, with new buffers."""
        self._head_input: Tensor | None = None
        """[rows, hidden] normed input of the head, for layer norms."""
        self._record(64)
        self._logits_capacity = 0
        if self._head is None:
            return
        self._sample_args = SampleArgs(rows=ctypes.addressof(self._rows), width=self._head.outputs)
        self._pass_args.sample = ctypes.addressof(self._sample_args)
        self._sample_space = torch.empty(workspace_floats(team.threads, self._head.outputs))
        self._sample_args.workspace = self._sample_space.data_ptr()
        self._make_logits(self._head, 1)

    @property
    def embedding(self) -> Tensor | None:
        """As `Decoder.embedding`."""
        return self._embedding

    @property
    def norm(self) -> Tensor:
        """As `Decoder.norm`."""
        if self._norm is None:
            raise ValueError(f"the norm before the head is on another stage than {self.place.stage}")
        return self._norm

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention, *, taps: Taps = NO_TAPS) -> Tensor:
        """As `Decoder.forward`; returns float32 [T, hidden], valid until the next call.

        Args:
            attention: the one that this was made with; the recorded program calls its kernels.

        Raises:
            CollectiveError: another rank didn't take part.
        """
        count, last = len(tokens), self.config.first_layer + self.config.layers
        # A program stays cut where a step needed it once: to record it anew takes longer than to run its parts.
        cuts = tuple(sorted({layer for layer in taps if layer != last}.union(self._cuts)))
        if cuts != self._cuts:
            self._cuts = cuts
            self._record(self._capacity)
        self._make_room(count)
        self._rows.value = count
        hidden = self._residual[:count, : self.config.hidden_size]
        if self._head is None:
            hidden.copy_(tokens)
        else:
            self._tokens.value = tokens.data_ptr()
        self._run(self._programs[self.exchange_of(count)], count, taps)
        tap(taps, last, hidden, self.config.traits.residual_scale)
        if self.expert_loads is not None and self.expert_loads.stepped() and self._spares is not None:
            self._spares.follow(self.expert_loads)
        return hidden

    def _run(self, programs: list[tuple[Program, Pause | None]], count: int, taps: Taps = NO_TAPS) -> None:
        """Runs programs, and what is done between them, for `count` rows."""
        if self._dispatches:
            self._dispatch.begin(count)
        for program, pause in programs:
            self._team.run(program)
            if self._shared is not None:
                self._shared.check()
            if isinstance(pause, _Sum):
                self._sum_parts(pause, count)
            elif isinstance(pause, _Tap):
                hidden = self._residual[:count, : self.config.hidden_size]
                tap(taps, pause.layer, hidden, self.config.traits.residual_scale)
            elif pause is not None:
                self._move(pause)

    def _move(self, pause: _Move) -> None:
        dispatch = self._dispatch
        if self._spares is None:
            raise ValueError("rows are exchanged, and ranks don't have whole experts")
        if pause.move == "scatter":
            dispatch.scatter(self._update, self._residual)
        elif pause.move == "send":
            dispatch.send(self._pairs, *self._spares.homes_of(pause.layer))
        else:
            dispatch.collect(self._residual)

    def exchange_of(self, count: int) -> Exchange:
        """The way in which ranks with whole experts exchange the rows of a step of `count` tokens."""
        if not self._dispatches or (self._exchange == "auto" and self._costs is None):
            return "all_reduce"
        return "all_to_all" if self._costs is None else self._costs.cheaper(count)

    @property
    def exchange_costs(self) -> ExchangeCosts | None:
        """The costs of both ways, if each step takes the cheaper one; None before `measure`."""
        return self._costs

    def _undispatched(self) -> str:
        """Why rows can't be sent to the ranks of their experts; empty if they can."""
        experts = self.config.traits.experts
        if experts is not None and (experts.held is None or self._group.size == 1):
            return "its ranks don't have whole experts (expert_parallel)"
        return undispatched(self.config)

    def _make_loads(self) -> ExpertLoads | None:
        experts = self.config.traits.experts
        layers = sum(layer.router is not None for layer in self._layers)
        if experts is None or not layers:
            return None
        held = None if experts.held is None else experts.slots
        return ExpertLoads(layers, experts.routing.experts, held, self._group, self._group.size)

    def _make_spares(self, loads: ExpertLoads | None) -> SpareExperts | None:
        """The places of the experts, if ranks have whole ones."""
        experts = self.config.traits.experts
        if experts is None or experts.held is None or loads is None:
            return None
        weights = [(_packed(layer.gate_up), _packed(layer.down)) for layer in self._layers if layer.router is not None]
        return SpareExperts(self._group, experts, weights, loads)

    def measure(self) -> None:
        """Measures a layer of experts in both ways, if each step is to take the cheaper one. All ranks of the stage
        make this call.

        Raises:
            CollectiveError: another rank is lost.
        """
        if self._exchange != "auto" or not self._dispatches:
            return
        index = next(index for index, layer in enumerate(self._layers) if layer.router is not None)
        layer, ways = self._layers[index], ("all_reduce", "all_to_all")
        _, _, experts = self._experts_of(layer)
        heads = self.config.heads * self.config.head_dim
        self._make_room(max(MEASURED_ROWS))
        programs = [self._cut(steps) for steps in (self._experts_layer(layer), self._dispatched_layer(layer))]
        seconds = torch.zeros(len(ways), len(MEASURED_ROWS), MEASURED_TIMES, dtype=torch.float64)
        noise = torch.Generator().manual_seed(0)
        for number, rows in enumerate(MEASURED_ROWS):
            self._rows.value = rows
            self._residual[:rows, : self.config.hidden_size].normal_(generator=noise)
            self._heads[:rows, :heads].normal_(generator=noise)
            for attempt in range(MEASURED_TIMES):
                for way, program in enumerate(programs):
                    began = time.perf_counter()
                    self._run(program, rows)
                    seconds[way, number, attempt] = time.perf_counter() - began
        # All ranks must decide alike, and wait for the slowest one. The first attempt makes buffers.
        found = self._group.gather(seconds.view(torch.int32)).view(torch.float64)
        self._costs = ExchangeCosts(MEASURED_ROWS, *found[..., 1:].amin(-1).amax(0).tolist())
        routing, most = experts.routing, MEASURED_ROWS[-1]
        shape = ExchangeShape(self._group.size, routing.experts, routing.top, self.config.hidden_size)
        logger.info(
            "a layer of experts takes: %s; a rank receives %d bytes of %d rows by all_reduce, about %d by all_to_all",
            self._costs,
            shape.all_reduce_bytes(most),
            most,
            shape.expected_bytes(most),
        )

    def _sum_parts(self, pause: _Sum, count: int) -> None:
        """Adds up all ranks' parts of `count` rows."""
        total = self._group.sum(pause.part[:count, : pause.width].contiguous())
        out = pause.out[:count, : pause.width]
        if pause.add:
            out += total
        else:
            out.copy_(total)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab] of rows of `forward`'s result, [N, hidden]; valid until the next call.

        A rank has the logits of its part of the vocabulary, and those of later pipeline stages have none.
        """
        count = len(hidden)
        self._make_room(0, count)
        self._rows.value = count
        first, last = self._head_steps[0][1], self._head_steps[-1][1]
        first.input, first.input_stride = hidden.data_ptr(), hidden.stride(0)
        # A longer step may have made a new workspace since.
        last.workspace = self._workspace.data_ptr()
        self._team.run(self._head_program)
        return self._logits[:count, : self._vocabulary.count]

    def choose(
        self, plan: StepPlan, rows: NDArray[np.int64], draws: Sequence[Draw], count: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Computes a step and chooses a token behind each of `rows`, then one behind that, and so on, in one call. For
        models on one rank.

        Args:
            plan: its block tables have room for `count` - 1 tokens more of each row.
            rows: [R] of the plan, ascending; all of them if `count` is above 1.
            draws: [R] how their first tokens are chosen; those that follow alike.
            count: tokens of each row, 1 or more; 1 unless all layers have one pool.

        Returns:
            [count, R] tokens, and the largest logit of each. Where that isn't finite, a row's tokens mean nothing.

        Raises:
            MemoryError: no memory for the work lists of attention.
        """
        head = self._own_head()
        self._attention.plan_rows(plan.starts, plan.lengths, plan.block_tables, plan.side_tables)
        tokens, each = plan.num_tokens, len(rows)
        self._make_room(tokens, each)
        if self._choosing is None:
            self._choosing = self._record_choosing(head)
        numbers, largest = self._numbers.take(tokens + (1 + count) * each), self._largest.take(count * each)
        numbers[:tokens] = plan.tokens
        numbers[tokens : tokens + each] = plan.lengths.cumsum()[rows] - 1
        self._rows.value, self._passes.value = tokens, count
        self._tokens.value = address = self._numbers.address
        args, sample = self._pass_args, self._sample_args
        args.last, args.chosen = address + 8 * tokens, each
        args.draws = sample.draws = pack_draws(draws, self._packed)
        sample.tokens, sample.largest = address + 8 * (tokens + each), self._largest.address
        self._team.run(self._choosing, self._passes)
        if self._passes.value < 0:
            raise MemoryError
        shape = count, each
        return numbers[tokens + each :].reshape(shape).tolist(), largest.reshape(shape).tolist()

    def _record_choosing(self, linear: PackedLinear) -> Program:
        """Layers, the head and all that is behind it, with the present buffers."""
        args, sample = self._pass_args, self._sample_args
        args.hidden, args.hidden_stride = self._residual.data_ptr(), self._residual.stride(0)
        sample.input, sample.input_stride = self._logits.data_ptr(), self._logits.stride(0)
        head = self._project(linear, Epilogue.STORE, self._residual, self._logits, self._last_norm)
        behind = (GATHER, args), *head, (SAMPLE, sample), (FOLLOW, args)
        return Program(self._team.library, *self._layer_steps, *behind)

    def _make_room(self, tokens: int, logits: int = 0) -> None:
        """Makes larger buffers if a step has more tokens, or chooses more of them, than any before."""
        if tokens > self._capacity:
            self._record(max(tokens, 2 * self._capacity))
        if logits > self._logits_capacity:
            self._make_logits(self._own_head(), max(logits, 2 * self._logits_capacity))

    def _own_head(self) -> PackedLinear:
        """The head.

        Raises:
            ValueError: the first pipeline stage has it.
        """
        if self._head is None:
            raise ValueError(f"the head is on another stage than {self.place.stage}")
        return self._head

    def _make_logits(self, head: PackedLinear, capacity: int) -> None:
        """Makes the buffer of logits, for up to `capacity` rows, and the program that writes it."""
        self._logits_capacity = capacity
        self._logits = torch.empty(capacity, head.outputs)
        if self.config.traits.layer_norm:
            self._head_input = torch.empty(capacity, self.config.hidden_size)
        self._head_steps = self._project(
            head, Epilogue.STORE, self._residual, self._logits, self._last_norm, self._head_input
        )
        self._head_program = Program(self._team.library, *self._head_steps)
        self._choosing = None

    def _record(self, capacity: int) -> None:
        """Records the program with new buffers, for steps of up to `capacity` tokens."""
        config, layers = self.config, self._layers
        self._capacity = capacity
        heads = config.heads * config.head_dim
        # The rows of a tile are far apart in memory: with small pages each cache line would cost an address look-up.
        arena = Arena()
        self._residual = rows_of(arena, capacity, config.hidden_size)
        self._qkv = rows_of(arena, capacity, heads + 2 * config.kv_heads * config.head_dim)
        self._heads = rows_of(arena, capacity, heads)
        self._inner = rows_of(arena, capacity, config.intermediate_size)
        traits = config.traits
        if traits.layer_norm or traits.experts is not None:
            self._normed = rows_of(arena, capacity, config.hidden_size)
        if traits.joint_qk_norm and self._group.size > 1:
            self._squares = rows_of(arena, capacity, 2)
        if traits.norms.attention or traits.norms.mlp or self._group.size > 1:
            self._update = rows_of(arena, capacity, config.hidden_size)
        self._workspace = arena.take(max(linear.workspace_bytes for linear in self.linears()))
        if traits.experts is not None:
            self._make_pairs(traits.experts, capacity)
        steps: list[Step | Pause] = []
        if self._head is not None:
            steps = [(EMBED, self._embed(self._head)), *self._sum(self._residual, self._residual)]
        dispatched = steps.copy()
        for index, layer in enumerate(layers):
            before: list[Step | Pause] = []
            if config.first_layer + index in self._cuts:
                before.append(_Tap(config.first_layer + index))
            before += self._project(layer.qkv, Epilogue.STORE, self._residual, self._qkv, layer.input_norm)
            before += self._joint_norms(layer.joint_norms)
            before += self._attention.record(
                index,
                self._qkv.data_ptr(),
                self._qkv.stride(0),
                self._heads.data_ptr(),
                self._heads.stride(0),
                layer.qk_norm,
                self._rotations[index],
                layer.sinks,
            )
            if layer.router is not None:
                steps += [*before, *self._experts_layer(layer)]
                dispatched += [*before, *(self._dispatched_layer(layer) if self._dispatches else ())]
                continue
            source = self._normed if traits.parallel else self._residual
            before += self._add(layer.output, self._heads, layer.output_norm)
            before += self._project(layer.gate_up, self._activation, source, self._inner, layer.mlp_norm)
            before += self._add(layer.down, self._inner, layer.down_norm)
            steps += before
            dispatched += before
        self._layer_steps = [step for step in steps if isinstance(step, tuple)]
        self._programs = {"all_reduce": self._cut(steps)}
        if self._dispatches:
            self._programs["all_to_all"] = self._cut(dispatched)
        self._choosing = None

    def _make_pairs(self, experts: ExpertsTraits, capacity: int) -> None:
        """Makes the buffers that layers of experts share."""
        routing = experts.routing
        size = max(self._workspace.nbytes, 4 * route_floats(routing, self._team.threads))
        pairs = capacity * routing.top
        self._pairs = Pairs(pairs, experts.slots, experts.width, self.config.hidden_size, size)
        self._scores = rows_of(Arena(), capacity, routing.experts)
        if self._dispatches:
            self._dispatch = Dispatch(self._group, routing, self.config.hidden_size, capacity, size)
        if experts.shared:
            self._shared_inner = rows_of(Arena(), capacity, experts.shared)

    def _experts_layer(self, layer: Layer) -> list[Step | Pause]:
        """The kernels of a layer behind attention, with sums over all ranks. Ranks have a part of each expert's width,
        or whole experts."""
        router, mlp_norm, experts = self._experts_of(layer)
        rows, pairs, normed = ctypes.addressof(self._rows), self._pairs, self._normed
        several = self._group.size > 1
        out = self._update if several else self._residual
        steps: list[Step | Pause] = [
            *self._add(layer.output, self._heads, layer.output_norm),
            (NORM, self._norm_args(self._residual, normed, mlp_norm)),
            (LINEAR, self._linear(router, Epilogue.STORE, normed, self._scores)),
            route_step(experts.routing, rows, self._scores, layer.router_bias, pairs),
            *self._products(layer, experts, rows, normed, out, sent=False),
        ]
        if layer.shared_gate_up is not None and layer.shared_down is not None:
            inner = self._shared_inner
            steps += [
                (LINEAR, self._linear(layer.shared_gate_up, self._activation, normed, inner)),
                (LINEAR, self._linear(layer.shared_down, Epilogue.ADD, inner, out)),
            ]
        return [*steps, *self._sum(out, self._residual, add=True)]

    def _dispatched_layer(self, layer: Layer) -> list[Step | Pause]:
        """As `_experts_layer`, with rows that go to the ranks of their experts."""
        router, mlp_norm, experts = self._experts_of(layer)
        dispatch = self._dispatch
        norm = self._norm_args(dispatch.residual, dispatch.normed, mlp_norm)
        scores = self._linear(router, Epilogue.STORE, dispatch.normed, dispatch.scores)
        norm.rows = scores.rows = rows = dispatch.own_rows
        number = self._number_of(layer)
        return [
            *self._project(layer.output, Epilogue.STORE, self._heads, self._update),
            _Move("scatter", number),
            (NORM, norm),
            (LINEAR, scores),
            route_step(experts.routing, rows, dispatch.scores, layer.router_bias, dispatch.chosen),
            _Move("send", number),
            *self._products(layer, experts, dispatch.came_rows, dispatch.came, dispatch.results, sent=True),
            _Move("collect", number),
        ]

    def _experts_of(self, layer: Layer) -> tuple[Linear, Norm, ExpertsTraits]:
        experts = self.config.traits.experts
        if experts is None or layer.router is None or layer.mlp_norm is None:
            raise ValueError("a layer has a router, and the model no experts, or no norm before them")
        return layer.router, layer.mlp_norm, experts

    def _number_of(self, layer: Layer) -> int:
        """Number of a layer among those with experts."""
        return sum(other.router is not None for other in self._layers[: self._layers.index(layer)])

    def _products(
        self, layer: Layer, experts: ExpertsTraits, rows: int, source: Tensor, out: Tensor, *, sent: bool
    ) -> tuple[Step, Step, Step, Step]:
        """The kernels of a layer's experts, from `source` to `out`, for the number of rows at the address `rows`. What
        a single rank computes is added to `out`."""
        pairs, top, number = self._pairs, experts.routing.top, self._number_of(layer)
        gate_up, down = _packed(layer.gate_up), _packed(layer.down)
        gate = Gate(Epilogue.CLAMPED_GATE, experts.limit, experts.alpha) if experts.limit else Gate(self._activation)
        packed = PackedExperts(self._team, gate_up, down, experts.slots, gate)
        load = None if self.expert_loads is None else self.expert_loads.of(number)
        # Rows that were sent come with slots in the place of experts.
        slots = None if self._spares is None or sent else self._spares.slots_of(number)
        return (
            packed.sort_step(rows, top, pairs, load, slots),
            packed.up_step(source, pairs),
            packed.down_step(pairs),
            packed.combine_step(rows, top, out, pairs, add=self._group.size == 1),
        )

    def _cut(self, steps: list[Step | Pause]) -> list[tuple[Program, Pause | None]]:
        """Programs, and the pause behind each; none behind the last one."""
        stop = None if self._shared is None else self._shared.failure
        programs: list[tuple[Program, Pause | None]] = []
        part: list[Step] = []
        for step in (*steps, None):
            if isinstance(step, tuple):
                part.append(step)
            else:
                programs.append((Program(self._team.library, *part, stop=stop), step))
                part = []
        return programs

    def _joint_norms(self, norms: tuple[Norm, ...]) -> list[Step | _Sum]:
        """The kernels of the norms of all queries and of all keys, of which ranks have a part each."""
        steps: list[Step | _Sum] = []
        normed, first = list[NormArgs](), 0
        for number, norm in enumerate(norms):
            part = self._qkv[:, first : (first := first + len(norm.weight))]
            args = self._norm_args(part, part, norm)
            normed.append(args)
            if self._group.size > 1:
                squares = self._squares[:, number:]
                steps.append((SQUARES, self._norm_args(part, squares, norm)))
                args.squares, args.squares_stride = squares.data_ptr(), squares.stride(0)
                # Where ranks have the same key heads, all of those count equally often.
                args.whole_width *= self._group.size
        if norms and self._group.size > 1:
            steps += self._sum(self._squares, self._squares, width=len(norms))
        return [*steps, *((NORM, args) for args in normed)]

    def _sum(self, part: Tensor, out: Tensor, add: bool = False, width: int = 0) -> list[Step | _Sum]:
        """Puts the sum of all ranks' parts into `out`, or adds it; nothing for a single rank.

        Args:
            width: of a row; the hidden size unless given.
        """
        width = width or self.config.hidden_size
        if self._group.size == 1:
            return []
        if self._shared is None:
            return [_Sum(part, out, width, add)]
        args = ReduceArgs(
            rows=ctypes.addressof(self._rows),
            group=ctypes.addressof(self._shared.group),
            part=part.data_ptr(),
            part_stride=part.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            width=width,
            add=add,
        )
        return [(ALL_REDUCE, args)]

    def linears(self) -> Iterator[PackedLinear]:
        """The packed weights: four of each layer, those of routers and of MLPs beside experts, and the head if the rank
        has it."""
        for layer in self._layers:
            yield from map(_packed, (layer.qkv, layer.output, layer.gate_up, layer.down))
            beside = layer.router, layer.shared_gate_up, layer.shared_down
            yield from (_packed(linear) for linear in beside if linear is not None)
        if self._head is not None:
            yield self._head

    def _embed(self, linear: PackedLinear) -> EmbedArgs:
        table, head = self._embedding, linear.args(Epilogue.STORE)
        return EmbedArgs(
            rows=ctypes.addressof(self._rows),
            tokens=ctypes.addressof(self._tokens),
            weight=head.weight if table is None else table.data_ptr(),
            scales=head.scales,
            zeros=head.zeros,
            minima=head.minima,
            group=head.group,
            first=self._vocabulary.begin,
            count=self._vocabulary.count,
            out=self._residual.data_ptr(),
            out_stride=self._residual.stride(0),
            width=self.config.hidden_size,
            type=head.type if table is None else int(table.dtype == torch.bfloat16),
            scale=self.config.traits.embedding_scale / self.config.traits.residual_scale,
            packed=table is None,
        )

    def _project(
        self,
        linear: Linear,
        epilogue: Epilogue,
        source: Tensor,
        out: Tensor,
        norm: Norm | None = None,
        normed: Tensor | None = None,
    ) -> list[Step]:
        """The kernels of a projection from `source` to `out`, with a norm of its input if `norm` is given.

        Args:
            normed: where a layer norm goes; the buffer of the layers unless given.
        """
        if norm is None or not self.config.traits.layer_norm:
            return [(LINEAR, self._linear(linear, epilogue, source, out, None if norm is None else norm.weight))]
        normed = self._normed if normed is None else normed
        step = self._norm_args(source, normed, norm)
        return [(NORM, step), (LINEAR, self._linear(linear, epilogue, normed, out))]

    def _add(self, linear: Linear, source: Tensor, norm: Norm | None) -> list[Step | _Sum]:
        """The kernels of a projection that is added to the residual, after a norm if one is given."""
        if norm is None and self._group.size == 1:
            return [*self._project(linear, Epilogue.ADD, source, self._residual)]
        update = self._update
        part = self._project(linear, Epilogue.STORE, source, update)
        if norm is None:
            return [*part, *self._sum(update, self._residual, add=True)]
        added = self._norm_args(update, self._residual, norm, add=True)
        return [*part, *self._sum(update, update), (NORM, added)]

    def _norm_args(self, source: Tensor, out: Tensor, norm: Norm, add: bool = False) -> NormArgs:
        return NormArgs(
            rows=ctypes.addressof(self._rows),
            input=source.data_ptr(),
            input_stride=source.stride(0),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            weight=norm.weight.data_ptr(),
            bias=None if norm.bias is None else norm.bias.data_ptr(),
            width=len(norm.weight),
            whole_width=len(norm.weight),
            eps=self.config.residual_eps,
            centered=self.config.traits.layer_norm,
            add=add,
        )

    def _linear(
        self, linear: Linear, epilogue: Epilogue, source: Tensor, out: Tensor, norm: Tensor | None = None
    ) -> LinearArgs:
        """The arguments of a projection from `source` to `out`, with a norm of its input if `norm` is given."""
        args = _packed(linear).args(epilogue, norm, self.config.residual_eps)
        args.rows = ctypes.addressof(self._rows)
        args.input, args.input_stride = source.data_ptr(), source.stride(0)
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        args.workspace = self._workspace.data_ptr()
        return args


def _with_float_norms(layer: Layer) -> Layer:
    input_norm, output_norm, mlp_norm, down_norm = (
        None if norm is None else norm.times(1.0, torch.float32)
        for norm in (layer.input_norm, layer.output_norm, layer.mlp_norm, layer.down_norm)
    )
    return replace(
        layer,
        input_norm=input_norm,
        joint_norms=tuple(norm.times(1.0, torch.float32) for norm in layer.joint_norms),
        output_norm=output_norm,
        mlp_norm=mlp_norm,
        down_norm=down_norm,
    )


def _packed(linear: Linear) -> PackedLinear:
    if not isinstance(linear, PackedLinear):
        raise TypeError(f"a linear layer is {type(linear).__name__}; a native decoder takes PackedLinear")
    return linear
