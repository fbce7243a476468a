"""A worker on the hash model, of either role, which it can change: `python -m support.hash_worker --config FILE`.

Numbers that are orders (`support.orders`) or environment variables: HASH_STEP_SECONDS is the least duration of an
engine step, so that a fault can hit during a step. HASH_NEWS_SECONDS delays membership changes for this worker.
HASH_FETCH_SECONDS is what a copy of hidden states takes. HASH_FAILING_PID is the rank whose steps fail.
HASH_LATE_RANKS_SECONDS delays each step of all ranks but rank 0.

Environment variables: HASH_LAG is the runner's lag: with 1, a step's KV is there only when its result is asked for, and
is given to the hand-off before. HASH_BEAT_SECONDS is the time between two heartbeats. HASH_FRAME_BYTES is the size of
frames at most, in the place of `transfer.frame_bytes`, and may be less than is allowed there. HASH_LOAD_SECONDS is the
time that its model takes to load. HASH_COSTS makes its costs wrong (`support.wrong_costs`). HASH_ORDERS names the file
of the orders, which have failpoints and damage to frames (`support.damage`), too. CHAOS_DESK routes links through
proxies (`support.detours`).

With HASH_GROUPS=1 the model has a window and a state beside its first layer group.

With `speculation` on, whatever the method, half of its guesses are right (`support.guesses`). With HASH_STATES=1 it
guesses only behind prompts whose hidden states it has, and a wrong one ends it.

Whenever the worker has no request left, it checks the block pool's integrity; a violation ends the process.
"""

import asyncio
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from kvrelay.decode_worker.role import DecodeRole
from kvrelay.engine.build import engine_on
from kvrelay.engine.config import Dtype, EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.kv.layout import FloatDtype, KVLayout, LayerGroup
from kvrelay.engine.kv.sides import side_blocks
from kvrelay.engine.models.spec import ModelSpec
from kvrelay.engine.plan import StepOutput, StepPlan
from kvrelay.engine.ranks.collective import Place
from kvrelay.engine.runner.base import Runner
from kvrelay.engine.runner.leading import LeadingRunner, Ranks
from kvrelay.internal.v1.supervisor_pb2 import Member
from kvrelay.prefill_worker import kv_sender
from kvrelay.prefill_worker.role import PrefillRole
from kvrelay.rpc.heartbeat import HeartbeatClient
from kvrelay.rpc.identity import WorkerRole
from kvrelay.rpc.serve import main
from kvrelay.transfer import failpoints
from kvrelay.transfer.frames.frames import PoolFrames
from kvrelay.transfer.links.endpoint_loop import HandoffSetup
from kvrelay.transfer.protocol.handshake import cuts_of
from kvrelay.worker import server as worker_server
from kvrelay.worker import worker as worker_module
from kvrelay.worker.config import WorkerConfig
from kvrelay.worker.handoff import HandoffRole
from kvrelay.worker.server import WorkerServer
from support import damage, orders
from support.detours import DESK, detoured
from support.guesses import HashGuesses, HashHeads
from support.hash_runner import STATE, HashRunner, RankHashRunner, hash_spec, window_of
from support.orders import OrderedRules, Orders
from support.wrong_costs import mislead

