"""Layers of experts on the native kernels; `native/experts.h` says what they are made of, and `reference.experts` what
they compute.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from kvrelay.kernels.codes import CodedWeight, outputs_or_zeros
from kvrelay.kernels.cpu.packed import Arena, Epilogue, LinearArgs, PackedLinear, Step, rows_of
from kvrelay.kernels.cpu.program import Program, Team, fields
from kvrelay.kernels.routing import Routing

ROUTE = "kvrelay_route"
SORT = "kvrelay_sort_pairs"
GROUPED = "kvrelay_grouped"
COMBINE = "kvrelay_combine"


@dataclass(frozen=True, slots=True)
class Gate:
    """The operation between an expert's two products."""

    epilogue: Epilogue
    limit: float = 0.0
    """Limit of `Epilogue.CLAMPED_GATE`."""
    alpha: float = 0.0
    """Factor of `Epilogue.CLAMPED_GATE`."""


class RouteArgs(ctypes.Structure):
    """`RouteArgs` in experts.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows logits bias chosen shares workspace"),
        *fields(ctypes.c_int64, "logits_stride experts top groups top_groups group_best"),
        *fields(ctypes.c_float, "scale least"),
        *fields(ctypes.c_int32, "scoring normalized"),
    )


class SortArgs(ctypes.Structure):
    """`SortArgs` in experts.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows chosen slots begins sources places load"),
        *fields(ctypes.c_int64, "experts top all phases"),
    )


class GroupedArgs(ctypes.Structure):
    """`GroupedArgs` in experts.h."""

    _fields_ = (
        ("linear", LinearArgs),
        *fields(ctypes.c_void_p, "begins"),
        *fields(ctypes.c_int64, "experts weight_bytes scales biases"),
    )


