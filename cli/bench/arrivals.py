"""Arrival times of the requests of an open loop."""

import math

import numpy as np

from kvrelay.cli.bench.options import ArrivalOptions


def offsets(options: ArrivalOptions, count: int, rng: np.random.Generator) -> list[float]:
    """Seconds from the start to each arrival, in order; the first one arrives at its own gap after the start.

    The gaps are of a gamma distribution with shape `burstiness` and mean 1/rate, and are then scaled so that the last
    request arrives at count/rate exactly: two runs with different seeds have the same load. `vllm bench serve` does the
    same, so equal options mean equal loads.
    """
    if math.isinf(options.request_rate):
        return [0.0] * count
    mean = 1.0 / options.request_rate
    if options.arrivals == "constant":
        gaps = np.full(count, mean)
    else:
        shape = options.burstiness if options.arrivals == "gamma" else 1.0
        gaps = rng.gamma(shape, mean / shape, count)
    times = np.cumsum(gaps)
    last = float(times[-1])
    if last > 0.0:
        times *= count * mean / last
    return [float(time) for time in times]
