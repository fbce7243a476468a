"""Interface of a runner, as the engine needs it. No torch: the engine's loop is also tested without it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvrelay.engine.kv.layout import CacheLayout, FloatDtype, KVLayout
from kvrelay.engine.kv.writes import WRITTEN, KVWrites
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.states import StatesShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvrelay.engine.kv.pool import KVPool
    from kvrelay.engine.models.fast.decoder import Model
    from kvrelay.engine.models.fast.parts import Parts
    from kvrelay.engine.models.loads import ExpertLoads


class StepHandle(Protocol):
    """A step that was launched."""

    @property
    def written(self) -> KVWrites:
        """The step's KV writes, which may end before its result is there."""
        ...

    def result(self) -> StepOutput:
        """Waits until the step has ended. Called once per step, in the order of the launches."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The handle of a step that `launch` computed to its end."""

    output: StepOutput

    @property
    def written(self) -> KVWrites:
        return WRITTEN

    def result(self) -> StepOutput:
        return self.output


class Runner(Protocol):
    """A model on a device: owns the weights, the KV pool and the attention backend. Not thread-safe."""

    @property
    def lag(self) -> int:
        """Steps that may be in flight when another one is launched: 0 if `launch` computes the step, else 1."""
        ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def pool(self) -> "KVPool": ...

    @property
    def cache_layout(self) -> CacheLayout:
        """All that the model, or this rank's part of it, keeps of a sequence; `layout` is its first track."""
        ...

    @property
    def whole_cache_layout(self) -> CacheLayout:
        """Layout of what all ranks together keep of a sequence: `cache_layout` if there is one rank."""
        ...

    @property
    def pools(self) -> "tuple[KVPool, ...]":
        """Pool of each track of `cache_layout`; `pool` is the first one."""
        ...

    @property
    def states_shape(self) -> StatesShape | None:
        """Shape of the hidden states that steps can keep (`StepPlan.keep`); None if they can keep nothing."""
        ...

    @property
    def prefill_attention(self) -> str:
        """Name of the kernel that attends for prompts, of `PrefillKernel`; empty on CPU."""
        ...

    @property
    def expert_loads(self) -> "ExpertLoads | None":
        """Tokens that each of the model's experts has computed; None without experts, or where nothing counts them."""
        ...

    def fetch(
        self, states: "Tensor", places: tuple[int, ...], dtype: FloatDtype, then: "Callable[[Tensor], object]"
    ) -> None:
        """Copies hidden states of a step that has ended to host memory, in this type and contiguous; calls `then` with
        the copy, in the order of the calls: at once, or later on a thread of its own if that takes the device's time.

        Args:
            states: [n, layers, hidden].
            places: of the layers to copy.
        """

    def warm_up(self, keep: tuple[int, ...] = ()) -> None:
        """Runs everything that would make the first steps slow. May overwrite KV blocks: call it before there are
        sequences.

        Args:
            keep: what the plans of an engine with its own proposer begin with (`StepPlan.keep`).
        """

    def launch(self, plan: StepPlan) -> StepHandle:
        """Starts a step: computes the plan's tokens, writes their KV and samples where asked.

        With a lag of 1 the step runs behind the one launched before it, whose tokens `plan.feeds` may refer to.
        """
        ...


class ChainRunner(Runner, Protocol):
    """The runner of a draft model."""

    def chain(self, plan: StepPlan, count: int) -> list[list[int]]:
        """The tokens that follow each row, as steps that compute one after the other would sample them.

        Args:
            plan: whose rows all sample; nothing changes their logits. Its block tables have room for `count` - 1 tokens
                more of each row.
            count: tokens of each row, 1 or more.

        Returns:
            [R] lists of one length: `count`, or fewer if some row's logits aren't finite there.
        """
        ...


class ModelRunner(ChainRunner, Protocol):
    """A runner of a model from a checkpoint, or of one rank's part of it, which may have heads beside it."""

    @property
    def model(self) -> "Model": ...

    @property
    def parts(self) -> "Parts": ...


def chain_of_steps(runner: Runner, plan: StepPlan, count: int) -> list[list[int]]:
    """`ChainRunner.chain` of a runner that has no shorter way: a whole step for each token."""
    found: list[list[int]] = [[] for _ in range(plan.num_rows)]
    while True:
        out = runner.launch(plan).result()
        if out.nonfinite:
            return found
        sampled = [token for token in out.tokens if token is not None]
        for tokens, token in zip(found, sampled, strict=True):
            tokens.append(token)
        if len(found[0]) == count:
            return found
        plan = replace(
            plan,
            tokens=np.array(sampled, np.int32),
            starts=plan.starts + plan.lengths,
            lengths=np.ones(plan.num_rows, np.int32),
        )


def warm_up_steps(runner: Runner, lengths: Sequence[int]) -> None:
    """Runs a prompt of each of these lengths that fits into the pools, and a decode step behind it. Overwrites KV
    blocks."""
    blocks = min(pool.num_blocks for pool in runner.pools)
    capacity = min(blocks * runner.cache_layout.block_size, runner.spec.max_context)
    for step, length in enumerate(lengths):
        if length < capacity:
            runner.launch(warm_up_plan(runner.cache_layout, 2 * step, 0, length)).result()
            runner.launch(warm_up_plan(runner.cache_layout, 2 * step + 1, length, 1)).result()


def warm_up_plan(cache: CacheLayout, step: int, start: int, length: int) -> StepPlan:
    """A step of one row of `length` tokens behind `start` others; every second one is sampled at a temperature."""
    blocks = np.arange(-(-(start + length) // cache.block_size), dtype=np.int32)[None]
    slot = np.zeros((1, 1), np.int32)
    return StepPlan(
        step=step,
        handles=(0,),
        tokens=np.zeros(length, np.int32),
        starts=np.array([start], np.int32),
        lengths=np.array([length], np.int32),
        block_tables=blocks,
        sample=np.array([True]),
        sampling=(SamplingParams(temperature=float(step % 2)),),
        generated=np.zeros(1, np.int32),
        side_tables=tuple(slot if group.kind == "state" else blocks for group in cache.side_groups),
    )
