"""One step on several ranks: rank 0's engine has a `LeadingRunner`, every other rank runs `follow`.

    rank 0       plan -> write -> send to all -> launch its own part -> result: the tokens
    other ranks  read -> launch their part -> result, which nobody needs

All ranks launch the same plans and ask for their results in the same order, so their collectives meet. Rank 0 decides
everything; the others know no request and no scheduler.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgpack  # type: ignore[import-untyped]  # it ships no types

from kvrelay.engine.kv.writes import WRITTEN, KVWrites, StepWrites
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.ranks.collective import Place
from kvrelay.engine.ranks.plans import PlanReader, PlanWriter
from kvrelay.engine.runner.base import ModelRunner, Runner, StepHandle, chain_of_steps

STEP, RESULT, WARM_UP = b"s", b"r", b"w"
"""First byte of a message to the other ranks."""


class Ranks(Protocol):
    """The ranks of this worker, as rank 0's engine sees them."""

    @property
    def place(self) -> Place:
        """Rank 0's own place."""
        ...

    def send(self, message: bytes) -> None:
        """Sends a message to all other ranks, in order.

        Raises:
            CollectiveError: a rank is lost, or doesn't take it in time.
        """

    def committed(self, step: int) -> None:
        """Notes that rank 0 has the result of the step with this number. Other ranks may still compute the step; later
        commands of rank 0 may depend on it."""


class LeadingStep:
    """A step of all ranks; implements `StepHandle`."""

    def __init__(self, step: int, own: StepHandle, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks
        self.written = StepWrites(step, own.written)

    def result(self) -> StepOutput:
        self._ranks.send(RESULT)
        out = self._own.result()
        self._ranks.committed(self.written.step)
        self.written.become(WRITTEN)
        return out


class LeadingRunner:
    """Implements `Runner` for rank 0: its own runner, whose steps the other ranks run too."""

    def __init__(self, own: Runner, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks
        self._writer = PlanWriter()
        self.lag, self.spec = own.lag, own.spec
        self.states_shape, self.expert_loads = own.states_shape, own.expert_loads
        self.layout, self.pool, self.pools = own.layout, own.pool, own.pools
        self.cache_layout, self.whole_cache_layout = own.cache_layout, own.whole_cache_layout
        self.fetch = own.fetch

    @property
    def prefill_attention(self) -> str:
        return self._own.prefill_attention

    def warm_up(self, keep: tuple[int, ...] = ()) -> None:
        """See `Runner.warm_up`."""
        self._ranks.send(WARM_UP + msgpack.packb(keep))
        self._own.warm_up(keep)

    def launch(self, plan: StepPlan) -> StepHandle:
        """See `Runner.launch`."""
        self._ranks.send(STEP + self._writer.write(plan))
        own = self._own.launch(plan)
        if self.lag:
            return LeadingStep(plan.step, own, self._ranks)
        self._ranks.committed(plan.step)  # it has ended within the launch
        return own


class LeadingModelRunner(LeadingRunner):
    """Implements `ModelRunner` for rank 0."""

    chain = chain_of_steps

    def __init__(self, own: ModelRunner, ranks: Ranks) -> None:
        super().__init__(own, ranks)
        self.model, self.parts = own.model, own.parts


def follow(
    runner: Runner,
    receive: Callable[[], bytes | None],
    on_warm: Callable[[], object],
    on_launch: Callable[[int, KVWrites], object],
) -> None:
    """Runs what rank 0 sends, until `receive` returns None.

    Args:
        receive: waits for the next message.
        on_warm: called when the runner has warmed up.
        on_launch: called with each step's number and KV writes when it is launched.

    Raises:
        Whatever the runner raises; the rank must not go on.
    """
    reader, launched = PlanReader(), deque[StepHandle]()
    while (message := receive()) is not None:
        if message[:1] == WARM_UP:
            runner.warm_up(msgpack.unpackb(message[1:], use_list=False))
            on_warm()
        elif message == RESULT:
            launched.popleft().result()
        else:
            plan = reader.read(message[1:])
            step = runner.launch(plan)
            on_launch(plan.step, step.written)
            if runner.lag:
                launched.append(step)
