"""The supervisor's side: from heartbeats to decisions, to commands, and to what is shown of them."""

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest

from kvrelay.cluster.asking.status import scaling_json, scaling_lines
from kvrelay.cluster.fleet.desired import Refused
from kvrelay.cluster.membership.membership import Membership
from kvrelay.cluster.scaling import scaler as scaler_module
from kvrelay.cluster.scaling.config import ScalingConfig
from kvrelay.cluster.scaling.scaler import KEPT, Scaler
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_READY,
    ROLE_DECODE,
    ROLE_PREFILL,
    ROLE_ROUTER,
    Member,
    Refusal,
    Role,
    Scaling,
)
from kvrelay.internal.v1.worker_pb2 import Blocks, Costs, Load, Requests, Traffic
from kvrelay.rpc.identity import MemberRole

CONFIG = ScalingConfig(enabled=True, ttft_target_seconds=1.0, tpot_target_seconds=0.1)
NUMBERS: dict[MemberRole, Role] = {"prefill": ROLE_PREFILL, "decode": ROLE_DECODE}


class FakeFleet:
    """Does what it is told at once, or refuses it."""

    def __init__(self) -> None:
        self.roles: dict[str, MemberRole] = {f"worker-{n}": "prefill" if n < 4 else "decode" for n in range(8)}
        self.refuses = False
        self.desired: Any = SimpleNamespace(rolling=False, count=lambda role: list(self.roles.values()).count(role))

    async def set_role(self, name: str, role: MemberRole) -> int:
        if self.refuses:
            raise Refused(Refusal.CODE_BUSY, f"{name} is about to end")
        self.roles[name] = role
        return 1

    async def scale(self, counts: dict[MemberRole, int]) -> int:
        return 1


class Cluster:
    """Members that report prompts without end: 50 a second, which four prefill workers can't compute."""

    def __init__(self, config: ScalingConfig = CONFIG) -> None:
        self.now = 0.0
        self.fleet = FakeFleet()
        self.membership = Membership(clock=lambda: self.now)
        self.config = config
        self.scaler = Scaler(lambda: self.config, self.membership, self.fleet, lambda: self.now)  # type: ignore[arg-type]  # a fake

    async def run(self, seconds: float) -> Scaling:
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for name, role in self.fleet.roles.items():
                steps = round(self.now * 10)
                tokens, prompts = (512, 512) if role == "prefill" else (10, 0)
                load = Load(
                    blocks=Blocks(total=1000, free=500, held=500, size=16),
                    requests=Requests(running=10, free_slots=50),
                    pending_tokens=8000 if role == "prefill" else 10,
                    computed_tokens=steps * tokens,
                    prompt_tokens=steps * prompts,
                    costs=Costs(fixed=0.01, sequence=0.002, prompt_fixed=0.05, token=0.0001, chunk=512),
                )
                self.beat(name, NUMBERS[role], load)
            count = round(self.now * 50)
            traffic = Traffic(
                requests=count,
                prompt_tokens=500 * count,
                first_tokens=count,
                ttft_attained=count // 4,
                streams=count,
                tpot_attained=count,
                completion_tokens=50 * count,
                unqueued_seconds=0.1 * count,
                queued_prompts=30,
                queued_tokens=15_000,
                prefill_queue_seconds=2.0 * count,
            )
            self.beat("router-0", ROLE_ROUTER, Load(traffic=traffic))
            await self.scaler.tick()
        return self.scaler.status()

    def beat(self, name: str, role: Role, load: Load) -> None:
        roles = [ROLE_PREFILL, ROLE_DECODE] if role != ROLE_ROUTER else []
        member = Member(name=name, incarnation=f"{name} {role}", role=role, state=MEMBER_STATE_READY, roles=roles)
        self.membership.attend(member, load)


