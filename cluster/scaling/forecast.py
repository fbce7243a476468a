"""Forecasts the latencies of the next seconds, with these or other numbers of workers. No I/O.

Requests flow through two pools. Of what arrives and waits, prefill computes as much as its rate allows; each computed
prompt becomes a stream on decode, or waits for a slot there, and ends after a number of steps:

    arrivals --> backlog --(prefill workers / seconds of a token)--> streams --(a token a step for each slot)--> ended

A pool's pressure is a predicted latency over its target, so above 1 targets are missed. Prefill's is the time to the
first token; decode's is the time between tokens, or the wait for its slots if that is worse.

A request that misses its target by a little is as lost as one that misses it by far. So what counts is not how large
the pressures are, but for how long they are above 1: a split that empties one queue at once, and lets the other one
grow, is a bad one.
"""

import math
from dataclasses import dataclass

from kvrelay.cluster.scaling.config import ScalingConfig
from kvrelay.cluster.scaling.signals import Signals
from kvrelay.costs.step import StepCost, StepWork, pairs

HORIZON_SECONDS = 20.0
"""Length of a forecast in seconds: a change takes some seconds, and has to pay off within this time."""
SWITCH_SECONDS = 2.0
"""Seconds during which a worker that changes its role serves in neither."""
DT = 1.0
LEAST_SECONDS = 1e-6
"""Least seconds of a step: a measured cost may be proportional to the tokens, and a step without any would then cost
nothing."""
TAIL = 2.3
"""Factor from the mean of a wait to its 90th percentile, if waits are distributed exponentially."""
MOST = 10.0
"""Largest pressure that is shown."""


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of workers by role."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True)
class Forecast:
    """The next HORIZON_SECONDS."""

    prefill: float
    """Mean pressure on prefill."""
    decode: float
    """Mean pressure on decode."""
    cost: float
    """Mean over the horizon, of the larger pressure p: 2 p / (1 + p), which is 1 on the target and 2 at most."""
    prefill_end: float
    """Pressure on prefill at the horizon's end."""
    decode_end: float
    """Pressure on decode at the horizon's end."""

    @property
    def worst(self) -> float:
        return max(self.prefill, self.decode)

    @property
    def missed(self) -> bool:
        """Whether targets will be missed: on the whole, or in the end."""
        return max(self.cost, self.prefill_end, self.decode_end) > 1.0


def forecast(signals: Signals, split: Split, config: ScalingConfig) -> Forecast:
    """The pressures if the cluster is changed to `split` now.

    Raises:
        ValueError: the signals lack what a forecast needs.
    """
    before = Split(signals.prefill, signals.decode)
    step, token_step, length = signals.prefill_step, signals.decode_step, signals.stream_tokens
    if step is None or token_step is None or length is None:
        raise ValueError("a forecast needs the cost of both roles' steps and the length of requests")
    rate, prompt, young_length = _rate(step, signals), max(1.0, signals.prompt_tokens), signals.young_tokens
    # One standard deviation fewer, so that chance alone is no reason for a change.
    arrivals = signals.arrivals * (1 - 1 / math.sqrt(max(1, signals.arrivals_counted)))
    backlog, old, young = signals.backlog_tokens, signals.streams, 0.0
    prefill_sum = decode_sum = cost_sum = prefill_pressure = decode_pressure = 0.0
    for tick in range(count := round(HORIZON_SECONDS / DT)):
        switching = tick * DT < SWITCH_SECONDS
        prefill = min(split.prefill, before.prefill) if switching else split.prefill
        decode = min(split.decode, before.decode) if switching else split.decode
        streams, most = old + young, max(1.0, signals.stream_slots) * decode
        running = min(1.0, most / max(streams, 1e-9))
        seconds = _decode_seconds(token_step, running * streams / decode, signals)
        old_ending, young_ending = (
            running * n / (tokens * seconds) for n, tokens in ((old, length), (young, young_length))
        )
        computable = rate * prefill
        flow = min(backlog / DT + arrivals * prompt, computable)
        queue = _queue_seconds(arrivals * prompt / computable, prefill, prompt / rate)
        first_seconds = signals.unqueued_seconds + backlog / computable + TAIL * queue
        prefill_pressure = first_seconds / config.ttft_target_seconds
        wait = max(0.0, streams - most) / max(old_ending + young_ending, 1e-9)
        token_seconds = seconds + wait / max(1.0, young_length)
        queued = wait if signals.queued_streams else 0.0
        decode_pressure = max(token_seconds / config.tpot_target_seconds, queued / config.ttft_target_seconds)
        prefill_sum += min(MOST, prefill_pressure)
        decode_sum += min(MOST, decode_pressure)
        worst = max(prefill_pressure, decode_pressure)
        cost_sum += 2 * worst / (1 + worst)
        backlog = max(0.0, backlog + (arrivals * prompt - flow) * DT)
        old = max(0.0, old - old_ending * DT)
        young = max(0.0, young + (flow / prompt - young_ending) * DT)
    return Forecast(
        prefill_sum / count,
        decode_sum / count,
        cost_sum / count,
        min(MOST, prefill_pressure),
        min(MOST, decode_pressure),
    )


def _rate(step: StepCost, signals: Signals) -> float:
    """Tokens a second of a prefill worker with enough to do: each step is full of prompts, or of a part of one."""
    tokens = max(1.0, signals.chunk_tokens)
    mean = max(1.0, signals.prompt_tokens)
    work = StepWork(tokens, tokens / mean * pairs(signals.cached_tokens, mean))
    return tokens / max(step.seconds(work), LEAST_SECONDS)


def _decode_seconds(step: StepCost, streams: float, signals: Signals) -> float:
    """Seconds of a decode worker's mean step: with so many streams, and the parts of prompts that it computes itself,
    which attend to about as many tokens as the streams do."""
    prompts = signals.in_place_tokens * streams
    context = signals.context_tokens
    return max(step.seconds(StepWork(prompts, prompts * context, streams, streams * context)), LEAST_SECONDS)


def _queue_seconds(busy: float, servers: int, service: float) -> float:
    """Mean wait in a queue with several servers and random arrivals (Sakasegawa 1977, M/M/c), while it is stable."""
    busy = min(busy, 0.95)
    return float(service * busy ** (math.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - busy)))
