"""The budget of retries, for any order of requests and retries."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.router.session.budget import AT_LEAST, SHARE, WINDOW_SECONDS, RetryBudget


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["request", "retry"]), st.floats(0, 5)), max_size=120))
def test_retries_stay_within_a_fifth_of_the_windows_requests(events: list[tuple[str, float]]) -> None:
    now = 1000.0
    budget = RetryBudget(lambda: now)
    requests: list[float] = []
    retries: list[float] = []
    for kind, pause in events:
        now += pause
        bucket = WINDOW_SECONDS / 10
        start = (now // bucket - 9) * bucket
        recent = [time for time in requests if time >= start - 1e-6]
        if kind == "request":
            budget.request()
            requests.append(now)
        else:
            spent = len([time for time in retries if time >= start - 1e-6])
            allowed = budget.take()
            assert allowed == (spent < max(AT_LEAST, int(SHARE * len(recent))))
            if allowed:
                retries.append(now)
