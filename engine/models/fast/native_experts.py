"""Layers of experts as instructions of a native decoder's program, and the two ways in which ranks exchange their rows.

Ranks with whole experts either compute their experts' part of every row, and all parts are added up (`all_reduce`), or
send rows to the ranks of their experts (`all_to_all`, `dispatch.py`), between programs. So there are two lists of
programs, and each step takes one of them.
"""

import ctypes
import logging
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvrelay.costs.exchange import Exchange, ExchangeCosts, ExchangeShape
from kvrelay.engine.config import ExpertExchange
from kvrelay.engine.models.fast.decoder import Layer, Norm
from kvrelay.engine.models.fast.dispatch import Dispatch
from kvrelay.engine.models.fast.kernel_steps import KernelSteps, Move, Pause, Step, packed
from kvrelay.engine.models.fast.spares import SpareExperts
from kvrelay.engine.models.loads import ExpertLoads
from kvrelay.engine.models.reading.config import undispatched
from kvrelay.engine.models.reading.experts import ExpertsTraits
from kvrelay.kernels.cpu.experts import Gate, PackedExperts, Pairs, route_floats, route_step
from kvrelay.kernels.cpu.packed import LINEAR, NORM, Arena, Epilogue, rows_of
from kvrelay.kernels.ops import Linear

logger = logging.getLogger(__name__)

MEASURED_ROWS = (1, 16, 64, 256)
"""Rows of the steps by which the costs of both ways of exchanging experts' rows are measured."""
MEASURED_TIMES = 4
"""Times that each of them is measured."""