MODULE = "support.hash_worker"
STEP_SECONDS = "HASH_STEP_SECONDS"
LAG = "HASH_LAG"
NEWS_SECONDS = "HASH_NEWS_SECONDS"
BEAT_SECONDS = "HASH_BEAT_SECONDS"
STATES = "HASH_STATES"
GROUPS = "HASH_GROUPS"
FRAME_BYTES = "HASH_FRAME_BYTES"
FETCH_SECONDS = "HASH_FETCH_SECONDS"
FAILING_PID = "HASH_FAILING_PID"
LATE_RANKS = "HASH_LATE_RANKS_SECONDS"
LOAD_SECONDS = "HASH_LOAD_SECONDS"
MAX_CONTEXT = 4096
WINDOW = 50
"""Tokens of the window."""
# 1 KiB per token, so that a link needs some time to send a frame.
WORKER_LAYOUT = KVLayout(layers=2, kv_heads=4, head_dim=16, block_size=8, dtype="float32")
# As many bytes in int8, so that hash models of both have the same KV bytes and yield the same tokens.
INT8_LAYOUT = replace(WORKER_LAYOUT, head_dim=62, dtype="int8")
LOOK_SECONDS = 0.02
"""Seconds between two looks at whether a membership change was held back for long enough."""
ORDERS = Orders()
KV_BYTES = 8 * 2**20
"""Size in bytes of a KV pool whose configured size is `auto`."""
ROLES: dict[WorkerRole, type[HandoffRole]] = {"prefill": PrefillRole, "decode": DecodeRole}


class SlowHashRunner(HashRunner):
    """A hash runner with slow steps. Drafts make them slower, so that no stream is faster than without."""

    def fetch(
        self, states: Tensor, places: tuple[int, ...], dtype: FloatDtype, then: Callable[[Tensor], object]
    ) -> None:
        def late(copy: Tensor) -> None:
            time.sleep(ORDERS.number(FETCH_SECONDS))  # with a lag, on a thread of its own
            then(copy)

        super().fetch(states, places, dtype, late)

    def run(self, plan: StepPlan) -> StepOutput:
        time.sleep(ORDERS.number(STEP_SECONDS) * max(Counter(plan.handles).values()))
        return super().run(plan)


class SlowRankRunner(RankHashRunner):
    """A rank of the hash model with slow steps."""

    def run(self, plan: StepPlan) -> StepOutput:
        time.sleep(ORDERS.number(STEP_SECONDS) * max(Counter(plan.handles).values()))
        if self.place.rank:
            time.sleep(ORDERS.number(LATE_RANKS))
        if os.getpid() == ORDERS.number(FAILING_PID):
            raise RuntimeError("a step fails, as ordered")
        return super().run(plan)


def build(
    folder: Path, dtype: Dtype, config: EngineConfig, loaded: Callable[[float], None], ranks: Ranks | None = None
) -> tuple[Engine, Runner]:
    """Replaces `build_engine` for the hash model, with WORKER_LAYOUT's block size unless the options have one."""
    if LOAD_SECONDS in os.environ:
        print("loading", file=sys.stderr, flush=True)
        time.sleep(float(os.environ[LOAD_SECONDS]))
    layout, spec = layout_of(config), spec_of(folder)
    config = replace(config, block_size=layout.block_size).on("cpu")
    blocks = (config.kv_memory_bytes or KV_BYTES) // layout.block_bytes
    sides: list[tuple[LayerGroup, int]] = []
    if float(os.environ.get(GROUPS, "0")):
        sides = [(group, side_blocks(group, config)) for group in (window_of(WINDOW, layout), STATE)]
    lag = int(os.environ.get(LAG, "0"))
    if ranks is None:
        runner: Runner = SlowHashRunner(blocks, layout, spec, lag=lag, sides=sides)
    else:
        runner = LeadingRunner(SlowRankRunner(ranks.place, blocks, layout, spec, lag=lag), ranks)  # type: ignore[arg-type]  # has no heads
    loaded(1.0)
    proposer = HashHeads if float(os.environ.get(STATES, "0")) else HashGuesses
    guesses = None if config.speculation.method == "off" else proposer(WORKER_LAYOUT)
    return engine_on(runner, config, guesses), runner


