"""The policy: what it decides, and that it leaves traffic alone that only varies."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.cluster.scaling.config import ScalingConfig
from kvrelay.cluster.scaling.forecast import Split, forecast
from kvrelay.cluster.scaling.policy import CONFIRM_SECONDS, GAIN, GROW_SECONDS, Decision, Policy
from kvrelay.cluster.scaling.signals import PoolRole, Signals
from kvrelay.costs.step import StepCost
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, ROLE_DECODE, ROLE_PREFILL, Member, MemberStatus
from kvrelay.internal.v1.worker_pb2 import Load, Requests
from kvrelay.rpc.identity import ROLES

CONFIG = ScalingConfig(enabled=True, ttft_target_seconds=1.0, tpot_target_seconds=0.1)
TICK = 0.5
HALVES = Split(4, 4)
CALM = Signals(
    prefill=4,
    decode=4,
    arrivals=10.0,
    arrivals_counted=40,
    prompt_tokens=500.0,
    cached_tokens=0.0,
    backlog_tokens=500.0,
    chunk_tokens=512.0,
    prefill_step=StepCost(prompt_fixed=0.02, token=0.0002),
    streams=40.0,
    queued_streams=0.0,
    stream_tokens=100.0,
    young_tokens=100.0,
    stream_slots=64.0,
    decode_step=StepCost(fixed=0.03, sequence=0.0005),
    context_tokens=550.0,
    in_place_tokens=0.0,
    unqueued_seconds=0.15,
)
FULL_PREFILL = replace(CALM, arrivals=50.0, arrivals_counted=200, backlog_tokens=40_000.0)
FULL_DECODE = replace(
    CALM, arrivals=16.0, arrivals_counted=64, prompt_tokens=50.0, streams=600.0, stream_tokens=400.0, young_tokens=400.0
)
UNKNOWN = replace(FULL_PREFILL, decode_step=None)
FULL = replace(FULL_PREFILL, arrivals=200.0, arrivals_counted=800, streams=800.0, young_tokens=400.0)


class Cluster:
    """Workers that do at once what the policy says."""

    def __init__(self, config: ScalingConfig = CONFIG, split: Split = HALVES) -> None:
        self.policy = Policy(config)
        self.roles: dict[str, PoolRole] = {}
        self.now = 0.0
        self.decisions: list[tuple[float, Decision]] = []
        self.resize("prefill", split.prefill)
        self.resize("decode", split.decode)

    @property
    def split(self) -> Split:
        roles = list(self.roles.values())
        return Split(roles.count("prefill"), roles.count("decode"))

    def resize(self, role: PoolRole, count: int) -> None:
        present = [name for name, each in self.roles.items() if each == role]
        for name in present[count:]:
            del self.roles[name]
        for number in range(count - len(present)):
            self.roles[f"{role}-{len(self.roles)}-{number}"] = role

    def workers(self) -> list[MemberStatus]:
        both, state = [ROLE_PREFILL, ROLE_DECODE], MEMBER_STATE_READY
        return [
            MemberStatus(
                member=Member(name=name, incarnation="i", role=ROLES[role], state=state, roles=both),
                load=Load(requests=Requests(running=number)),
            )
            for number, (name, role) in enumerate(self.roles.items())
        ]

    def tick(self, signals: Signals) -> Decision | None:
        self.now += TICK
        signals = replace(signals, prefill=self.split.prefill, decode=self.split.decode)
        decision = self.policy.decide(signals, self.split, self.workers(), self.now)
        if decision is not None:
            self.decisions.append((self.now, decision))
            self.roles.update(decision.moves)
            for role, count in decision.scale.items():
                self.resize(role, count)
        return decision

    def run(self, signals: Signals, seconds: float) -> list[Decision]:
        """The decisions while the signals stay as they are."""
        found = [self.tick(signals) for _ in range(round(seconds / TICK))]
        return [decision for decision in found if decision is not None]


def test_traffic_within_the_targets_changes_nothing() -> None:
    assert Cluster().run(CALM, 600) == []


@pytest.mark.parametrize(("signals", "more"), [(FULL_PREFILL, "prefill"), (FULL_DECODE, "decode")])
def test_the_role_that_is_short_gets_workers_soon_and_several_at_once(signals: Signals, more: str) -> None:
    cluster = Cluster()
    (decision, *_) = cluster.run(signals, CONFIRM_SECONDS + 2 * TICK)
    assert set(decision.moves.values()) == {more}
    assert len(decision.moves) > 1
    assert more in decision.reason
    assert "of its target" in decision.reason


def test_one_bad_look_is_not_enough() -> None:
    cluster = Cluster()
    for _ in range(20):
        assert cluster.tick(FULL_PREFILL) is None
        assert cluster.run(CALM, 2) == []


def test_those_with_least_to_do_are_moved() -> None:
    cluster = Cluster()
    (decision, *_) = cluster.run(FULL_PREFILL, 5)
    decodes = [worker.member.name for worker in Cluster().workers() if worker.member.role == ROLE_DECODE]
    assert list(decision.moves) == decodes[: len(decision.moves)]


@pytest.mark.parametrize(
    ("signals", "split", "movable"),
    [(FULL_PREFILL, HALVES, False), (FULL_PREFILL, Split(5, 3), True), (UNKNOWN, HALVES, True)],
    ids=["no worker can take the role", "a change is under way", "not everything is known"],
)
def test_nothing_is_decided_where_nothing_can_be_done(signals: Signals, split: Split, movable: bool) -> None:
    policy = Policy(CONFIG)
    workers = Cluster().workers()
    for worker in workers:
        worker.member.roles[:] = worker.member.roles if movable else [worker.member.role]
    assert not any(policy.decide(signals, split, workers, tick * TICK) for tick in range(60))


def test_the_way_back_takes_longer_each_time() -> None:
    cluster = Cluster(replace(CONFIG, cooldown_seconds=2.0, reversal_seconds=8.0))
    for _ in range(50):  # each flip comes as soon as the one before has been answered
        before = len(cluster.decisions)
        signals = FULL_PREFILL if before % 2 == 0 else FULL_DECODE
        while len(cluster.decisions) == before and cluster.now < 150:
            cluster.tick(signals)
    gaps = [later - earlier for (earlier, _), (later, _) in zip(cluster.decisions, cluster.decisions[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[0] >= 8.0
    assert 2 < len(gaps) < 6


def test_a_change_needs_a_gain() -> None:
    for signals in (FULL, replace(FULL, arrivals=400.0), replace(FULL, streams=4000.0)):
        cluster = Cluster()
        found = cluster.run(signals, 2 * CONFIRM_SECONDS)
        outlook = cluster.policy.outlook
        assert outlook is not None
        assert bool(found) == (outlook.then.cost < (1 - GAIN) * outlook.now.cost), outlook
    assert Cluster(split=Split(1, 1)).run(FULL_PREFILL, 30) == [], "there is nobody to move"


@settings(max_examples=15, deadline=None)
@given(
    split=st.builds(Split, st.integers(1, 9), st.integers(1, 9)),
    bounds=st.tuples(st.integers(1, 4), st.integers(4, 9), st.integers(1, 4), st.integers(4, 9)),
    signals=st.sampled_from([CALM, FULL_PREFILL, FULL_DECODE, FULL]),
)
def test_the_bounds_of_each_role_are_kept(split: Split, bounds: tuple[int, int, int, int], signals: Signals) -> None:
    least_prefill, most_prefill, least_decode, most_decode = bounds
    config = replace(
        CONFIG, min_prefill=least_prefill, max_prefill=most_prefill, min_decode=least_decode, max_decode=most_decode
    )
    cluster = Cluster(config, split)
    cluster.run(signals, 30)
    for at, decision in cluster.decisions:
        assert decision.moves, at
    if cluster.decisions:
        assert least_prefill <= cluster.split.prefill <= most_prefill
        assert least_decode <= cluster.split.decode <= most_decode
    assert cluster.split.total == split.total


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**16), busy=st.floats(0.3, 1.6))
def test_noise_alone_makes_few_decisions(seed: int, busy: float) -> None:
    """Stationary traffic, from easy to too much; each figure is off by a quarter, differently at each look."""
    rng, cluster = random.Random(seed), Cluster()

    def noisy(value: float) -> float:
        return value * rng.uniform(0.75, 1.25)

    for _ in range(round(180 / TICK)):
        cluster.tick(
            replace(
                CALM,
                arrivals=noisy(30 * busy),
                arrivals_counted=round(120 * busy),
                backlog_tokens=noisy(3000 * busy),
                streams=noisy(200 * busy),
                young_tokens=noisy(100),
                stream_tokens=noisy(100),
            )
        )
    assert len(cluster.decisions) <= 4, [decision.reason for _, decision in cluster.decisions]


def test_workers_are_added_only_if_no_split_is_enough_and_removed_only_after_long() -> None:
    config = replace(CONFIG, min_workers=8, max_workers=11, calm_seconds=60.0)
    cluster = Cluster(config)
    assert all(decision.moves for decision in cluster.run(FULL_DECODE, 30))
    grown = next(decision for decision in cluster.run(FULL, 60) if decision.scale)
    assert "no split of 8 workers is enough" in grown.reason
    assert 8 < sum(grown.scale.values()) <= 11
    total = cluster.split.total
    assert not [decision for decision in cluster.run(CALM, 59) if decision.scale]
    removed = cluster.run(CALM, 300)
    assert removed
    assert all(sum(decision.scale.values()) < total for decision in removed)
    assert cluster.split.total == 8
    assert len(removed) <= 300 / config.calm_seconds


@pytest.mark.parametrize("arrivals", [200.0, 2000.0])
def test_workers_are_added_up_to_the_bounds_of_the_roles(arrivals: float) -> None:
    config = replace(CONFIG, max_workers=24, max_prefill=9, max_decode=9)
    cluster = Cluster(config)
    full = replace(FULL, arrivals=arrivals, arrivals_counted=round(4 * arrivals))
    grown = next(decision for decision in cluster.run(full, 60) if decision.scale)
    assert 8 < sum(grown.scale.values()) <= 18
    assert max(grown.scale.values()) <= 9


def test_the_fewest_workers_that_are_enough_are_added() -> None:
    config = replace(CONFIG, max_workers=64)
    cluster = Cluster(config)
    grown = None
    while grown is None or not grown.scale:
        seen = replace(FULL, prefill=cluster.split.prefill, decode=cluster.split.decode)
        grown = cluster.tick(FULL)
    total = sum(grown.scale.values())
    costs = [
        min(forecast(seen, Split(prefill, size - prefill), config).cost for prefill in range(1, size))
        for size in (total - 1, total)
    ]
    assert costs[0] > 1.0 >= costs[1]
    assert total < config.max_workers


def test_the_number_of_workers_stays_unless_it_is_allowed_to_change() -> None:
    cluster = Cluster()
    cluster.run(FULL, 3 * GROW_SECONDS)
    cluster.run(CALM, 400)
    assert cluster.split.total == 8


def test_a_forecast_gets_better_with_more_of_the_role_that_is_short() -> None:
    for signals, role in ((FULL_PREFILL, "prefill"), (FULL_DECODE, "decode")):
        splits = (
            [Split(4, 4), Split(5, 3), Split(6, 2)] if role == "prefill" else [Split(4, 4), Split(3, 5), Split(2, 6)]
        )
        pressures = [getattr(forecast(signals, split, CONFIG), role) for split in splits]
        assert pressures == sorted(pressures, reverse=True)
        assert pressures[0] > 1.0
    with pytest.raises(ValueError, match="needs the cost"):
        forecast(UNKNOWN, HALVES, CONFIG)


AMOUNT = st.sampled_from([0.0, 1e-9, 0.01, 1.0, 30.0, 4000.0, 1e6])
COST = st.builds(StepCost, *[AMOUNT] * 7)


@given(
    seen=st.builds(
        Signals,
        prefill=st.integers(0, 4),
        decode=st.integers(0, 4),
        arrivals=AMOUNT,
        arrivals_counted=st.integers(0, 1000),
        prompt_tokens=AMOUNT,
        cached_tokens=AMOUNT,
        backlog_tokens=AMOUNT,
        chunk_tokens=AMOUNT,
        prefill_step=COST,
        streams=AMOUNT,
        queued_streams=AMOUNT,
        stream_tokens=st.sampled_from([1e-9, 1.0, 100.0, 1e6]),
        young_tokens=st.sampled_from([1.0, 100.0, 1e6]),
        stream_slots=AMOUNT,
        decode_step=COST,
        context_tokens=AMOUNT,
        in_place_tokens=AMOUNT,
        unqueued_seconds=AMOUNT,
    ),
    split=st.builds(Split, st.integers(1, 4), st.integers(1, 4)),
)
def test_whatever_is_measured_the_policy_bears_it(seen: Signals, split: Split) -> None:
    """A cluster that has just started or gone to zero, and steps whose measured cost is zero, among them."""
    cluster = Cluster(split=split)
    for now in range(0, 60, 5):
        cluster.policy.decide(seen, split, cluster.workers(), float(now))
    outlook = cluster.policy.outlook
    assert (outlook is None) == (0 in (seen.prefill, seen.decode) or not seen.complete)
    if outlook is not None:
        assert all(math.isfinite(each) and each >= 0 for each in (outlook.now.prefill, outlook.now.decode))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ttft_target_seconds": 0.0}, "ttft_target_seconds is 0.0; allowed: 0.001 to 3600"),
        ({"min_prefill": 0}, "min_prefill is 0; allowed: 1 to 1024"),
        ({"min_decode": 5, "max_decode": 4}, r"max_decode is 4; allowed: at least min_decode \(5\)"),
        ({"min_workers": 5, "max_workers": 4}, r"max_workers is 4; allowed: at least min_workers \(5\)"),
        ({"reversal_seconds": 1.0}, r"reversal_seconds is 1.0; allowed: at least cooldown_seconds \(2.0\)"),
    ],
)
def test_an_option_out_of_its_range_is_refused(options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ScalingConfig(**options)  # type: ignore[arg-type]  # wrong on purpose