class NativeExperts:
    """The layers of experts of a native decoder; of no use to a model without any."""

    def __init__(self, steps: KernelSteps, layers: Sequence[Layer], exchange: ExpertExchange) -> None:
        """
        Args:
            layers: all layers of the decoder.
            exchange: the way in which ranks with whole experts exchange rows; `auto` sums until `measure` was called.

        Raises:
            ValueError: rows can't be exchanged in the way that `exchange` names.
        """
        self._config, self._steps, self._exchange = steps.config, steps, exchange
        self._layers = [layer for layer in layers if layer.router is not None]
        self.costs: ExchangeCosts | None = None
        """Costs of both ways, if each step takes the cheaper one; None before `measure`."""
        why = self._undispatched()
        if exchange == "all_to_all" and why:
            raise ValueError(f"expert_exchange is all_to_all; allowed: auto, all_reduce, because {why}")
        self.loads = self._make_loads()
        """Loads of the experts; None without layers of experts."""
        self.dispatches = not why and exchange != "all_reduce" and self.loads is not None
        """Whether steps may send rows to the ranks of their experts."""
        self._spares = self._make_spares(self.loads)

    def exchange_of(self, count: int) -> Exchange:
        """The way in which ranks with whole experts exchange the rows of a step of `count` tokens."""
        if not self.dispatches or (self._exchange == "auto" and self.costs is None):
            return "all_reduce"
        return "all_to_all" if self.costs is None else self.costs.cheaper(count)

    def begin(self, count: int) -> None:
        """Begins a step of `count` rows."""
        if self.dispatches:
            self._dispatch.begin(count)

    def end(self) -> None:
        """Ends a step: counts its loads, and moves copies of experts that are asked much to other ranks."""
        if self.loads is not None and self.loads.stepped() and self._spares is not None:
            self._spares.follow(self.loads)

    def move(self, pause: Move) -> None:
        """Exchanges rows with other ranks."""
        dispatch = self._dispatch
        if self._spares is None:
            raise ValueError("rows are exchanged, and ranks don't have whole experts")
        if pause.move == "scatter":
            dispatch.scatter(self._steps.update, self._steps.residual)
        elif pause.move == "send":
            dispatch.send(self._pairs, *self._spares.homes_of(pause.layer))
        else:
            dispatch.collect(self._steps.residual)

    def _undispatched(self) -> str:
        """Why rows can't be sent to the ranks of their experts; empty if they can."""
        experts = self._config.traits.experts
        if experts is not None and (experts.held is None or self._steps.group.size == 1):
            return "its ranks don't have whole experts (expert_parallel)"
        return undispatched(self._config)

    def _make_loads(self) -> ExpertLoads | None:
        experts = self._config.traits.experts
        if experts is None or not self._layers:
            return None
        held, group = None if experts.held is None else experts.slots, self._steps.group
        return ExpertLoads(len(self._layers), experts.routing.experts, held, group, group.size)

    def _make_spares(self, loads: ExpertLoads | None) -> SpareExperts | None:
        """The places of the experts, if ranks have whole ones."""
        experts = self._config.traits.experts
        if experts is None or experts.held is None or loads is None:
            return None
        weights = [(packed(layer.gate_up), packed(layer.down)) for layer in self._layers]
        return SpareExperts(self._steps.group, experts, weights, loads)

    def measure(self, make_room: Callable[[int], None]) -> None:
        """Measures a layer of experts in both ways, if each step is to take the cheaper one. All ranks of the stage
        make this call.

        Args:
            make_room: makes the buffers large enough for so many rows.

        Raises:
            CollectiveError: another rank is lost.
        """
        if self._exchange != "auto" or not self.dispatches:
            return
        layer, ways, steps = self._layers[0], ("all_reduce", "all_to_all"), self._steps
        _, _, experts = self._experts_of(layer)
        heads = self._config.heads * self._config.head_dim
        make_room(max(MEASURED_ROWS))
        programs = [steps.cut(recorded) for recorded in (self.layer_steps(layer), self.dispatched_steps(layer))]
        seconds = torch.zeros(len(ways), len(MEASURED_ROWS), MEASURED_TIMES, dtype=torch.float64)
        noise = torch.Generator().manual_seed(0)
        for number, rows in enumerate(MEASURED_ROWS):
            steps.rows.value = rows
            steps.residual[:rows, : self._config.hidden_size].normal_(generator=noise)
            steps.heads[:rows, :heads].normal_(generator=noise)
            for attempt in range(MEASURED_TIMES):
                for way, program in enumerate(programs):
                    began = time.perf_counter()
                    self.begin(rows)
                    for pause in steps.run(program, rows):
                        if isinstance(pause, Move):
                            self.move(pause)
                    seconds[way, number, attempt] = time.perf_counter() - began
        # All ranks must decide alike, and wait for the slowest one. The first attempt makes buffers.
        found = steps.group.gather(seconds.view(torch.int32)).view(torch.float64)
        self.costs = ExchangeCosts(MEASURED_ROWS, *found[..., 1:].amin(-1).amax(0).tolist())
        routing, most = experts.routing, MEASURED_ROWS[-1]
        shape = ExchangeShape(steps.group.size, routing.experts, routing.top, self._config.hidden_size)
        logger.info(
            "a layer of experts takes: %s; a rank receives %d bytes of %d rows by all_reduce, about %d by all_to_all",
            self.costs,
            shape.all_reduce_bytes(most),
            most,
            shape.expected_bytes(most),
        )

    def make_buffers(self, capacity: int) -> None:
        """Makes the buffers that layers of experts share, for steps of up to `capacity` tokens, behind those of
        `KernelSteps`."""
        experts = self._config.traits.experts
        if experts is None:
            return
        routing, steps = experts.routing, self._steps
        size = max(steps.workspace.nbytes, 4 * route_floats(routing, steps.team.threads))
        pairs = capacity * routing.top
        self._pairs = Pairs(pairs, experts.slots, experts.width, self._config.hidden_size, size)
        self._scores = rows_of(Arena(), capacity, routing.experts)
        if self.dispatches:
            self._dispatch = Dispatch(steps.group, routing, self._config.hidden_size, capacity, size)
        if experts.shared:
            self._shared_inner = rows_of(Arena(), capacity, experts.shared)

    def layer_steps(self, layer: Layer) -> list[Step | Pause]:
        """The kernels of a layer behind attention, with sums over all ranks. Ranks have a part of each expert's width,
        or whole experts."""
        router, mlp_norm, experts = self._experts_of(layer)
        steps, pairs, normed = self._steps, self._pairs, self._steps.normed
        rows = ctypes.addressof(steps.rows)
        out = steps.update if steps.group.size > 1 else steps.residual
        found: list[Step | Pause] = [
            *steps.add(layer.output, steps.heads, layer.output_norm),
            (NORM, steps.norm_args(steps.residual, normed, mlp_norm)),
            (LINEAR, steps.linear(router, Epilogue.STORE, normed, self._scores)),
            route_step(experts.routing, rows, self._scores, layer.router_bias, pairs),
            *self._products(layer, experts, rows, normed, out, sent=False),
        ]
        if layer.shared_gate_up is not None and layer.shared_down is not None:
            inner = self._shared_inner
            found += [
                (LINEAR, steps.linear(layer.shared_gate_up, steps.activation, normed, inner)),
                (LINEAR, steps.linear(layer.shared_down, Epilogue.ADD, inner, out)),
            ]
        return [*found, *steps.sum(out, steps.residual, add=True)]

    def dispatched_steps(self, layer: Layer) -> list[Step | Pause]:
        """As `layer_steps`, with rows that go to the ranks of their experts; none if steps never send rows."""
        if not self.dispatches:
            return []
        router, mlp_norm, experts = self._experts_of(layer)
        steps, dispatch = self._steps, self._dispatch
        norm = steps.norm_args(dispatch.residual, dispatch.normed, mlp_norm)
        scores = steps.linear(router, Epilogue.STORE, dispatch.normed, dispatch.scores)
        norm.rows = scores.rows = rows = dispatch.own_rows
        number = self._number_of(layer)
        return [
            *steps.project(layer.output, Epilogue.STORE, steps.heads, steps.update),
            Move("scatter", number),
            (NORM, norm),
            (LINEAR, scores),
            route_step(experts.routing, rows, dispatch.scores, layer.router_bias, dispatch.chosen),
            Move("send", number),
            *self._products(layer, experts, dispatch.came_rows, dispatch.came, dispatch.results, sent=True),
            Move("collect", number),
        ]

    def _experts_of(self, layer: Layer) -> tuple[Linear, Norm, ExpertsTraits]:
        experts = self._config.traits.experts
        if experts is None or layer.router is None or layer.mlp_norm is None:
            raise ValueError("a layer has a router, and the model no experts, or no norm before them")
        return layer.router, layer.mlp_norm, experts

    def _number_of(self, layer: Layer) -> int:
        """Number of a layer among those with experts."""
        return next(number for number, other in enumerate(self._layers) if other is layer)

    def _products(
        self, layer: Layer, experts: ExpertsTraits, rows: int, source: Tensor, out: Tensor, *, sent: bool
    ) -> tuple[Step, Step, Step, Step]:
        """The kernels of a layer's experts, from `source` to `out`, for the number of rows at the address `rows`. What
        a single rank computes is added to `out`."""
        steps, pairs, top, number = self._steps, self._pairs, experts.routing.top, self._number_of(layer)
        gate_up, down = packed(layer.gate_up), packed(layer.down)
        gate = Gate(Epilogue.CLAMPED_GATE, experts.limit, experts.alpha) if experts.limit else Gate(steps.activation)
        products = PackedExperts(steps.team, gate_up, down, experts.slots, gate)
        load = None if self.loads is None else self.loads.of(number)
        # Rows that were sent come with slots in the place of experts.
        slots = None if self._spares is None or sent else self._spares.slots_of(number)
        return (
            products.sort_step(rows, top, pairs, load, slots),
            products.up_step(source, pairs),
            products.down_step(pairs),
            products.combine_step(rows, top, out, pairs, add=steps.group.size == 1),
        )
