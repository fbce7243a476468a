"""The health that a router infers from failed attempts, for any order of successes and failures."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.placing.health import FIRST_SECONDS, LONGEST_SECONDS, PEERS, STREAK, Avoidance, FleetHealth
from kvrelay.rpc.identity import WorkerId

PREFILLS = [WorkerId(f"prefill-{index}", "i") for index in range(3)]
DECODES = [WorkerId(f"decode-{index}", "i") for index in range(3)]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.sampled_from(["begin", "fail", "succeed", "end", "wait"]), st.integers(0, 30)), max_size=80)
)
def test_a_key_is_avoided_within_its_bounds_and_probed_by_one_attempt_at_a_time(steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    avoidance: Avoidance[str] = Avoidance(clock)
    begun, running, avoided_since = 0, set[int](), None
    for what, number in steps:
        chosen = sorted(running)[number % len(running)] if running else None
        if what == "begin":
            before = "key" in avoidance
            begun += 1
            running.add(begun)
            avoidance.begin("key", begun)
            # The attempt that ends a pause is the only one until it has a result.
            assert before or not avoidance.failed or "key" in avoidance
        elif what == "wait":
            clock.now += number
        elif chosen is not None:
            running.discard(chosen)
            if what == "fail":
                avoidance.fail("key", chosen, begun)
                assert avoidance.failed
            elif what == "succeed":
                avoidance.succeed("key", chosen)
            avoidance.end("key", chosen)
        if not running and avoidance.failed:
            avoided_since = avoided_since or clock.now
            assert "key" not in avoidance or clock.now < avoided_since + LONGEST_SECONDS
        else:
            avoided_since = None


def test_the_pause_doubles_with_each_failed_probe_and_ends_with_a_success() -> None:
    clock = Clock()
    avoidance: Avoidance[str] = Avoidance(clock)
    avoidance.fail("key", 1, latest=1)
    expected = FIRST_SECONDS
    for attempt in range(2, 10):
        assert "key" in avoidance
        clock.now += expected - 0.01
        assert "key" in avoidance
        clock.now += 0.02
        assert "key" not in avoidance
        avoidance.begin("key", attempt)
        assert "key" in avoidance, "one probe at a time"
        avoidance.fail("key", attempt, latest=attempt)
        avoidance.end("key", attempt)
        expected = min(LONGEST_SECONDS, 2 * expected)
    clock.now += expected
    avoidance.begin("key", 10)
    avoidance.succeed("key", 10)
    assert not avoidance.failed


def test_failures_of_one_event_count_once() -> None:
    clock = Clock()
    avoidance: Avoidance[str] = Avoidance(clock)
    for attempt in range(20):
        avoidance.fail("key", attempt, latest=20)
    avoidance.succeed("key", 20)
    assert "key" in avoidance, "it began before the failure was known"
    clock.now += FIRST_SECONDS
    assert "key" not in avoidance


def test_a_worker_that_fails_several_peers_is_avoided_as_a_whole_and_the_peers_are_not() -> None:
    health = FleetHealth(Clock())
    for prefill in PREFILLS[:PEERS]:
        assert not health.avoids(DECODES[0])
        health.begin(prefill, DECODES[0]).handoff_failed()
        assert health.bad_peers(prefill) == {DECODES[0]}
    assert health.avoids(DECODES[0])
    assert not any(health.avoids(worker) for worker in (*PREFILLS, *DECODES[1:]))


@settings(max_examples=200)
@given(st.lists(st.booleans(), max_size=20))
def test_a_worker_is_avoided_after_failures_in_a_row(results: list[bool]) -> None:
    health = FleetHealth(Clock())
    streak, ever = 0, False
    for good in results:
        trial = health.begin(PREFILLS[0], PREFILLS[0])
        if good:
            trial.finished()
        else:
            trial.failed((PREFILLS[0],))
        trial.end()
        streak = 0 if good else streak + 1
        ever |= streak >= STREAK
        assert health.avoids(PREFILLS[0]) == ever


def test_a_probe_restores_the_pair_and_its_workers() -> None:
    clock = Clock()
    health = FleetHealth(clock)
    for prefill in PREFILLS[:PEERS]:
        health.begin(prefill, DECODES[0]).handoff_failed()
    clock.now += FIRST_SECONDS
    probe = health.begin(PREFILLS[0], DECODES[0])
    assert not probe.doubtful
    assert health.begin(PREFILLS[0], DECODES[0]).doubtful, "a second one beside the probe"
    probe.delivered()
    assert not health.avoids(DECODES[0])
    assert not health.bad_peers(PREFILLS[0])
    health.begin(PREFILLS[1], DECODES[1]).handoff_failed()
    health.keep([PREFILLS[0]])
    assert not health.bad_peers(PREFILLS[1])
