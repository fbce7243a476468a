"""The cluster in simulated time: it is the product's router and schedulers, so what holds there must hold here."""

import asyncio
import csv
import itertools
import json
import math
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from simulated.clock import run  # noqa: E402  # after the path
from simulated.cluster import END, FIRST_TOKEN, TOKENS, Cluster, Outcome, Place, Question  # noqa: E402
from simulated.fleet import replay  # noqa: E402
from simulated.kernels import Curve, Surface  # noqa: E402
from simulated.traces import BLOCK, Arrival, at_rate, begun_later, oracle_hits  # noqa: E402
from simulated.worker import Machine, SimulatedWorker  # noqa: E402

from kvrelay.costs.handoff import KvBytes, LinkCost  # noqa: E402
from kvrelay.costs.step import StepCost  # noqa: E402
from kvrelay.costs.worker import WorkerCosts  # noqa: E402
from kvrelay.engine.config import EngineConfig  # noqa: E402
from kvrelay.engine.models.spec import ModelSpec  # noqa: E402
from kvrelay.router.session.alarm import Alarm  # noqa: E402
from kvrelay.worker.load import CostReports  # noqa: E402


def line(chunks: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
    """10 ms a step, and 50 us a token of a prompt."""
    return 0.01 + 5e-5 * sum(tokens for _, tokens in chunks) + 1e-8 * sum(contexts)


def machine(kv_tokens: int = 8192) -> Machine:
    spec = ModelSpec("Test", 256, 4096, (END,), "float32", "0" * 64)
    engine = EngineConfig(block_size=16, kv_memory_bytes=1, max_batch_tokens=256, max_sequences=16)
    return Machine(line, spec, engine, kv_tokens, kv_bytes=1000.0, link_seconds=1e-9, handoff_seconds=1e-3)


def questions(count: int, seed: int = 0) -> list[tuple[float, Question]]:
    """Requests, each with the seconds before it."""
    rng, found = random.Random(seed), []
    for number in range(count):
        prompt = rng.choices(range(FIRST_TOKEN, FIRST_TOKEN + TOKENS), k=rng.randint(1, 600))
        found.append((rng.expovariate(20.0), Question(f"q-{number}", prompt, rng.randint(1, 60), 64)))
    return found


async def served(cluster: Cluster, asked: Sequence[tuple[float, Question]]) -> list[Outcome]:
    await cluster.start()
    tasks = []
    for pause, question in asked:
        await asyncio.sleep(pause)
        tasks.append(asyncio.create_task(cluster.ask(question)))
    return list(await asyncio.gather(*tasks))


def check(outcomes: Sequence[Outcome], workers: Sequence[SimulatedWorker]) -> None:
    """Every client has all tokens of its answer, and no worker has anything left."""
    for outcome in outcomes:
        question = outcome.question
        assert not outcome.error
        seed = zlib.crc32(question.name.encode()) % 1009
        expected = [FIRST_TOKEN + (seed + index * (1 + seed % 7)) % TOKENS for index in range(question.answer_tokens)]
        assert list(outcome.tokens) == [*expected[:-1], END]
    for worker in workers:
        worker.scheduler.check_integrity(idle=True)


def test_hours_pass_in_no_time_and_timers_ring_in_their_order() -> None:
    rung: list[float] = []

    async def main() -> float:
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        for seconds in (7200.0, 10.0, 3600.0):
            loop.call_later(seconds, lambda: rung.append(loop.time() - began))
        async with asyncio.timeout(9000):
            await asyncio.sleep(8000)
        return loop.time() - began

    began = time.monotonic()
    assert run(main()) == pytest.approx(8000)
    assert rung == pytest.approx([10.0, 3600.0, 7200.0])
    assert time.monotonic() - began < 60


def test_alarms_that_are_due_a_moment_after_a_timer_ring() -> None:
    async def main() -> None:
        loop, looks = asyncio.get_running_loop(), 0

        def clock() -> float:
            nonlocal looks
            looks += 1
            assert looks < 10**5, "the clock stands"
            return loop.time()

        due = loop.time() + 1.0
        loop.call_at(due, int)
        rung = [asyncio.Event() for _ in range(4)]
        for event in rung:
            due = math.nextafter(due, math.inf)
            Alarm(event.set, clock).set(due)
        for event in rung:
            await event.wait()
        assert loop.time() >= due

    run(main())


def test_a_wait_for_nothing_and_an_error_of_a_callback_end_the_run() -> None:
    async def stalled() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="never comes"):
        run(stalled())

    async def broken() -> None:
        asyncio.get_running_loop().call_later(1.0, lambda: [][0])
        await asyncio.sleep(10)

    with pytest.raises(IndexError):
        run(broken())


