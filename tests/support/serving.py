"""Requests served to their ends by an engine in this process, and what was reported of each."""

from collections.abc import Sequence

from kvrelay.engine.engine import Engine
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


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Serves the requests together; the tokens of each, by its id."""
    return tokens_of(reports_of(engine, requests))


def token_reports(engine: Engine, requests: Sequence[Request]) -> dict[str, list[Progress]]:
    """Serves the requests together; the reports of each that bring a token, by its id."""
    heard = reports_of(engine, requests)
    return {name: [report for report in reports if report.token is not None] for name, reports in heard.items()}
