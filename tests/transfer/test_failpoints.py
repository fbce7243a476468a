"""Failpoints: how they are armed, which rules are refused, and that they do nothing unless armed."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from kvrelay.transfer import failpoints
from kvrelay.transfer.failpoints import VARIABLE, FailpointError, Injected, failpoint, parse

KEY = ("name/0123", 1)


@pytest.fixture
def arm() -> Iterator[Callable[[str], None]]:
    yield lambda text: failpoints.arm(parse(text))
    failpoints.arm(())


def test_an_unarmed_failpoint_costs_less_than_ten_microseconds() -> None:
    started = time.thread_time()
    for chunk in range(100_000):
        failpoint("prefill.after_chunk", KEY, chunk=chunk)
    assert time.thread_time() - started < 1, "seconds for 100,000 calls"


def test_a_rule_acts_only_where_its_conditions_hold(arm) -> None:
    arm("prefill.after_chunk,chunk=2,request=name,attempt=1:raise")
    for key, chunk in ((KEY, 1), (("name/0123", 2), 2), (("other/0123", 1), 2)):
        failpoint("prefill.after_chunk", key, chunk=chunk)
    failpoint("prefill.after_finish", KEY)
    with pytest.raises(Injected, match=r"prefill\.after_chunk"):
        failpoint("prefill.after_chunk", KEY, chunk=2)


def acts(place: str, **values: object) -> bool:
    try:
        failpoint(place, KEY, **values)
    except Injected:
        return True
    return False


def test_times_and_share_bound_how_often(arm) -> None:
    arm("transfer.frame,times=2:raise")
    assert [acts("transfer.frame", index=index) for index in range(5)] == [True, True, False, False, False]
    arm("transfer.frame,share=0.05,seed=3:raise")
    first = [acts("transfer.frame", index=index) for index in range(2000)]
    assert 60 < sum(first) < 140
    arm("transfer.frame,share=0.05,seed=3:raise")
    assert first == [acts("transfer.frame", index=index) for index in range(2000)]


def test_the_first_rule_that_applies_acts(arm) -> None:
    arm("transfer.frame,index=1:sleep(0); transfer.frame:raise")
    assert not acts("transfer.frame", index=1)
    assert acts("transfer.frame", index=2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prefill.after_lunch:kill", "no place 'prefill.after_lunch'"),
        ("prefill.after_finish:explode", "no action 'explode'"),
        ("prefill.after_finish,chunk=1:kill", "prefill.after_finish has no chunk"),
        ("prefill.after_finish:kill(9)", "takes no argument"),
        ("prefill.after_finish,share=often:kill", "often"),
        ("prefill.after_finish:sleep(1.2.3)", "1.2.3"),
        ("prefill.after_finish", "is not of the form"),
        ("prefill.after_finish:kill:kill", "is not of the form"),
    ],
)
def test_an_invalid_rule_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(FailpointError) as error:
        parse(f"prefill.after_ack:kill; {text}")
    assert reason in str(error.value)
    assert VARIABLE in str(error.value)


@pytest.mark.parametrize(("action", "status"), [("exit(7)", 7), ("kill", -9)])
def test_the_environment_arms_it_at_import_without_torch(action: str, status: int) -> None:
    script = (
        "import sys; from kvrelay.transfer.failpoints import failpoint; assert 'torch' not in sys.modules;"
        "failpoint('prefill.after_ack', ('r', 1))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={VARIABLE: f"prefill.after_ack:{action}"}, timeout=20, check=False
    )
    assert done.returncode == status


def test_an_invalid_environment_stops_the_process_at_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import kvrelay.transfer.failpoints"],
        env={VARIABLE: "nowhere:kill"},
        timeout=20,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "no place 'nowhere'" in done.stderr
