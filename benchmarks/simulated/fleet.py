"""Runs of a simulated fleet under a trace, and what they show."""

import asyncio
import random
import statistics
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from simulated.clock import run
from simulated.cluster import FIRST_TOKEN, TOKENS, Cluster, Outcome, Place, Question
from simulated.traces import Arrival

PATIENCE_SECONDS = 60.0
"""Simulated seconds for the last requests to end; what has not ended then has missed its targets."""
WARM_SHARE = 0.25
"""Share of a run at its beginning that doesn't count: caches fill."""
CAPACITY = 0.9
"""Share of the requests that must meet both targets at a rate that a fleet can take."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of a request: seconds to the first token, for any prompt and for each token of it; between two tokens."""

    ttft: float
    ttft_token: float
    tpot: float

    def met(self, outcome: Outcome) -> bool:
        if not outcome.complete or outcome.ttft is None:
            return False
        soon = outcome.ttft <= self.ttft + self.ttft_token * len(outcome.question.prompt)
        return soon and (outcome.tpot or 0.0) <= self.tpot


@dataclass(slots=True)
class Run:
    """One run of a fleet."""

    seconds: float
    """Seconds in which requests arrived."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Outcomes of the requests that had ended when the run was over, and of those that had not."""
    busy: dict[str, float] = field(default_factory=dict)
    """Share of the run's time in which each worker computed, by its name."""
    began: float = 0.0

    def counted(self) -> list[Outcome]:
        """The outcomes of the requests that came after the caches were warm."""
        return [each for each in self.outcomes if each.arrival >= self.began + WARM_SHARE * self.seconds]

    def met(self, targets: Targets) -> float:
        """Share of the counted requests that met both targets."""
        found = [targets.met(each) for each in self.counted()]
        return sum(found) / max(1, len(found))

    def goodput(self, targets: Targets) -> float:
        """Counted requests a second that met both targets."""
        return sum(targets.met(each) for each in self.counted()) / ((1 - WARM_SHARE) * self.seconds)

    def ttft(self, share: float) -> float:
        """Quantile of the time to the first token; requests without one count as the longest."""
        return ttft_of([self], share)

    def mean_ttft(self) -> float:
        """Mean time to the first token of those that got one, in seconds."""
        return statistics.fmean(each.ttft for each in self.counted() if each.ttft is not None)

    def mean_tpot(self) -> float:
        """Mean time between two tokens, over the requests that have more than one, in seconds."""
        return statistics.fmean(each.tpot for each in self.counted() if each.tpot is not None)

    def hits(self, oracle: Mapping[int, int]) -> float:
        """Tokens of prompts that were in a cache, relative to those of `oracle_hits`."""
        complete = [each for each in self.counted() if each.complete]
        best = sum(oracle[int(each.question.name.rpartition("-")[2])] for each in complete)
        return sum(each.cached_tokens for each in complete) / max(1, best)


def ttft_of(runs: Iterable[Run], share: float) -> float:
    """Quantile of the time to the first token over the requests of several runs; those without one count as the
    longest."""
    found = sorted(each.ttft if each.ttft is not None else float("inf") for run in runs for each in run.counted())
    return found[min(len(found) - 1, int(share * len(found)))]


Background = Callable[[Cluster], Coroutine[None, None, None]]


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks; an error of one is raised."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def replay(
    places: Sequence[Place],
    arrivals: Sequence[Arrival],
    seconds: float,
    options: Mapping[str, object] | None = None,
    *,
    background: Background | None = None,
    max_tokens: int = 2048,
    service_class: str = "",
) -> Run:
    """Runs a fleet under arrivals, in simulated time.

    Args:
        seconds: for which requests arrive.
        options: of the router.
        background: other traffic, while requests arrive.
        max_tokens: that clients ask for, unless an answer is longer.
        service_class: of all requests.
    """

    async def main() -> Run:
        cluster = Cluster(places, options)
        await cluster.start()
        found = Run(seconds, began=cluster.now)
        other = [asyncio.create_task(background(cluster))] if background is not None else []
        tasks: dict[asyncio.Task[Outcome], Outcome] = {}
        for each in arrivals:
            await asyncio.sleep(found.began + each.at - cluster.now)
            most = max(max_tokens, each.answer_tokens)
            question = Question(f"q-{each.number}", each.prompt(), each.answer_tokens, most, service_class)
            tasks[asyncio.create_task(cluster.ask(question))] = Outcome(question, cluster.now, error="not ended")
        for task in other:
            task.cancel()
        found.busy = {each.id.name: each.busy_seconds / (cluster.now - found.began) for each in cluster.workers}
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE_SECONDS)
        found.outcomes = [task.result() if task.done() else unfinished for task, unfinished in tasks.items()]
        await cancel_all([*other, *tasks])
        return found

    return run(main())