@pytest.mark.parametrize("kv_tokens", [8192, 1024], ids=["room", "scarce"])
def test_each_answer_is_whole_over_hand_offs_and_where_blocks_are_scarce(kv_tokens: int) -> None:
    async def main() -> list[Outcome]:
        place = machine(kv_tokens)
        cluster = Cluster([Place("prefill", place)] * 2 + [Place("decode", place)] * 2)
        outcomes = await served(cluster, questions(60))
        check(outcomes, cluster.workers)
        return outcomes

    first, second = run(main()), run(main())
    assert [each.first for each in first] == [each.first for each in second], "a run can be repeated"
    # A prompt takes at least its steps; the first one has found the workers idle.
    assert all((each.ttft or 0.0) >= 0.01 for each in first)
    assert first[0].ttft == pytest.approx(0.01 + 5e-5 * len(first[0].question.prompt), abs=0.02)


def test_answers_go_on_elsewhere_when_a_worker_changes_its_role() -> None:
    async def main() -> None:
        place = machine()
        cluster = Cluster([Place("prefill", place)] * 2 + [Place("decode", place)] * 2)
        asked = asyncio.create_task(served(cluster, questions(60)))
        await asyncio.sleep(1.0)
        decode = next(worker for worker in cluster.workers if worker.role == "decode")
        await cluster.change_role(decode, "prefill", 0.5)
        outcomes = await asked
        check(outcomes, cluster.workers)
        moved = sum(each.trace.migrations for each in outcomes if each.trace is not None)
        assert moved, "streams were on it"

    run(main())


@pytest.mark.parametrize("seed", range(3))
def test_wrong_costs_cost_time_and_no_token(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)

    def wrong(reports: CostReports) -> WorkerCosts:
        numbers = [10 ** rng.uniform(-9, 1) * rng.choice((0, 1)) for _ in range(7)]
        links = {name: LinkCost(rng.random(), rng.random()) for name in ("prefill-0", "decode-1", "colocated-2")}
        return WorkerCosts(
            StepCost(*numbers), rng.randint(1, 9999), rng.random(), kv=KvBytes(rng.random()), links=links
        )

    monkeypatch.setattr(CostReports, "costs", wrong)

    async def main() -> None:
        place = machine(2048)
        places = [Place("prefill", place), Place("decode", place), Place("colocated", place)]
        cluster = Cluster(places, {"placement": "predicted"})
        check(await served(cluster, questions(50, seed)), cluster.workers)

    run(main())


def test_traces_keep_their_order_at_any_rate_and_an_endless_cache_has_what_came_before() -> None:
    trace = [Arrival(0.0, 0, 1100, 5, (1, 2, 3)), Arrival(4.0, 1, 1600, 5, (1, 2, 4, 5)), Arrival(6.0, 2, 512, 5, (9,))]
    arrivals = at_rate(trace, 10.0, 1.0)
    assert len(arrivals) == 10
    assert [each.at for each in arrivals] == sorted(each.at for each in arrivals)
    assert len({each.number for each in arrivals}) == 10
    assert arrivals[0].prompt()[:1024] == arrivals[1].prompt()[:1024]
    assert arrivals[0].prompt()[1024:1100] != arrivals[1].prompt()[1024:1100]
    hits = oracle_hits(arrivals)
    assert [hits[number] for number in range(4)] == [0, 1024, 0, 0], "repeated, the prompts are others"


def test_between_measured_sizes_time_lies_between_theirs() -> None:
    surface = Surface({(1, 10): 1.0, (1, 100): 4.0, (4, 10): 2.0, (4, 100): 8.0})
    assert surface(1, 10) == pytest.approx(1.0)
    assert surface(2, 10) == pytest.approx(2**0.5)
    assert surface(4, 200) == pytest.approx(16.0), "beyond the largest, in proportion"
    curve = Curve({1: 1.0, 100: 3.0})
    times = [curve(x) for x in range(1, 200)]
    assert times == sorted(times)


# The benchmark of routing, with a trace and measurements that are made up.


def test_a_trace_begun_later_has_the_same_requests() -> None:
    trace = [Arrival(1.5 * number, number, 10, 1) for number in range(20)]
    assert begun_later(trace, 0.0) == trace
    later = begun_later(trace, 0.25)
    assert [each.number for each in later] == [*range(5, 20), *range(5)]
    assert [each.at for each in later[:15]] == [each.at for each in trace[:15]]
    assert later[15].at == pytest.approx(22.5, abs=1.5)