class CombineArgs(ctypes.Structure):
    """`CombineArgs` in experts.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows places shares parts out"),
        *fields(ctypes.c_int64, "parts_stride out_stride width top"),
        ("add", ctypes.c_int32),
    )


def route_step(routing: Routing, rows: int, logits: Tensor, bias: Tensor | None, pairs: "Pairs") -> Step:
    """The kernel that chooses each row's experts.

    Args:
        rows: address of the number of rows.
        logits: float32 [rows, experts], with any stride of rows.
        bias: float32 [experts]; see `reference.route`.
        pairs: filled.
    """
    args = RouteArgs(
        rows=rows,
        logits=logits.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        chosen=pairs.chosen.data_ptr(),
        shares=pairs.shares.data_ptr(),
        workspace=pairs.workspace.data_ptr(),
        logits_stride=logits.stride(0),
        experts=routing.experts,
        top=routing.top,
        groups=routing.groups,
        top_groups=routing.top_groups,
        group_best=routing.group_best,
        scale=routing.scale,
        least=routing.least,
        scoring=routing.scoring,
        normalized=routing.normalized,
    )
    return ROUTE, args


def route_floats(routing: Routing, threads: int) -> int:
    """Size of `RouteArgs.workspace`."""
    return threads * (2 * routing.experts + routing.groups)


class Pairs:
    """Buffers of the pairs of a row and one of its experts, which layers that run one after the other share."""

    def __init__(self, capacity: int, experts: int, inner: int, hidden: int, workspace_bytes: int) -> None:
        """
        Args:
            capacity: largest number of pairs.
            inner, hidden: numbers of a pair between the products and behind them.
            workspace_bytes: of the products.
        """
        arena = Arena()
        self.capacity, self.experts = capacity, experts
        self.chosen = torch.zeros(capacity, dtype=torch.int32)
        self.shares = torch.zeros(capacity)
        self.begins = torch.zeros(experts + 1, dtype=torch.int32)
        self.sources = torch.zeros(capacity, dtype=torch.int32)
        self.places = torch.zeros(capacity, dtype=torch.int32)
        self.inner = rows_of(arena, capacity, inner)
        self.parts = rows_of(arena, capacity, hidden)
        self.workspace = arena.take(workspace_bytes)


class PackedExperts:
    """The experts of one layer: `out = sum over k of shares[:, k] * expert(chosen[:, k])(x)`."""

    def __init__(self, team: Team, up: PackedLinear, down: PackedLinear, experts: int, gate: Gate) -> None:
        """
        Args:
            up: [experts * outputs, hidden] all experts' first weights, one below the other, as `laid_out` has them.
            down: [experts * hidden, inner] their second ones.

        Raises:
            ValueError: the weights aren't those of so many experts.
        """
        outputs, hidden = up.outputs // experts, down.outputs // experts
        if up.outputs % experts or down.outputs % experts or outputs % OUTPUTS or hidden % OUTPUTS:
            raise ValueError(f"weights of {up.outputs} and {down.outputs} outputs aren't those of {experts} experts")
        self.team, self.up, self.down, self.experts, self.gate = team, up, down, experts, gate
        self.outputs, self.hidden = outputs, up.inputs
        """Outputs of an expert's first product, and the width of the rows."""
        self.inner = outputs // 2 if gate.epilogue.is_gated else outputs
        """Numbers of a pair between the products, of which the second one may read fewer."""
        self.width = hidden
        """Numbers of a pair's result, of which those behind `hidden` are 0."""

    @property
    def workspace_bytes(self) -> int:
        size: int = max(self.up.workspace_bytes, self.down.workspace_bytes)
        return size

    @property
    def nbytes(self) -> int:
        """Bytes of all experts' weights."""
        size: int = self.up.nbytes + self.down.nbytes
        return size

    def sort_step(
        self, rows: int, top: int, pairs: Pairs, load: Tensor | None = None, slots: Tensor | None = None
    ) -> Step:
        """The kernel that puts pairs in the order of their experts.

        Args:
            load: int64 [experts], to which the pairs of each expert are added.
            slots: int32 [phases, all experts] which of these experts each chosen one is, for a row r in phase
                r % phases; -1 for one that isn't here, whose pairs are left out. None: the chosen one itself.
        """
        return SORT, SortArgs(
            rows=rows,
            chosen=pairs.chosen.data_ptr(),
            slots=None if slots is None else slots.data_ptr(),
            begins=pairs.begins.data_ptr(),
            sources=pairs.sources.data_ptr(),
            places=pairs.places.data_ptr(),
            load=None if load is None else load.data_ptr(),
            experts=self.experts,
            top=top,
            all=0 if slots is None else slots.shape[1],
            phases=1 if slots is None else len(slots),
        )

    def up_step(self, source: Tensor | None, pairs: Pairs) -> Step:
        """The kernel of the first products, from `source` [rows, hidden] to `pairs.inner`."""
        args = self._grouped(self.up, pairs, pairs.inner, self.gate)
        args.linear.sources = pairs.sources.data_ptr()
        if source is not None:
            args.linear.input, args.linear.input_stride = source.data_ptr(), source.stride(0)
        return GROUPED, args

    def down_step(self, pairs: Pairs) -> Step:
        """The kernel of the second products, from `pairs.inner` to `pairs.parts`."""
        args = self._grouped(self.down, pairs, pairs.parts, Gate(Epilogue.STORE))
        args.linear.input, args.linear.input_stride = pairs.inner.data_ptr(), pairs.inner.stride(0)
        return GROUPED, args

    def combine_step(self, rows: int, top: int, out: Tensor | None, pairs: Pairs, *, add: bool) -> Step:
        """The kernel that adds up each row's results, into `out` [rows, hidden] or onto it."""
        args = CombineArgs(
            rows=rows,
            places=pairs.places.data_ptr(),
            shares=pairs.shares.data_ptr(),
            parts=pairs.parts.data_ptr(),
            parts_stride=pairs.parts.stride(0),
            width=self.hidden,
            top=top,
            add=add,
        )
        if out is not None:
            args.out, args.out_stride = out.data_ptr(), out.stride(0)
        return COMBINE, args

    def _grouped(self, linear: PackedLinear, pairs: Pairs, out: Tensor, gate: Gate) -> GroupedArgs:
        args = linear.args(gate.epilogue)
        outputs = linear.outputs // self.experts
        args.outputs, args.limit, args.alpha = outputs, gate.limit, gate.alpha
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        args.workspace = pairs.workspace.data_ptr()
        return GroupedArgs(
            linear=args,
            begins=pairs.begins.data_ptr(),
            experts=self.experts,
            weight_bytes=linear.packed.nbytes // self.experts,
            scales=0 if linear.scales is None else linear.scales.numel() // self.experts,
            biases=outputs,
        )


class ExpertsCalls:
    """Runs layers of experts one call at a time; they share buffers. Not thread-safe."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._rows = ctypes.c_int64()
        self._pairs: Pairs | None = None
        self._inner = self._width = self._experts = self._workspace = 0

    @property
    def rows(self) -> int:
        """Address of the number of rows."""
        return ctypes.addressof(self._rows)

    def add(self, layer: PackedExperts) -> None:
        """Takes a layer into account, before its first call."""
        self._inner, self._width = max(self._inner, layer.inner), max(self._width, layer.width)
        self._experts = max(self._experts, layer.experts)
        self._workspace = max(self._workspace, layer.workspace_bytes)
        self._pairs = None

    def begin(self, chosen: Tensor, shares: Tensor) -> Pairs:
        """Buffers with the experts of a call's rows.

        Args:
            chosen: integers [rows, top], of which those outside of 0 to experts - 1 name none.
            shares: [rows, top].
        """
        rows, top = chosen.shape
        count = rows * top
        pairs = self._pairs
        if pairs is None or count > pairs.capacity:
            capacity = max(count, 64 if pairs is None else 2 * pairs.capacity)
            self._pairs = pairs = Pairs(capacity, self._experts, self._inner, self._width, self._workspace)
        pairs.chosen[:count].view(rows, top).copy_(chosen)
        pairs.shares[:count].view(rows, top).copy_(shares)
        self._rows.value = rows
        return pairs


Between = Callable[[Tensor], Tensor]
"""An operation on the pairs' numbers [pairs, width]."""


