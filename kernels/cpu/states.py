"""Layers that keep a state, on the native kernels of `native/states.h`."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from kvrelay.kernels.cpu.packed import LINEAR, Epilogue, PackedLinear, PackedNorm, Step, norm_of, sum_of
from kvrelay.kernels.cpu.program import Program, Team, fields
from kvrelay.kernels.states import StateRows, TimeStep, token_rows

CONV, SSD, DELTA, WKV = "kvrelay_conv", "kvrelay_ssd", "kvrelay_delta", "kvrelay_wkv"


class _Rows(ctypes.Structure):
    """`StateRows` in states.h."""

    _fields_ = (
        *fields(ctypes.c_void_p, "rows firsts starts slots origins state"),
        *fields(ctypes.c_int64, "slot_bytes"),
    )


class ConvArgs(ctypes.Structure):
    """`ConvArgs` in states.h."""

    _fields_ = (
        ("of", _Rows),
        *fields(ctypes.c_void_p, "x out weight bias gates"),
        *fields(ctypes.c_int64, "x_stride out_stride gates_stride channels width"),
        *fields(ctypes.c_int32, "silu bfloat16"),
    )


class SsdArgs(ctypes.Structure):
    """`SsdArgs` in states.h."""

    _fields_ = (
        ("of", _Rows),
        *fields(ctypes.c_void_p, "x b c dt out a d dt_bias workspace"),
        *fields(ctypes.c_int64, "x_stride b_stride c_stride dt_stride out_stride heads groups dim size"),
        *fields(ctypes.c_float, "dt_least dt_most"),
        *fields(ctypes.c_int32, "softplus bfloat16"),
    )


class DeltaArgs(ctypes.Structure):
    """`DeltaArgs` in states.h."""

    _fields_ = (
        ("of", _Rows),
        *fields(ctypes.c_void_p, "q k v g beta out workspace"),
        *fields(
            ctypes.c_int64, "q_stride k_stride v_stride g_stride beta_stride out_stride heads key_heads dim key_dim"
        ),
        *fields(ctypes.c_int32, "normalized channels bfloat16"),
    )


class WkvArgs(ctypes.Structure):
    """`WkvArgs` in states.h."""

    _fields_ = (
        ("of", _Rows),
        *fields(ctypes.c_void_p, "k v out decay first"),
        *fields(ctypes.c_int64, "k_stride v_stride out_stride channels"),
        *fields(ctypes.c_int32, "bfloat16"),
    )


class _Layer:
    """A kernel with the arguments of one layer, and the tensors that these point to."""

    def __init__(self, team: Team, kernel: str, args: ctypes.Structure, *kept: object) -> None:
        self.args, self.kept = args, kept
        self._team = team
        self._count = ctypes.c_int64()
        args.of.rows = ctypes.addressof(self._count)
        self._program = Program(team.library, (kernel, args))

    def run(self, state: Tensor, rows: StateRows) -> None:
        """Runs the kernel."""
        self.begin(state, rows)
        self._team.run(self._program)

    def begin(self, state: Tensor, rows: StateRows) -> None:
        """Has the next run compute these rows."""
        of = self.args.of
        self._count.value = len(rows.starts)
        of.firsts, of.starts, of.slots = rows.firsts.data_ptr(), rows.starts.data_ptr(), rows.slots.data_ptr()
        of.origins = rows.origins.data_ptr()
        of.state, of.slot_bytes = state.data_ptr(), state.stride(0) * state.itemsize


class GatedConv:
    """A short convolution between two products, as LFM2 has it: b, c and x of a token are the first one's outputs, and
    c * conv(b * x) is the second one's input. Not thread-safe. Implements `Block`.
    """

    def __init__(
        self,
        team: Team,
        first: PackedLinear,
        last: PackedLinear,
        weight: Tensor,
        bias: Tensor | None,
        norm: PackedNorm | None = None,
    ) -> None:
        """
        Args:
            first: hidden -> 3 C.
            last: C -> hidden.
            weight: [C, K].
            bias: [C].
            norm: of the input; the result is added to the output then.
        """
        self._team, self._first, self._last = team, first.args(Epilogue.STORE, *norm_of(norm)), last.args(sum_of(norm))
        self._kept = first, last, weight, bias, norm
        self.workspace_bytes: int = max(first.workspace_bytes, last.workspace_bytes)
        self._tokens = ctypes.c_int64()
        self._first.rows = self._last.rows = ctypes.addressof(self._tokens)
        self.channels, self.width = weight.shape
        taps = weight.detach().T.float().contiguous()
        offsets = None if bias is None else bias.detach().float().contiguous()
        self._args = ConvArgs(
            weight=taps.data_ptr(),
            bias=None if offsets is None else offsets.data_ptr(),
            x_stride=self.channels,
            out_stride=self.channels,
            gates_stride=3 * self.channels,
            channels=self.channels,
            width=self.width,
        )
        self._layer = _Layer(team, CONV, self._args, taps, offsets)
        self._dtype, self._held = torch.float32, tuple[Tensor, ...]()
        self.steps: tuple[Step, ...] = (LINEAR, self._first), (CONV, self._args), (LINEAR, self._last)
        self._program = Program(team.library, *self.steps)

    def behind(self, norm: PackedNorm) -> "GatedConv":
        """The same, of the norm of its input, added to the output."""
        first, last, weight, bias, _ = self._kept
        return GatedConv(self._team, first, last, weight, bias, norm)

    def begin(self, state: Tensor, rows: StateRows) -> None:
        """Has the next run compute these rows; state [S, K, C] as `StateOps.conv` has it."""
        self._dtype, self._args.bfloat16 = state.dtype, _is_bfloat16(state)
        self._layer.begin(state, rows)

    def aim(self, source: Tensor, out: Tensor, workspace: int) -> None:
        """See `Block.aim`; behind `begin`."""
        tokens, channels, args = len(source), self.channels, self._args
        gates, between = torch.empty(tokens, 3 * channels), torch.empty(tokens, channels)
        inputs = torch.empty(tokens, channels, dtype=self._dtype)
        self._held = gates, between, inputs
        first, last = self._first, self._last
        first.input, first.input_stride = source.data_ptr(), source.stride(0)
        first.out, first.out_stride = gates.data_ptr(), gates.stride(0)
        args.gates, args.x, args.out = gates.data_ptr(), inputs.data_ptr(), between.data_ptr()
        last.input, last.input_stride = between.data_ptr(), channels
        last.out, last.out_stride = out.data_ptr(), out.stride(0)
        first.workspace = last.workspace = workspace
        self._tokens.value = tokens

    def __call__(self, x: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        """[T, hidden] of x [T, hidden]; state as `begin` has it."""
        source = x.float().contiguous()
        out = torch.empty_like(source)
        self.begin(state, rows)
        self.aim(source, out, self._team.workspace(self.workspace_bytes))
        self._team.run(self._program)
        return out.to(x.dtype)


class NativeStateOps:
    """Implements `StateOps` for float32 and bfloat16. Not thread-safe."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._layers: dict[tuple[str, int], _Layer] = {}
        """The layers, by kernel and address of the state in slot 0."""

    def conv(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, *, silu: bool
    ) -> Tensor:
        """See `StateOps.conv`."""
        channels, width = weight.shape

        def make() -> _Layer:
            own = weight.detach().T.float().contiguous()
            of_bias = None if bias is None else bias.detach().float().contiguous()
            args = ConvArgs(
                weight=own.data_ptr(),
                bias=None if of_bias is None else of_bias.data_ptr(),
                channels=channels,
                width=width,
                silu=silu,
                bfloat16=_is_bfloat16(x),
            )
            return _Layer(self._team, CONV, args, own, of_bias)

        layer = self._layer(CONV, state, make)
        x, args = token_rows(x), layer.args
        out = torch.empty((len(x), channels), dtype=x.dtype)
        args.x, args.x_stride = x.data_ptr(), x.stride(0)
        args.out, args.out_stride = out.data_ptr(), channels
        layer.run(state, rows)
        return out

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        time_step: TimeStep,
        state: Tensor,
        rows: StateRows,
    ) -> Tensor:
        """See `StateOps.ssd`."""
        tokens, heads, dim = x.shape
        groups, size = b.shape[1:]

        def make() -> _Layer:
            skip = None if d is None else d.detach().float().contiguous()
            bias = None if time_step.bias is None else time_step.bias.detach().float().contiguous()
            args = SsdArgs(
                d=None if skip is None else skip.data_ptr(),
                dt_bias=None if bias is None else bias.data_ptr(),
                heads=heads,
                groups=groups,
                dim=dim,
                size=size,
                dt_least=time_step.least,
                dt_most=time_step.most,
                softplus=time_step.softplus,
                bfloat16=_is_bfloat16(x),
            )
            return _Layer(self._team, SSD, args, skip, bias)

        layer = self._layer(SSD, state, make)
        x, b, c, dt = token_rows(x), token_rows(b), token_rows(c), token_rows(dt.to(x.dtype))
        out, args = torch.empty((tokens, heads, dim)), layer.args
        a = a.float().contiguous()
        args.x, args.x_stride = x.data_ptr(), x.stride(0)
        args.b, args.b_stride = b.data_ptr(), b.stride(0)
        args.c, args.c_stride = c.data_ptr(), c.stride(0)
        args.dt, args.dt_stride = dt.data_ptr(), dt.stride(0)
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        args.a = a.data_ptr()
        args.workspace = self._workspace("kvrelay_ssd_workspace", dim, size)
        layer.run(state, rows)
        return out

    def delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        rows: StateRows,
        *,
        normalized: bool,
    ) -> Tensor:
        """See `StateOps.delta`."""
        tokens, heads, dim = v.shape
        key_heads, key_dim = k.shape[1:]

        def make() -> _Layer:
            args = DeltaArgs(
                heads=heads,
                key_heads=key_heads,
                dim=dim,
                key_dim=key_dim,
                normalized=normalized,
                channels=g.dim() == 3,
                bfloat16=_is_bfloat16(v),
            )
            return _Layer(self._team, DELTA, args)

        layer = self._layer(DELTA, state, make)
        q, k, v = token_rows(q), token_rows(k), token_rows(v)
        g, beta = token_rows(g.float()), token_rows(beta.to(v.dtype))
        out, args = torch.empty((tokens, heads, dim), dtype=v.dtype), layer.args
        args.q, args.q_stride = q.data_ptr(), q.stride(0)
        args.k, args.k_stride = k.data_ptr(), k.stride(0)
        args.v, args.v_stride = v.data_ptr(), v.stride(0)
        args.g, args.g_stride = g.data_ptr(), g.stride(0)
        args.beta, args.beta_stride = beta.data_ptr(), beta.stride(0)
        args.out, args.out_stride = out.data_ptr(), out.stride(0)
        args.workspace = self._workspace("kvrelay_delta_workspace", dim, key_dim)
        layer.run(state, rows)
        return out

    def wkv(self, k: Tensor, v: Tensor, decay: Tensor, first: Tensor, state: Tensor, rows: StateRows) -> Tensor:
        """See `StateOps.wkv`."""
        tokens, channels = k.shape

        def make() -> _Layer:
            own = decay.detach().float().contiguous(), first.detach().float().contiguous()
            args = WkvArgs(
                decay=own[0].data_ptr(), first=own[1].data_ptr(), channels=channels, bfloat16=_is_bfloat16(k)
            )
            return _Layer(self._team, WKV, args, own)

        layer = self._layer(WKV, state, make)
        k, v = token_rows(k), token_rows(v)
        out, args = torch.empty((tokens, channels), dtype=k.dtype), layer.args
        args.k, args.k_stride = k.data_ptr(), k.stride(0)
        args.v, args.v_stride = v.data_ptr(), v.stride(0)
        args.out, args.out_stride = out.data_ptr(), channels
        layer.run(state, rows)
        return out

    def _layer(self, kernel: str, state: Tensor, make: Callable[[], _Layer]) -> _Layer:
        key = kernel, state.data_ptr()
        if key not in self._layers:
            self._layers[key] = make()
        return self._layers[key]

    def _workspace(self, function: str, dim: int, other: int) -> int:
        sized = getattr(self._team.library, function)
        sized.restype = ctypes.c_int64
        size: int = sized(ctypes.c_int64(dim), ctypes.c_int64(other))
        return self._team.workspace(4 * size * self._team.threads)


def _is_bfloat16(x: Tensor) -> bool:
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"dtype is {x.dtype}; allowed: float32, bfloat16")
    return x.dtype == torch.bfloat16
