"""The figures of a benchmark, by the definitions of `vllm bench serve`, under its names.

    ttft   from sending to the first message                       of each completed request
    tpot   (latency - ttft) / (tokens - 1)                         of each with two tokens or more
    itl    between two messages, which may have several tokens     of all completed requests together
    e2el   from sending to the last message                        of each completed request

The same from the scheduled arrival in place of the sending are `ttft_scheduled` and `e2el_scheduled`: equal to the
former where every request was sent when it was due. Percentiles are interpolated linearly; std divides by the count.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvrelay.cli.bench.load import Request  # `kvrelay top` imports this module, and no client

LATENCIES = ("ttft", "tpot", "itl", "e2el", "ttft_scheduled", "e2el_scheduled")


def values(requests: Sequence["Request"]) -> dict[str, list[float]]:
    """Each of LATENCIES of the completed requests, in seconds."""
    begun = [(request, request.ttft, request.latency) for request in requests if request.ok]
    done = [(request, ttft, latency) for request, ttft, latency in begun if ttft is not None and latency is not None]
    return {
        "ttft": [ttft for _, ttft, _ in done],
        "tpot": [request.tpot for request, _, _ in done if request.tpot is not None],
        "itl": [gap for request, _, _ in done for gap in request.itls],
        "e2el": [latency for _, _, latency in done],
        "ttft_scheduled": [request.late + ttft for request, ttft, _ in done],
        "e2el_scheduled": [request.late + latency for request, _, latency in done],
    }


def figures(
    requests: Sequence["Request"], duration: float, goodput: Mapping[str, float], percentiles: Sequence[float]
) -> dict[str, float]:
    """All figures of one run.

    Args:
        duration: seconds from the start to the last answer.
        goodput: limits in milliseconds by ttft, tpot or e2el; without them, goodput is not reported.
    """
    done = [request for request in requests if request.ok]
    prompt = sum(request.prompt_tokens for request in done)
    output = sum(request.output_tokens for request in done)
    found: dict[str, float] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(requests) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "total_cached_tokens": sum(request.cached_tokens for request in done),
        "request_throughput": len(done) / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "max_concurrent_requests": max((count for _, count in in_flight(requests)), default=0),
        "max_late_ms": 1e3 * max((request.late for request in requests), default=0.0),
    }
    if goodput:
        measured = ({"ttft": each.ttft, "tpot": each.tpot, "e2el": each.latency} for each in done)
        found["request_goodput"] = sum(good(each, goodput) for each in measured) / duration
    for name, each in values(requests).items():
        milliseconds = 1e3 * np.asarray(each if each else [0.0])
        found[f"mean_{name}_ms"] = float(np.mean(milliseconds))
        found[f"median_{name}_ms"] = float(np.median(milliseconds))
        found[f"std_{name}_ms"] = float(np.std(milliseconds))
        for percentile in percentiles:
            found[f"p{percentile:g}_{name}_ms"] = float(np.percentile(milliseconds, percentile))
    return found


def good(measured: Mapping[str, float | None], limits: Mapping[str, float]) -> bool:
    """Whether a completed request's ttft, tpot and e2el, in seconds, keep all limits, in milliseconds. The tpot of a
    single token, which is None, counts as 0."""
    return all(1e3 * (measured[name] or 0.0) <= limit for name, limit in limits.items())


def in_flight(requests: Sequence["Request"]) -> list[tuple[float, int]]:
    """Each time at which the number of requests in flight changes, and the number from then on."""
    # At one moment, ends come before beginnings.
    changes = sorted(change for each in requests for change in ((each.sent, 1), (each.ended, -1)))
    counts = accumulate(change for _, change in changes)
    return [(at, count) for (at, _), count in zip(changes, counts, strict=True)]
