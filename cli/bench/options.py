"""Options of a benchmark: the workload, the arrivals, and the limits that a good request keeps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from kvrelay.cluster.errors import UsageError

Arrivals = Literal["poisson", "gamma", "constant", "trace"]
Kind = Literal["fixed", "uniform", "lognormal"]

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
MAX_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths, in tokens."""

    kind: Kind
    first: float
    """The length of `fixed`, the smallest of `uniform`, the mean of `lognormal`."""
    second: float = 0.0
    """The largest of `uniform`; the standard deviation of the logarithm of `lognormal`."""

    @classmethod
    def parse(cls, text: str, option: str) -> "Lengths":
        """`N`, `uniform:LOW-HIGH`, or `lognormal:MEAN,SIGMA`.

        Raises:
            UsageError: it is none of these.
        """
        name, _, rest = text.partition(":") if ":" in text else ("fixed", "", text)
        try:
            match name:
                case "fixed":
                    found = cls("fixed", int(rest))
                case "uniform":
                    low, high = map(int, rest.split("-"))
                    found = cls("uniform", low, high)
                case "lognormal":
                    mean, sigma = map(float, rest.split(","))
                    found = cls("lognormal", mean, sigma)
                case _:
                    raise ValueError(name)
            if not found.valid:
                raise ValueError(text)
        except ValueError:
            raise UsageError(
                f"{option} is {text!r}; allowed: N, uniform:LOW-HIGH or lognormal:MEAN,SIGMA, 1 to {MAX_TOKENS} tokens"
            ) from None
        return found

    @property
    def valid(self) -> bool:
        """Whether the distribution's numbers are consistent."""
        if not 1 <= self.first <= MAX_TOKENS:
            return False
        if self.kind == "uniform":
            return self.first <= self.second <= MAX_TOKENS
        return 0.0 <= self.second <= 10.0

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """Draws so many lengths, each from 1 to MAX_TOKENS."""
        match self.kind:
            case "uniform":
                drawn = rng.integers(int(self.first), int(self.second), count, endpoint=True).astype(float)
            case "lognormal":
                # With this location the mean of the distribution is `first`, whatever sigma is.
                drawn = rng.lognormal(math.log(self.first) - self.second**2 / 2, self.second, count)
            case _:
                drawn = np.full(count, self.first)
        return [int(length) for length in np.clip(np.rint(drawn), 1, MAX_TOKENS)]


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """The requests of a benchmark."""

    num_prompts: int = 100
    """Number of requests of each point."""
    input_tokens: Lengths = Lengths("fixed", 512)
    """Lengths of synthetic prompts, in tokens."""
    output_tokens: Lengths = Lengths("fixed", 128)
    """Lengths of completions in tokens, where neither a trace nor ShareGPT gives them."""
    shared_prefix: int = 0
    """Tokens that all synthetic prompts begin with."""
    trace: Path | None = None
    """JSON lines with timestamp (ms), input_length, output_length and, for shared beginnings, hash_ids."""
    length_scale: float = 1.0
    """Factor for the lengths of a trace, for a model with a smaller context."""
    dataset: Path | None = None
    """Text file with a prompt in each line, or JSON in ShareGPT's form."""
    ignore_eos: bool = True
    """Whether each completion has its full length; False lets the model end it."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    warm_cache: bool = False
    """Whether prompts may be found in the server's prefix cache from an earlier run; else each run has a cache salt."""