def test_a_decision_is_followed_and_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    with caplog.at_level("INFO"):
        status = asyncio.run(cluster.run(6))
    assert list(cluster.fleet.roles.values()).count("prefill") > 4
    decision = status.decisions[0]
    assert decision.reason.startswith("4:4 to ")
    assert "prefill would be at" in decision.reason
    assert set(decision.moves) == {name for name in list(cluster.fleet.roles)[4:] if name in decision.moves}
    assert set(decision.moves.values()) == {ROLE_PREFILL}
    assert not decision.refused
    logged = [record for record in caplog.records if record.message == "scaling"]
    assert [record.reason for record in logged] == [each.reason for each in status.decisions]  # type: ignore[attr-defined]  # an extra field


def test_a_failure_is_told_once_and_ends_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = []

    async def tick() -> None:
        ticks.append(len(ticks))
        if len(ticks) < 4:
            raise ZeroDivisionError("float division by zero")
        raise asyncio.CancelledError

    scaler = Cluster().scaler
    monkeypatch.setattr(scaler_module, "TICK_SECONDS", 0.0)
    monkeypatch.setattr(scaler, "tick", tick)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scaler.run())
    assert len(ticks) == 4
    (line,) = [record for record in caplog.records if record.message == "the scaler can't decide"]
    assert line.exc_info is not None


def test_off_it_measures_and_changes_nothing() -> None:
    cluster = Cluster(ScalingConfig(ttft_target_seconds=1.0))
    status = asyncio.run(cluster.run(20))
    assert not status.enabled
    assert not status.decisions
    assert list(cluster.fleet.roles.values()).count("prefill") == 4
    assert status.prefill_pressure > 1.0 > status.decode_pressure
    assert status.ttft_attained == pytest.approx(0.25, abs=0.02)
    assert status.tpot_attained == 1.0
    assert status.prefill_queue == 30
    assert status.prefill_queue_seconds == pytest.approx(2.0 * 50 * 19.5)


def test_another_configuration_of_the_cluster_counts_at_once() -> None:
    cluster = Cluster(ScalingConfig(ttft_target_seconds=1.0))
    asyncio.run(cluster.run(10))
    cluster.config = CONFIG
    status = asyncio.run(cluster.run(6))
    assert status.enabled
    assert status.decisions
    cluster.config = ScalingConfig(ttft_target_seconds=5.0)
    status = asyncio.run(cluster.run(0.5))
    assert (status.enabled, status.ttft_target_seconds) == (False, 5.0)


def test_a_refusal_is_told_and_tried_again_later() -> None:
    cluster = Cluster()
    cluster.fleet.refuses = True
    status = asyncio.run(cluster.run(6))
    assert status.decisions[0].refused.endswith("is about to end")
    assert not status.decisions[0].moves
    cluster.fleet.refuses = False
    status = asyncio.run(cluster.run(10))
    assert list(cluster.fleet.roles.values()).count("prefill") > 4
    assert not status.decisions[-1].refused
    assert len(status.decisions) <= KEPT


def test_nothing_is_changed_during_a_rolling_change() -> None:
    cluster = Cluster()
    cluster.fleet.desired.rolling = True
    assert not asyncio.run(cluster.run(20)).decisions


def test_what_is_shown_names_targets_pressures_and_reasons() -> None:
    status = asyncio.run(Cluster().run(6))
    first, *decisions = scaling_lines(status)
    assert first.startswith("scaling on   TTFT within 1 s: 25 %   TPOT within 100 ms: 100 %")
    assert len(decisions) == min(3, len(status.decisions))
    assert status.decisions[-1].reason in decisions[-1]
    shown = scaling_json(status)
    assert shown["enabled"] is True
    assert shown["prefill"]["pressure"] > 0
    assert set(shown["decisions"][0]["roles"].values()) == {"prefill"}
    assert list(scaling_lines(Scaling())) == []
    unknown = scaling_json(Scaling())
    assert unknown["ttft"]["attained"] is None
    assert not any(isinstance(value, float) and math.isnan(value) for value in unknown.values())
