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

import numpy as np

from kvrelay.cli.bench.load import Sample

LATENCIES = ("ttft", "tpot", "itl", "e2el", "ttft_scheduled", "e2el_scheduled")


def values(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Each of LATENCIES of the completed requests, in seconds."""
    done = [sample for sample in samples if sample.reply.ok]
    return {
        "ttft": [sample.ttft for sample in done],
        "tpot": [sample.tpot for sample in done if sample.tpot is not None],
        "itl": [gap for sample in done for gap in sample.itls],
        "e2el": [sample.latency for sample in done],
        "ttft_scheduled": [sample.late + sample.ttft for sample in done],
        "e2el_scheduled": [sample.late + sample.latency for sample in done],
    }


def figures(
    samples: Sequence[Sample], duration: float, goodput: Mapping[str, float], percentiles: Sequence[float]
) -> dict[str, float]:
    """All figures of one run.

    Args:
        duration: seconds from the start to the last answer.
        goodput: limits in milliseconds by ttft, tpot or e2el; without them, goodput is not reported.
    """
    done = [sample for sample in samples if sample.reply.ok]
    prompt = sum(sample.reply.prompt_tokens for sample in done)
    output = sum(sample.reply.output_tokens for sample in done)
    found: dict[str, float] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(samples) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "total_cached_tokens": sum(sample.reply.cached_tokens for sample in done),
        "request_throughput": len(done) / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "max_concurrent_requests": _most_at_once(samples),
        "max_late_ms": 1e3 * max((sample.late for sample in samples), default=0.0),
    }
    if goodput:
        found["request_goodput"] = sum(good(sample, goodput) for sample in done) / duration
    for name, each in values(samples).items():
        milliseconds = 1e3 * np.asarray(each if each else [0.0])
        found[f"mean_{name}_ms"] = float(np.mean(milliseconds))
        found[f"median_{name}_ms"] = float(np.median(milliseconds))
        found[f"std_{name}_ms"] = float(np.std(milliseconds))
        for percentile in percentiles:
            found[f"p{percentile:g}_{name}_ms"] = float(np.percentile(milliseconds, percentile))
    return found


def good(sample: Sample, limits: Mapping[str, float]) -> bool:
    """Whether a completed request keeps all limits, in milliseconds. The tpot of a single token counts as 0."""
    measured = {"ttft": sample.ttft, "tpot": sample.tpot or 0.0, "e2el": sample.latency}
    return all(1e3 * measured[name] <= limit for name, limit in limits.items())


def _most_at_once(samples: Sequence[Sample]) -> int:
    """Most requests in flight at one moment."""
    changes = [change for sample in samples for change in ((sample.sent, 1), (sample.ended, -1))]
    # Of changes at one moment, ends come first.
    return max(accumulate(change for _, change in sorted(changes)), default=0)