@dataclass(frozen=True, slots=True)
class ArrivalOptions:
    """The times at which requests are sent."""

    arrivals: Arrivals = "poisson"
    """The pattern of an open loop."""
    request_rate: float = math.inf
    """Requests per second on average; infinite sends all at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the time between two arrivals: 1 is Poisson, below 1 comes in bursts."""
    concurrency: int = 0
    """Most requests in flight; 0: no limit. Without a rate, this is a closed loop."""
    speed: float = 1.0
    """Factor by which a trace is played faster than recorded."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """A benchmark."""

    workload: WorkloadOptions = field(default_factory=WorkloadOptions)
    """Requests of the benchmark."""
    arrival: ArrivalOptions = field(default_factory=ArrivalOptions)
    """Times at which the requests are sent."""
    goodput: Mapping[str, float] = field(default_factory=dict)
    """Limits in milliseconds, of ttft, tpot or e2el, that a good request keeps."""
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    """Percentiles of each latency that are reported."""
    warmup: int = 1
    """Requests that are sent first, one after the other, and not measured."""
    seed: int = 0
    """Equal seeds give equal prompts, lengths and arrivals."""
    timeout: float = 600.0
    """Seconds after which a request has failed."""


def check(options: BenchOptions) -> None:
    """
    Raises:
        UsageError: a value is out of range, or two don't go together.
    """
    workload, arrival = options.workload, options.arrival
    for name, value, low, high in (
        ("--num-prompts", workload.num_prompts, 1, 10**6),
        ("--shared-prefix", workload.shared_prefix, 0, MAX_TOKENS),
        ("--length-scale", workload.length_scale, 1e-6, 1e6),
        ("--temperature", workload.temperature, 0.0, 100.0),
        ("--burstiness", arrival.burstiness, 1e-3, 1e6),
        ("--concurrency", arrival.concurrency, 0, 10**5),
        ("--trace-speed", arrival.speed, 1e-6, 1e6),
        ("--warmup", options.warmup, 0, 10**4),
        ("--seed", options.seed, 0, 2**63 - 1),
        ("--timeout", options.timeout, 0.001, 86400.0),
    ):
        if not low <= value <= high:
            raise UsageError(f"{name} is {value:g}; allowed: {low:g} to {high:g}")
    if not arrival.request_rate > 0:
        raise UsageError(f"--request-rate is {arrival.request_rate:g}; allowed: above 0, or inf")
    for percentile in options.percentiles:
        if not 0 <= percentile <= 100:
            raise UsageError(f"--percentiles has {percentile:g}; allowed: 0 to 100")
    if workload.trace is not None and workload.dataset is not None:
        raise UsageError("--trace and --dataset are given; allowed: one of them")
    if arrival.arrivals == "trace" and workload.trace is None:
        raise UsageError("--arrivals is trace; allowed: with --trace FILE only")
    if arrival.arrivals == "trace" and not math.isinf(arrival.request_rate):
        raise UsageError("--request-rate is given; allowed: without --arrivals trace, which has its own times")
    if arrival.arrivals != "gamma" and arrival.burstiness != 1.0:
        raise UsageError(f"--burstiness is {arrival.burstiness:g}; allowed: with --arrivals gamma only")


def parse_goodput(texts: tuple[str, ...]) -> dict[str, float]:
    """Limits in milliseconds from `ttft:200`, several of them apart by spaces or commas.

    Raises:
        UsageError: one is something else.
    """
    limits = {}
    for part in " ".join(texts).replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in GOODPUT_METRICS or not limits[name] > 0:
            raise UsageError(f"--goodput has {part!r}; allowed: NAME:MS with one of {', '.join(GOODPUT_METRICS)}")
    return limits


def parse_sweep(text: str) -> tuple[str, list[float]]:
    """`rate=1,2,4` or `concurrency=1,8`: which option takes which values, one after the other.

    Raises:
        UsageError: it is something else.
    """
    name, _, rest = text.partition("=")
    try:
        values = [float(value) for value in rest.split(",")]
        if name not in ("rate", "concurrency") or not all(0 < value < math.inf for value in values):
            raise ValueError(name)
        if name == "concurrency" and not all(value.is_integer() for value in values):
            raise ValueError(name)
    except ValueError:
        raise UsageError(f"--sweep is {text!r}; allowed: rate=A,B,... or concurrency=A,B,...") from None
    return name, values