def conversations(count: int) -> list[Arrival]:
    """Conversations of one to seven turns, each longer by a block than the one before; half of them begin alike."""
    rng, fresh, found = random.Random(7), itertools.count(1), []
    for _ in range(count):
        blocks = [0] if rng.random() < 0.5 else [next(fresh)]
        at = rng.uniform(0, 60)
        for _ in range(rng.randint(1, 7)):
            blocks = [*blocks, next(fresh)]
            found.append(Arrival(at, 0, BLOCK * len(blocks), rng.randint(1, 20), tuple(blocks)))
            at += rng.uniform(2, 8)
    return [replace(each, number=number) for number, each in enumerate(sorted(found, key=lambda each: each.at))]


@pytest.mark.more
def test_conversations_find_nine_tenths_of_what_one_endless_cache_would() -> None:
    """Nearly every token that some worker has computed is found there again."""
    arrivals, large = conversations(80), replace(machine(2**20), spec=replace(machine().spec, max_context=8192))
    places = [Place("prefill", large)] * 4 + [Place("decode", large)] * 2

    def hits(placement: str) -> float:
        done = replay(places, arrivals, arrivals[-1].at, {"placement": placement})
        return done.hits(oracle_hits(arrivals))

    assert min(hits("least_work"), hits("predicted")) >= 0.9
    assert hits("random") < 0.85, "the conversations tell them apart"


def table(path: Path, rows: Sequence[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture(scope="module")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels that take as long as 1 PFLOP/s and 3 TB/s let them."""
    folder = tmp_path_factory.mktemp("kernels")
    gpu = {"system": "h100_sxm"}
    sizes = list(itertools.product((1, 64, 4096), (1024, 16384), (1024, 16384)))
    gemm = [
        {**gpu, "gemm_dtype": "bfloat16", "m": m, "n": n, "k": k}
        | {"latency_ms": 1e3 * max(2e-15 * m * n * k, 2 * n * k / 3e12)}
        for m, n, k in sizes
    ]
    heads = (4, 8, 16, 32, 64)
    context = [
        {**gpu, "batch_size": b, "isl": n, "num_heads": h, "latency_ms": 1e-8 * b * h * n * n + 0.01}
        for b, n, h in itertools.product((1, 8), (1, 1024, 16384), heads)
    ]
    generation = [
        {**gpu, "batch_size": b, "step": n, "num_heads": h, "latency_ms": 1e-7 * b * h * n + 0.01}
        for b, n, h in itertools.product((1, 64), (1, 1024, 16384), heads)
    ]
    table(folder / "aic_gemm_measured.csv", gemm)
    table(folder / "aic_context_attention_measured.csv", context)
    table(folder / "aic_generation_attention_measured.csv", generation)
    return folder


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    (folder / "mooncake").mkdir()
    rng = random.Random(0)
    rows = [
        {"timestamp": 3000 * (number // 3), "input_length": 512 * 3, "output_length": rng.randint(10, 60)}
        | {"hash_ids": [0, number % 5 + 1, number + 10]}
        for number in range(60)
    ]
    (folder / "mooncake" / "conversation_trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.slow
def test_the_benchmark_of_routing_finds_the_highest_rate_and_draws_it(
    measurements: Path, traces: Path, tmp_path: Path
) -> None:
    results, picture = tmp_path / "results.json", tmp_path / "picture.svg"

    def call(*arguments: object) -> None:
        command = [sys.executable, str(BENCHMARKS / "routing.py"), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)
        assert done.returncode == 0, done.stderr

    folders = "--traces", traces, "--calibration", measurements
    few = "--workers", 1, 1, "--seconds", 4, "--policies", "least_work", "colocated least_work"
    call("simulated", *folders, *few, "--rows", "rate", "curve", "--start", 8, "--out", results)
    fleet = json.loads(results.read_text())["conversation 1+1"]
    highest = fleet["rate"]["least_work"]["highest_rate"]
    runs = {run["rate"]: run["met"] for run in fleet["runs"]["least_work"]}
    assert runs[highest] >= 0.9
    assert min(met for rate, met in runs.items() if rate > highest) < 0.9, "it was looked for above, too"
    assert 0.5 < fleet["rate"]["least_work"]["hits_of_oracle"] <= 1.1
    call("decision", "--prefixes", 300, "--decisions", 50, "--out", results)
    timed = json.loads(results.read_text())["decision"]["rows"]
    assert [(row["workers"], row["placement"]) for row in timed] == [
        *itertools.product((64, 1000), ("predicted", "least_work"))
    ]
    assert all(0 < row["decision_us_p50"] <= row["decision_us_p99"] for row in timed)
    call("picture", results, "--fleet", "conversation 1+1", "--out", picture)
    assert picture.read_text().count("<polyline") == len(fleet["curve"]) == 2
