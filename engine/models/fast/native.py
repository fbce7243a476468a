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
it has chosen, the beginning of the next pass (`native/passes.h`). Behind the last layer's attention, such a step
computes only the tokens behind which one is chosen: for a chunk of a prompt that isn't the last one, none.

`kernel_steps.py` has the instructions and their buffers, `native_experts.py` the layers with experts.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.attention.base import Attention
from kvrelay.engine.attention.native import NativeAttention
from kvrelay.engine.config import ExpertExchange
from kvrelay.engine.models.fast.decoder import NO_TAPS, Layer, Taps, Weights, tap
from kvrelay.engine.models.fast.kernel_steps import KernelSteps, Pause, Step, Tap, packed
from kvrelay.engine.models.fast.native_experts import NativeExperts
from kvrelay.engine.models.loads import ExpertLoads
from kvrelay.engine.models.reading.config import ModelConfig
from kvrelay.engine.plan import StepPlan
from kvrelay.engine.ranks.collective import ALONE, Place
from kvrelay.engine.ranks.spans import even_span
from kvrelay.engine.sampling.native import pack_draws
from kvrelay.engine.sampling.sampler import Draw
from kvrelay.kernels.cpu.packed import (
    BLOCK,
    EMBED,
    EmbedArgs,
    Epilogue,
    PackedLinear,
)
from kvrelay.kernels.cpu.passes import FOLLOW, GATHER, PassArgs, TokenRows
from kvrelay.kernels.cpu.program import Buffer, Program, Team
from kvrelay.kernels.cpu.sample import SAMPLE, SampleArgs, workspace_floats


