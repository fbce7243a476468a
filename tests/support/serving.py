"""Requests served to their ends by an engine in this process, and what was reported of each."""

from collections.abc import Sequence

import pytest

from kvrelay.engine.engine import Engine
from kvrelay.engine.plan import TokenLogprobs
from kvrelay.engine.request import Request
from kvrelay.engine.scheduling.progress import Progress


def reports_of(engine: Engine, requests: Sequence[Request]) -> dict[str, list[Progress]]:
    """Serves the requests together; the reports of each, by its id. No block may be left."""
    for request in requests:
        engine.scheduler.add(request)
    heard: dict[str, list[Progress]] = {request.request_id: [] for request in requests}
    while engine.has_work:
        for report in engine.step():
            assert report.error is None
            heard[report.sequence.request.request_id].append(report)
    engine.scheduler.check_integrity(idle=True)
    return heard


def tokens_in(reports: Sequence[Progress]) -> list[int]:
    """The tokens that these reports bring."""
    return [report.token for report in reports if report.token is not None]


def tokens_of(heard: dict[str, list[Progress]]) -> dict[str, list[int]]:
    """The tokens of each request."""
    return {name: tokens_in(reports) for name, reports in heard.items()}


def scores_of(reports: Sequence[Progress]) -> list[TokenLogprobs]:
    """The log-probabilities of a request's prompt and of its completion."""
    of_prompt = [score for report in reports for score in report.prompt_logprobs]
    return of_prompt + [report.logprobs for report in reports if report.logprobs is not None]


def check_same(found: dict[str, list[Progress]], expected: dict[str, list[Progress]]) -> None:
    """All requests have the same tokens, and the same log-probabilities up to rounding."""
    assert tokens_of(found) == tokens_of(expected)
    for name, reports in expected.items():
        for score, wanted in zip(scores_of(found[name]), scores_of(reports), strict=True):
            assert (score.rank, score.top_ids) == (wanted.rank, wanted.top_ids)
            numbers = [wanted.logprob, *wanted.top_logprobs]
            assert [score.logprob, *score.top_logprobs] == pytest.approx(numbers, abs=1e-4)


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Serves the requests together; the tokens of each, by its id."""
    return tokens_of(reports_of(engine, requests))


def token_reports(engine: Engine, requests: Sequence[Request]) -> dict[str, list[Progress]]:
    """Serves the requests together; the reports of each that bring a token, by its id."""
    heard = reports_of(engine, requests)
    return {name: [report for report in reports if report.token is not None] for name, reports in heard.items()}
