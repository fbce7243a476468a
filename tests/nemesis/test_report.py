"""The report of the nemesis: which failures of a request it accepts."""

from dataclasses import replace

import pytest

from nemesis.faults import FAULTS
from nemesis.load import Stream
from nemesis.report import CONVICTED, Injected, Report

INNOCENT = Stream("innocent", (1, 2), 5, None, invoked=100.0, ended=120.0, error=f"{CONVICTED}: 2 were lost")


@pytest.mark.parametrize(
    ("names", "at", "allowed"),
    [
        (["SIGKILL"], 15.0, True),
        (["poison request", "SIGKILL"], 15.0, True),
        (["SIGKILL"], 21.0, False),
        (["SIGKILL"], 5.0, False),
        (["poison request"], 15.0, False),
        (["poison request", "clock jump"], 15.0, False),
    ],
)
def test_an_innocent_is_convicted_only_by_a_fault_that_ends_workers(names: list[str], at: float, allowed: bool) -> None:
    kinds = {fault.name: fault for fault in FAULTS}
    ends = any(kinds[name].ends_workers for name in names)
    report = Report(1, 0.0, {}, {}, {}, faults=[Injected(names, at, [], ends, recovery_seconds=6.0)])
    assert report.may_fail(INNOCENT, began=100.0) == allowed
    assert report.may_fail(replace(INNOCENT, may_fail=True), began=100.0)
    assert report.may_fail(replace(INNOCENT, error="UNAVAILABLE: given up"), began=100.0)
    assert not report.may_fail(replace(INNOCENT, error="INTERNAL: a defect"), began=100.0)