def fits(config: ModelConfig) -> bool:
    """Whether the kernels support a model's shape: its gate and up projections must end at a block's border."""
    experts = config.traits.experts
    if experts is not None and experts.dense_layers == 0:
        return True
    return not config.traits.gated or config.intermediate_size % BLOCK == 0


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
        # Rows of a tied embedding are looked up in the packed head, so it is held once.
        self.embedding = None if config.tie_embeddings else weights.embedding
        """As `Decoder.embedding`."""
        self._layers = tuple(map(_with_float_norms, weights.layers))
        attention.turn_by(weights.rotary)
        self._rotations = [config.distinct_ropes.index(rope) for rope in config.ropes]
        self._attention = attention
        self._steps = KernelSteps(config, team, place.group)
        self.experts = NativeExperts(self._steps, self._layers, exchange)
        """The layers of experts."""
        norm = weights.norm
        self._norm = None if norm is None else norm.weight.float()
        self._last_norm = None if norm is None else norm.times(config.traits.logits_scale, torch.float32)
        self._head = None if weights.head is None else packed(weights.head)
        self._tokens = ctypes.c_void_p()
        self._cuts: tuple[int, ...] = ()
        """Layers, in ascending order, in front of which a program of its own begins."""
        self._numbers, self._largest = Buffer(np.int64), Buffer(np.float32)
        """Buffers of a step that chooses: its tokens, the places of the rows' last tokens, and the chosen tokens; and
        the largest logit of each choice."""
        self._packed = Buffer(np.uint8)
        self._passes = ctypes.c_int64()
        self._pass_args = PassArgs(
            rows=ctypes.addressof(self._steps.rows),
            tokens=ctypes.addressof(self._tokens),
            passes=ctypes.addressof(self._passes),
            step=attention.step,
        )
        self._attended = 0
        """Kernels of the layers up to the last one's attention."""
        self._choosing: Program | None = None
        """Layers and all that is behind them; None until it is recorded anew, with new buffers."""
        self._head_input: Tensor | None = None
        """[rows, hidden] normed input of the head, for layer norms."""
        self._record(64)
        self._logits_capacity = 0
        if self._head is None:
            return
        self._sample_args = SampleArgs(rows=ctypes.addressof(self._steps.rows), width=self._head.outputs)
        self._pass_args.sample = ctypes.addressof(self._sample_args)
        self._sample_space = torch.empty(workspace_floats(team.threads, self._head.outputs))
        self._sample_args.workspace = self._sample_space.data_ptr()
        self._make_logits(self._head, 1)

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
        self._steps.rows.value = count
        hidden = self._steps.residual[:count, : self.config.hidden_size]
        if self._head is None:
            hidden.copy_(tokens)
        else:
            self._tokens.value = tokens.data_ptr()
        self.experts.begin(count)
        for pause in self._steps.run(self._programs[self.experts.exchange_of(count)], count):
            if isinstance(pause, Tap):
                tap(taps, pause.layer, hidden, self.config.traits.residual_scale)
            else:
                self.experts.move(pause)
        tap(taps, last, hidden, self.config.traits.residual_scale)
        self.experts.end()
        return hidden

    @property
    def expert_loads(self) -> ExpertLoads | None:
        """Loads of the experts; None without layers of experts."""
        return self.experts.loads

    def measure(self) -> None:
        """Measures a layer of experts in both ways, if each step is to take the cheaper one. All ranks of the stage
        make this call.

        Raises:
            CollectiveError: another rank is lost.
        """
        self.experts.measure(self._make_room)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab] of rows of `forward`'s result, [N, hidden]; valid until the next call.

        A rank has the logits of its part of the vocabulary, and those of later pipeline stages have none.
        """
        count = len(hidden)
        self._make_room(0, count)
        self._steps.rows.value = count
        first, last = self._head_steps[0][1], self._head_steps[-1][1]
        first.input, first.input_stride = hidden.data_ptr(), hidden.stride(0)
        # A longer step may have made a new workspace since.
        last.workspace = self._steps.workspace.data_ptr()
        self._steps.team.run(self._head_program)
        return self._logits[:count, : self._vocabulary.count]

    def choose(
        self, plan: StepPlan, rows: NDArray[np.int64], draws: Sequence[Draw], count: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Computes a step and chooses a token behind each of `rows`, then one behind that, and so on, in one call. For
        models on one rank.

        Args:
            plan: its block tables have room for `count` - 1 tokens more of each row.
            rows: [R] of the plan, ascending; all of them if `count` is above 1, and none if only KV is wanted.
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
        self._steps.rows.value, self._passes.value = tokens, count
        self._tokens.value = address = self._numbers.address
        args, sample = self._pass_args, self._sample_args
        args.last, args.chosen = address + 8 * tokens, each
        args.draws = sample.draws = pack_draws(draws, self._packed) if draws else 0
        sample.tokens, sample.largest = address + 8 * (tokens + each), self._largest.address
        self._steps.team.run(self._choosing, self._passes)
        if self._passes.value < 0:
            raise MemoryError
        shape = count, each
        return numbers[tokens + each :].reshape(shape).tolist(), largest.reshape(shape).tolist()

    def _record_choosing(self, linear: PackedLinear) -> Program:
        """Layers, the head and all that is behind it, with the present buffers."""
        args, sample = self._pass_args, self._sample_args
        args.gathered = tuple(map(TokenRows.of, self._steps.behind_attention))
        sample.input, sample.input_stride = self._logits.data_ptr(), self._logits.stride(0)
        head = self._steps.project(linear, Epilogue.STORE, self._steps.residual, self._logits, self._last_norm)
        before, rest = self._layer_steps[: self._attended], self._layer_steps[self._attended :]
        behind = *rest, *head, (SAMPLE, sample), (FOLLOW, args)
        return Program(self._steps.team.library, *before, (GATHER, args), *behind)

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
        self._head_steps = self._steps.project(
            head, Epilogue.STORE, self._steps.residual, self._logits, self._last_norm, self._head_input
        )
        self._head_program = Program(self._steps.team.library, *self._head_steps)
        self._choosing = None

    def _record(self, capacity: int) -> None:
        """Records the program with new buffers, for steps of up to `capacity` tokens."""
        config, layers, steps = self.config, self._layers, self._steps
        self._capacity = capacity
        steps.make_buffers(capacity, max(linear.workspace_bytes for linear in self.linears()))
        self.experts.make_buffers(capacity)
        summed: list[Step | Pause] = []
        if self._head is not None:
            summed = [(EMBED, self._embed(self._head)), *steps.sum(steps.residual, steps.residual)]
        sent = summed.copy()
        attended = 0
        for index, layer in enumerate(layers):
            before: list[Step | Pause] = []
            if config.first_layer + index in self._cuts:
                before.append(Tap(config.first_layer + index))
            before += steps.project(layer.qkv, Epilogue.STORE, steps.residual, steps.qkv, layer.input_norm)
            before += steps.joint_norms(layer.joint_norms)
            before += self._attention.record(
                index,
                steps.qkv.data_ptr(),
                steps.qkv.stride(0),
                steps.heads.data_ptr(),
                steps.heads.stride(0),
                layer.qk_norm,
                self._rotations[index],
                layer.sinks,
            )
            attended = len(summed) + len(before)
            if layer.router is not None:
                summed += [*before, *self.experts.layer_steps(layer)]
                sent += [*before, *self.experts.dispatched_steps(layer)]
                continue
            source = steps.normed if config.traits.parallel else steps.residual
            before += steps.add(layer.output, steps.heads, layer.output_norm)
            before += steps.project(layer.gate_up, steps.activation, source, steps.inner, layer.mlp_norm)
            before += steps.add(layer.down, steps.inner, layer.down_norm)
            summed += before
            sent += before
        self._layer_steps = [step for step in summed if isinstance(step, tuple)]
        self._attended = sum([isinstance(step, tuple) for step in summed[:attended]])
        self._programs = {"all_reduce": steps.cut(summed)}
        if self.experts.dispatches:
            self._programs["all_to_all"] = steps.cut(sent)
        self._choosing = None

    def linears(self) -> Iterator[PackedLinear]:
        """The packed weights: four of each layer, those of routers and of MLPs beside experts, and the head if the rank
        has it."""
        for layer in self._layers:
            yield from map(packed, (layer.qkv, layer.output, layer.gate_up, layer.down))
            beside = layer.router, layer.shared_gate_up, layer.shared_down
            yield from (packed(linear) for linear in beside if linear is not None)
        if self._head is not None:
            yield self._head

    def _embed(self, linear: PackedLinear) -> EmbedArgs:
        table, head = self.embedding, linear.args(Epilogue.STORE)
        return EmbedArgs(
            rows=ctypes.addressof(self._steps.rows),
            tokens=ctypes.addressof(self._tokens),
            weight=head.weight if table is None else table.data_ptr(),
            scales=head.scales,
            zeros=head.zeros,
            minima=head.minima,
            group=head.group,
            first=self._vocabulary.begin,
            count=self._vocabulary.count,
            out=self._steps.residual.data_ptr(),
            out_stride=self._steps.residual.stride(0),
            width=self.config.hidden_size,
            type=head.type if table is None else int(table.dtype == torch.bfloat16),
            scale=self.config.traits.embedding_scale / self.config.traits.residual_scale,
            packed=table is None,
        )


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