def build_rank(folder: Path, dtype: Dtype, config: EngineConfig, place: Place) -> Runner:
    """Replaces `kvrelay.engine.build.build_rank`, as `build` replaces `build_engine`. This process obeys the orders."""
    if orders.VARIABLE in os.environ:
        arm(place.rank)
        rules = damage_rules(place.rank)
        ranks: Any = sys.modules["__main__"]  # it makes the rank's frames when its runner is there
        ranks.PoolFrames = lambda *given: damage.DamagedFrames(PoolFrames(*given), rules)
    layout = layout_of(config)
    blocks = (config.kv_memory_bytes or KV_BYTES) // layout.block_bytes
    return SlowRankRunner(place, blocks, layout, spec_of(folder), lag=int(os.environ.get(LAG, "0")))


def layout_of(config: EngineConfig) -> KVLayout:
    layout = INT8_LAYOUT if config.kv_dtype == "int8" else WORKER_LAYOUT
    return replace(layout, block_size=config.block_size or layout.block_size)


def spec_of(folder: Path) -> ModelSpec:
    spec = hash_spec(MAX_CONTEXT)
    if folder.name == "pico":
        return spec
    return replace(spec, fingerprint=f"{spec.fingerprint}-{folder.name}")  # as if it had other weights


def late(role: type[HandoffRole]) -> type[HandoffRole]:
    """A subclass of `role` that gets membership changes as late as is ordered."""

    class Late(role):  # type: ignore[misc, valid-type]  # a mixin over a value
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.held_back: deque[tuple[float, list[Member]]] = deque()

        def members_changed(self, members: Sequence[Member]) -> None:
            self.held_back.append((time.monotonic(), list(members)))
            self.look()

        def look(self) -> None:
            while self.held_back and time.monotonic() - self.held_back[0][0] >= ORDERS.number(NEWS_SECONDS):
                super().members_changed(self.held_back.popleft()[1])
            if self.held_back:
                asyncio.get_running_loop().call_later(LOOK_SECONDS, self.look)

    return Late


def hash_server(config: WorkerConfig) -> WorkerServer:
    mislead(config)
    return WorkerServer(config, {name: armed(role) for name, role in ROLES.items()}, build, f"{MODULE}:build_rank")


def armed(role: type[HandoffRole]) -> type[HandoffRole]:
    """A subclass of `role` that does what the environment says."""
    if DESK in os.environ:
        role = changed(role, detoured)
    if orders.VARIABLE in os.environ:
        rules = damage_rules()
        damaged = lambda setup, _: replace(setup, frames=damage.DamagedFrames(setup.frames, rules))  # noqa: E731  # an argument
        role = late(changed(role, damaged))
    return role


def damage_rules(rank: int = 0) -> OrderedRules[damage.Rule]:
    return OrderedRules(ORDERS, damage.parse, lambda rule: rule.startswith(damage.PLACES), rank)


def arm(rank: int = 0) -> None:
    """Has the failpoints of this process obey the orders."""
    failpoints.arm(OrderedRules(ORDERS, failpoints.parse, lambda rule: not rule.startswith(damage.PLACES), rank))


def changed(role: type[HandoffRole], change: Callable[[HandoffSetup, str], HandoffSetup]) -> type[HandoffRole]:
    """A subclass of `role` with another setup of the hand-off, made of the usual one and the worker's name."""

    class Changed(role):  # type: ignore[misc, valid-type]  # a mixin over a value
        def make_setup(self) -> HandoffSetup:
            return change(super().make_setup(), self.worker.config.name)

    return Changed


if __name__ == "__main__":
    worker_module.CHECK_SECONDS = 0.0
    if orders.VARIABLE in os.environ:
        arm()
    if BEAT_SECONDS in os.environ:
        beat = float(os.environ[BEAT_SECONDS])
        worker_server.HeartbeatClient = partial(HeartbeatClient, interval=beat)  # type: ignore[misc, assignment]  # a class
    if FRAME_BYTES in os.environ:
        kv_sender.cuts_of = lambda routes, frame_bytes: cuts_of(routes, int(os.environ[FRAME_BYTES]))
    sys.exit(main(WorkerConfig, hash_server, "A kvrelay worker that runs the hash model."))