def highest_rate(met: Callable[[float], float], low: float, high: float, precision: float = 0.06) -> float:
    """The highest rate, to a precision, at which `met` is CAPACITY or more; `low` if it is nowhere.

    Args:
        met: share of the requests that meet both targets at a rate.
        low, high: between which it lies; `high` moves up while it holds.
    """
    while met(high) >= CAPACITY:
        low, high = high, 1.25 * high
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        if met(middle) >= CAPACITY:
            low = middle
        else:
            high = middle
    return low


async def refused_again(cluster: Cluster, outcome: Outcome, seconds: float) -> float | None:
    """Seconds after which a refused request is taken if it is sent again every `seconds`; None if it never is."""
    began, number = cluster.now, 0
    while cluster.now - began < PATIENCE_SECONDS:
        await asyncio.sleep(seconds)
        number += 1
        again = replace(outcome.question, name=f"again-{number}-{outcome.question.name}")
        asked = cluster.now
        if (await cluster.ask(again)).retry_seconds is None:
            return asked - began
    return None


@dataclass(frozen=True, slots=True)
class Talk:
    """Conversations whose turns follow one another: each prompt is the one before, its answer, and a new question."""

    users: int
    """Conversations at a time."""
    turns: int = 10
    first: tuple[int, int] = (300, 1500)
    """Range of the tokens of the first prompt; `question` and `answer` are ranges of tokens, too."""
    question: tuple[int, int] = (30, 200)
    answer: tuple[int, int] = (80, 500)
    pause: float = 8.0
    """Mean seconds between an answer and the next question."""


@dataclass(slots=True)
class Talked:
    """Figures of the second and later turns."""

    answers: int = 0
    """Tokens of earlier answers that prompts had."""
    again: int = 0
    """Tokens among `answers` that were computed again."""
    elsewhere: int = 0
    """Tokens among `again` that another worker computed than the one that generated the latest answer: the choice, and
    not its cache, is the reason."""
    turns: int = 0
    busy: dict[str, float] = field(default_factory=dict)
    ttft: list[float] = field(default_factory=list)


def converse(
    places: Sequence[Place], talk: Talk, seconds: float, options: Mapping[str, object] | None = None
) -> Talked:
    """Runs a fleet under conversations, in simulated time."""

    async def user(cluster: Cluster, number: int, found: Talked) -> None:
        rng, began = random.Random(number), 0
        await asyncio.sleep(rng.uniform(0.0, 2 * talk.pause))
        while True:
            began += 1
            name = f"talk-{number}-{began}"
            prompt = rng.choices(range(FIRST_TOKEN, FIRST_TOKEN + TOKENS), k=rng.randint(*talk.first))
            answers: list[tuple[int, int]] = []
            generated_by = ""
            for turn in range(talk.turns):
                answer = rng.randint(*talk.answer)
                asked = Question(f"{name}-{turn}", prompt, answer, 1024, session=name)
                outcome = await cluster.ask(asked)
                if turn and outcome.complete:
                    cached = outcome.cached_tokens
                    found.turns += 1
                    found.ttft.append(outcome.ttft or 0.0)
                    # The last token of an answer is computed by nobody before it is part of a prompt.
                    spans = [(first, end - 1) for first, end in answers]
                    found.answers += sum(end - first for first, end in spans)
                    lost = sum(max(0, end - max(first, cached)) for first, end in spans)
                    found.again += lost
                    if outcome.trace is not None and outcome.trace.prefilled.prefill_worker != generated_by:
                        found.elsewhere += lost
                if outcome.trace is not None:
                    generated_by = outcome.trace.latest.decode_worker
                answers.append((len(prompt), len(prompt) + len(outcome.tokens)))
                question = rng.choices(range(FIRST_TOKEN, FIRST_TOKEN + TOKENS), k=rng.randint(*talk.question))
                prompt = [*prompt, *outcome.tokens, *question]
                await asyncio.sleep(rng.expovariate(1 / talk.pause))

    async def main() -> Talked:
        cluster, found = Cluster(places, options), Talked()
        await cluster.start()
        began = cluster.now
        users = [asyncio.create_task(user(cluster, number, found)) for number in range(talk.users)]
        await asyncio.wait(users, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        found.busy = {each.id.name: each.busy_seconds / (cluster.now - began) for each in cluster.workers}
        await cancel_all(users)
        return found

    return run(main())