class ExpertsCall:
    """Calls one layer: `run(x, chosen, shares)`."""

    def __init__(
        self,
        calls: ExpertsCalls,
        layer: PackedExperts,
        gate: Between | None = None,
        norm: Between | None = None,
        outputs: int = 0,
    ) -> None:
        """
        Args:
            gate: torch's operation between the products, [pairs, outputs] -> [pairs, inputs of the second product]; the
                layer's own is STORE then.
            outputs: of an expert's first product without the zeros behind them, which `gate` doesn't get.
            norm: torch's operation on the second product's results [pairs, hidden], before they are added up.
        """
        self._calls, self.layer, self._gate, self._norm = calls, layer, gate, norm
        self._outputs = outputs or layer.outputs
        self._recorded: tuple[Pairs, int] | None = None
        self._load: Tensor | None = None
        calls.add(layer)

    @property
    def experts(self) -> int:
        """Number of the layer's experts."""
        return self.layer.experts

    def count(self, load: Tensor) -> None:
        """Has the pairs of each expert added to `load`, int64 [experts], from now on."""
        self._load, self._recorded = load, None

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """[rows, hidden] of x [rows, hidden] and `ExpertsCalls.begin`'s arguments; of x's type."""
        pairs = self._calls.begin(chosen, shares)
        top = chosen.shape[1]
        if self._recorded is None or self._recorded != (pairs, top):
            self._record(pairs, top)
        source = x.float().contiguous()
        out = torch.empty_like(source)
        self._up.linear.input, self._up.linear.input_stride = source.data_ptr(), source.stride(0)
        self._combine.out, self._combine.out_stride = out.data_ptr(), out.stride(0)
        team, layer = self.layer.team, self.layer
        for index, program in enumerate(self._programs):
            team.run(program)
            if index + 1 == len(self._programs):
                break
            count = int(pairs.begins[layer.experts])
            if index == 0 and self._gate is not None:
                inner = self._gate(pairs.inner[:count, : self._outputs])
                pairs.inner[:count, : inner.shape[1]] = inner
            elif self._norm is not None:
                parts = pairs.parts[:count, : layer.hidden]
                parts.copy_(self._norm(parts.to(x.dtype)))
        return out.to(x.dtype)

    def _record(self, pairs: Pairs, top: int) -> None:
        layer, rows = self.layer, self._calls.rows
        up, down = layer.up_step(None, pairs), layer.down_step(pairs)
        combine = layer.combine_step(rows, top, None, pairs, add=False)
        groups: list[list[Step]] = [[layer.sort_step(rows, top, pairs, self._load), up]]
        for pause, step in ((self._gate, down), (self._norm, combine)):
            if pause is not None:
                groups.append([])
            groups[-1].append(step)
        self._programs = [Program(layer.team.library, *steps) for steps in groups]
        self._up, self._combine = up[1], combine[1]
        self._recorded = pairs, top


OUTPUTS = 16
"""Divisor of an expert's outputs, and of each half of gated ones: blocks of outputs are of one expert."""


@overload
def laid_out(weight: Tensor, experts: int, *, halves: int = 1, interleaved: bool = False) -> Tensor: ...


@overload
def laid_out(
    weight: Tensor | CodedWeight, experts: int, *, halves: int = 1, interleaved: bool = False
) -> Tensor | CodedWeight: ...


def laid_out(
    weight: Tensor | CodedWeight, experts: int, *, halves: int = 1, interleaved: bool = False
) -> Tensor | CodedWeight:
    """All experts' weights or biases as `PackedExperts` takes them: zeros stand behind an expert's outputs, or behind
    each half of them, so that OUTPUTS divides them.

    Args:
        weight: [experts * outputs, inputs] or [experts * outputs].
        halves: 2 for outputs of which the first half are gates.
        interleaved: whether each gate is followed by its up instead.
    """
    total = len(weight.codes if isinstance(weight, CodedWeight) else weight)
    own = torch.arange(total // experts)
    if interleaved:
        own = torch.cat((own[::2], own[1::2]))
    own = own.view(halves, -1)
    own = torch.nn.functional.pad(own, (0, -own.shape[1] % OUTPUTS), value=-1).flatten()
    rows = torch.where(own < 0, -1, own + (total // experts) * torch.arange(experts)[:, None]).flatten()
    if torch.equal(rows, torch.arange(total)):
        return weight
    return outputs_or_zeros(weight, rows)
