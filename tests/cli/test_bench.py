"""`kvrelay bench`: its workload, and its figures of servers whose timing is known, through both faces."""

import asyncio
import json
import math
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from aiohttp import web
from command import call, fails
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cli.bench.faces import HttpFace, Reply, Target
from kvrelay.cli.bench.figures import figures
from kvrelay.cli.bench.load import Request
from kvrelay.cli.bench.options import (
    ArrivalOptions,
    Arrivals,
    BenchOptions,
    Lengths,
    WorkloadOptions,
    check,
    parse_goodput,
    parse_sweep,
)
from kvrelay.cli.bench.result import Run
from kvrelay.cli.bench.run import Bench, measure
from kvrelay.cli.bench.workload import Ask, asks, offsets
from kvrelay.cluster.errors import UsageError
from support.browser import browser
from support.router_fakes import background, until


class Server:
    """OpenAI's completions with a script: each request waits, then sends its tokens at equal gaps."""

    def __init__(self, first: float, gap: float, hold: asyncio.Event | None = None, free: int = 0) -> None:
        """
        Args:
            hold: what requests wait for, but the first `free` ones.
        """
        self.first, self.gap, self.hold, self.free = first, gap, hold, free
        self.bodies: list[dict[str, Any]] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if body["max_tokens"] == 13:
            return web.json_response({"error": {"message": "thirteen is refused"}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.hold is not None and len(self.bodies) > self.free:
            await self.hold.wait()
        await asyncio.sleep(self.first)
        for at in range(body["max_tokens"]):
            if at:
                await asyncio.sleep(self.gap)
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    @asynccontextmanager
    async def run(self) -> AsyncIterator[str]:
        async def models(_: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "scripted", "max_model_len": 100}]})

        async def tokenize(request: web.Request) -> web.Response:
            text = (await request.json())["prompt"]
            return web.json_response({"tokens": [ord(letter) for letter in text]})

        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.post("/tokenize", tokenize)])
        app.add_routes([web.post("/v1/completions", self.complete)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def bench(
    server: Server, workload: WorkloadOptions, arrival: ArrivalOptions, goodput: dict[str, float], warmup: int = 0
) -> Run:
    options = BenchOptions(workload, arrival, goodput, warmup=warmup)
    async with server.run() as url:
        made = Bench(options, None, "http", url)
        return (await measure(made, HttpFace(Target(url)), lambda name, count: lambda progress: None)).runs[0]


async def test_times_are_those_of_the_server() -> None:
    workload = WorkloadOptions(6, Lengths("fixed", 20), Lengths("fixed", 5))
    run = await bench(Server(0.2, 0.1), workload, ArrivalOptions(concurrency=3), {"ttft": 60_000}, warmup=2)
    found = run.figures
    # A busy machine makes all of them longer, never shorter.
    assert found["median_ttft_ms"] >= 200
    assert found["median_tpot_ms"] >= 100
    assert found["median_itl_ms"] >= 90
    assert found["median_e2el_ms"] >= 600
    assert found["median_e2el_ms"] == pytest.approx(found["median_ttft_ms"] + 4 * found["median_tpot_ms"], rel=0.3)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 30)
    assert found["max_concurrent_requests"] == 3
    assert found["request_goodput"] == found["request_throughput"]
    assert all(len(request.itls) == 4 for request in run.requests)


async def test_an_open_loop_sends_what_is_due_though_nothing_comes_back() -> None:
    hold = asyncio.Event()
    server = Server(0.0, 0.0, hold)
    workload = WorkloadOptions(20, Lengths("fixed", 4), Lengths("fixed", 1))
    running = asyncio.create_task(bench(server, workload, ArrivalOptions("constant", 200.0), {}))
    await until(lambda: len(server.bodies) == 20, "all are sent", 30)
    hold.set()
    assert (await running).figures["max_concurrent_requests"] == 20
    assert len(server.bodies) == 20


async def test_a_wait_for_one_s_turn_counts_from_the_scheduled_arrival() -> None:
    workload = WorkloadOptions(8, Lengths("fixed", 4), Lengths("fixed", 1))
    found = (await bench(Server(0.1, 0.0), workload, ArrivalOptions("constant", 1000.0, concurrency=1), {})).figures
    # One at a time, 0.1 s each, all due at once: the last one waits for seven others.
    assert found["p99_ttft_scheduled_ms"] >= 650
    assert found["max_late_ms"] >= 650
    assert found["mean_ttft_ms"] < found["mean_ttft_scheduled_ms"]


def test_figures_are_those_of_vllm_bench_serve() -> None:
    def request(scheduled: float, sent: float, arrivals: tuple[float, ...], tokens: int) -> Request:
        return Request.of(Reply(True, "", arrivals, 10, tokens, 4), tokens, scheduled, sent, sent + arrivals[-1])

    requests = [
        request(0.0, 0.0, (0.1, 0.2, 0.4), 4),
        request(0.5, 1.0, (0.3,), 1),
        Request.of(Reply(error="refused"), 9, 1.4, 1.4, 1.45),  # fails before it has begun
        Request.of(Reply(error="reset", arrivals=(0.1,)), 9, 1.5, 1.5, 1.6),
        Request.of(Reply(error="500"), 9, 1.7, 1.7, 1.8),
    ]
    found = figures(requests, 2.0, {"ttft": 200.0, "tpot": 101.0}, (50.0, 90.0))
    assert (found["completed"], found["failed"]) == (2, 3)
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["std_ttft_ms"] == pytest.approx(100)
    assert found["p90_ttft_ms"] == pytest.approx(float(np.percentile([100, 300], 90)))
    assert found["mean_tpot_ms"] == pytest.approx(100)  # the request of one token has none
    assert found["mean_itl_ms"] == pytest.approx(150)  # by message
    assert found["mean_e2el_ms"] == pytest.approx(350)
    assert found["mean_ttft_scheduled_ms"] == pytest.approx((100 + 800) / 2)
    assert found["request_throughput"] == 1.0
    assert found["output_throughput"] == 2.5
    assert found["total_token_throughput"] == 12.5
    assert found["request_goodput"] == 0.5
    assert found["max_concurrent_requests"] == 1
    assert figures([], 1.0, {}, (99.0,))["p99_itl_ms"] == 0.0


def test_both_faces_measure_the_same_requests(tmp_path: Path) -> None:
    with background(tmp_path / "cluster", lambda index: 40 + index % 9, http_port=0) as cluster:
        router = cluster.router
        targets = {"grpc": router.address, "http": f"http://{router.http_address}"}
        found = {}
        for face, target in targets.items():
            out = tmp_path / f"{face}.json"
            result = call(
                *("bench", "--face", face, "--target", target, "--num-prompts", "6", "--sweep", "rate=50,100"),
                *("--input-tokens", "uniform:8-20", "--output-tokens", "4", "--goodput", "ttft:60000 e2el:60000"),
                *("--json", str(out), "--html", str(tmp_path / f"{face}.html")),
            )
            assert result.exit_code == 0, result.output
            assert "6 completed, 0 failed" in result.stdout
            found[face] = json.loads(out.read_text())
    printed = json.loads(call("bench", "--schema").stdout)
    jsonschema.Draft202012Validator.check_schema(printed)
    for result in found.values():
        jsonschema.validate(result, printed)
        assert [run["request_rate"] for run in result["runs"]] == [50, 100]
        assert all(run["figures"]["request_goodput"] > 0 for run in result["runs"])
    lengths = [[each["prompt_tokens"] for each in result["runs"][1]["requests"]] for result in found.values()]
    due = [[each["scheduled"] for each in result["runs"][0]["requests"]] for result in found.values()]
    assert lengths[0] == lengths[1]
    assert due[0] == pytest.approx(due[1], abs=0.02)  # a request that is sent a moment early is due when it is sent
    assert found["grpc"]["runs"][0]["requests"][0]["stages"]["prefill_seconds"] > 0


async def test_the_report_needs_nothing_from_elsewhere_and_shows_in_a_browser(tmp_path: Path) -> None:
    with background(tmp_path / "cluster", lambda index: 40 + index % 9, http_port=0) as cluster:
        report = tmp_path / "report.html"
        result = await asyncio.to_thread(
            call,
            *("bench", "--target", cluster.router.address, "--num-prompts", "20"),
            *("--sweep", "concurrency=1,4", "--input-tokens", "8", "--output-tokens", "6", "--html", report),
        )
        assert result.exit_code == 0, result.output
    text = report.read_text()
    assert not re.search(r"https?://(?!127\.0\.0\.1|www\.w3\.org)|<script|<link|@import|url\(", text)

    async with browser(tmp_path) as tab:
        for dark in (False, True):
            await tab.open(report.as_uri(), dark=dark)
            assert await tab.value("document.querySelectorAll('svg').length") >= 10
            broken = "[...document.querySelectorAll('path')].filter(p => /NaN|Infinity/.test(p.outerHTML)).length"
            assert await tab.value(broken) == 0
            assert await tab.value("document.documentElement.scrollWidth <= innerWidth")
        assert tab.complaints == []


async def test_failures_are_counted_and_named() -> None:
    run = await bench(
        Server(0.0, 0.0), WorkloadOptions(3, Lengths("fixed", 4), Lengths("fixed", 13)), ArrivalOptions(), {}
    )
    assert (run.figures["completed"], run.figures["failed"]) == (0, 3)
    assert "thirteen is refused" in run.requests[0].error


@pytest.mark.parametrize("ending", ["interrupted", "output closed"])
@pytest.mark.some(1)
async def test_what_was_measured_is_kept(tmp_path: Path, ending: str) -> None:
    """The run ends because of Ctrl-C with requests in flight, or because nobody reads its output."""
    hold = asyncio.Event() if ending == "interrupted" else None
    server = Server(0.0, 0.0, hold, free=3)
    async with server.run() as url:
        files = ("--json", str(tmp_path / "bench.json"), "--html", str(tmp_path / "bench.html"))
        options = ("--num-prompts", "8", "--warmup", "0", "--input-tokens", "20", "--output-tokens", "2", *files)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrelay.cli", "bench", "--face", "http", "--target", url),
            *("--concurrency", "1", *options),
            stdout=asyncio.subprocess.PIPE,
        )
        if hold is not None:
            await until(lambda: len(server.bodies) > 3, "one that gets no answer", 60)
            process.send_signal(signal.SIGINT)
            shown, _ = await asyncio.wait_for(process.communicate(), 60)
        else:
            process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]  # no public way to it
            await asyncio.wait_for(process.wait(), 60)
    (run,) = json.loads((tmp_path / "bench.json").read_text())["runs"]
    assert (tmp_path / "bench.html").stat().st_size > 1000
    assert run["interrupted"] == (ending == "interrupted")
    assert (process.returncode, len(run["requests"])) == ((130, 3) if ending == "interrupted" else (1, 8))
    if ending == "interrupted":
        assert b"3 completed, 0 failed" in shown
        assert b"time to first token" in shown


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for code, words, arguments in (
        (1, "--target 127.0.0.1:1", ("--target", "127.0.0.1:1", "--timeout", "2")),
        (1, "GET /v1/models", ("--target", "127.0.0.1:1", "--face", "http")),
        (2, "--json .*there is no such folder", ("--json", str(tmp_path / "no" / "a.json"))),
        (2, "--percentiles is 'a'", ("--percentiles", "a")),
        (2, "allowed: without --arrivals trace", ("--arrivals", "trace", "--trace", "x", "--sweep", "rate=1")),
    ):
        fails(code, words, "bench", *arguments)


# The workload.


async def tokenize(text: str) -> Sequence[int]:
    return [ord(letter) % 200 + 3 for letter in text]


def made(options: WorkloadOptions, seed: int = 0) -> list[Ask]:
    return asyncio.run(asks(options, tokenize, seed))


@given(
    st.sampled_from(["poisson", "gamma", "constant"]),
    st.floats(0.1, 1000),
    st.floats(0.1, 10),
    st.integers(1, 200),
    st.integers(0, 2**32),
)
def test_arrivals_come_in_order_and_at_the_rate(
    arrivals: Arrivals, rate: float, burstiness: float, count: int, seed: int
) -> None:
    options = ArrivalOptions(arrivals, rate, burstiness)
    times = offsets(options, count, np.random.default_rng(seed))
    assert len(times) == count
    assert all(0 <= earlier <= later for earlier, later in pairwise([0.0, *times]))
    assert times[-1] == pytest.approx(count / rate)
    assert times == offsets(options, count, np.random.default_rng(seed))


def test_burstiness_sets_the_spread_of_the_gaps() -> None:
    def spread(options: ArrivalOptions) -> float:
        gaps = np.diff(offsets(options, 20_000, np.random.default_rng(1)))
        return float(np.std(gaps) / np.mean(gaps))

    assert spread(ArrivalOptions("poisson", 10)) == pytest.approx(1.0, abs=0.05)
    assert spread(ArrivalOptions("gamma", 10, 0.25)) == pytest.approx(2.0, abs=0.15)
    assert spread(ArrivalOptions("gamma", 10, 4.0)) == pytest.approx(0.5, abs=0.05)
    assert spread(ArrivalOptions("constant", 10)) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "mean", "low", "high"),
    [("7", 7, 7, 7), ("uniform:10-30", 20, 10, 30), ("lognormal:100,0.5", 100, 1, 2000)],
)
def test_lengths_follow_their_distribution(text: str, mean: float, low: int, high: int) -> None:
    drawn = Lengths.parse(text, "--input-tokens").draw(20_000, np.random.default_rng(3))
    assert min(drawn) >= low
    assert max(drawn) <= high
    assert float(np.mean(drawn)) == pytest.approx(mean, rel=0.03)


def test_equal_seeds_give_equal_requests_and_others_differ() -> None:
    options = WorkloadOptions(5, Lengths("uniform", 20, 40), Lengths("fixed", 3), shared_prefix=8)
    first = made(options, 1)
    assert first == made(options, 1)
    assert first != made(options, 2)
    assert len({ask.prompt[:8] for ask in first}) == 1
    assert len({ask.prompt[8:16] for ask in first}) == len(first)
    assert all(20 <= len(ask.prompt) <= 40 and ask.output_tokens == 3 for ask in first)


def test_a_trace_gives_times_lengths_and_shared_beginnings(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 5000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
        {"timestamp": 4000, "input_length": 1030, "output_length": 9, "hash_ids": [0, 1, 8]},
        {"timestamp": 6500, "input_length": 30, "output_length": 0},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    later, earlier, last = (found := made(WorkloadOptions(trace=path)))[1], found[0], found[2]
    assert [ask.at for ask in found] == [0.0, 1.0, 2.5]
    assert [len(ask.prompt) for ask in (later, earlier, last)] == [1100, 1030, 30]
    assert (later.output_tokens, earlier.output_tokens, last.output_tokens) == (7, 9, 1)
    assert later.prompt[:1024] == earlier.prompt[:1024]
    assert later.prompt[1024:1030] != earlier.prompt[1024:1030]
    half = made(WorkloadOptions(trace=path, length_scale=0.5))
    assert [len(ask.prompt) for ask in half] == [515, 550, 15]
    assert half[0].prompt[:512] == half[1].prompt[:512]
    assert len(made(WorkloadOptions(num_prompts=2, trace=path))) == 2


def test_datasets_of_lines_and_of_conversations(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\ntwo\nthree\n")
    found = made(WorkloadOptions(7, output_tokens=Lengths("fixed", 5), dataset=lines))
    assert {ask.prompt for ask in found} == {"one", "two", "three"}
    assert [ask.output_tokens for ask in found] == [5] * 7
    conversations = [
        {"conversations": [{"from": "human", "value": "a question"}, {"from": "gpt", "value": "an answer"}]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "too short to be used"}]},
        {"conversations": [{"from": "human", "value": "x" * 1025}, {"from": "gpt", "value": "too long before"}]},
        {"conversations": [{"from": "human", "value": "alone"}]},
    ]
    shared = tmp_path / "shared.json"
    shared.write_text(json.dumps(conversations))
    assert set(made(WorkloadOptions(2, dataset=shared))) == {Ask("a question", len("an answer"))}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"timestamp": 1}', "line 1"),
        ("[1, 2]", "allowed: a JSON object"),
        ("nonsense", "not JSON lines"),
        ("", "it is empty"),
        (None, "No such file"),
    ],
)
def test_a_trace_that_can_t_be_used_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "trace"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=words):
        made(WorkloadOptions(trace=path))
    with pytest.raises(UsageError, match="No such file"):
        made(WorkloadOptions(dataset=tmp_path / "missing"))


@pytest.mark.parametrize("face", ["grpc", "http"])
def test_authorities_that_can_t_be_read_are_named(face: str) -> None:
    fails(
        2,
        r"^kvrelay: --ca nowhere: No such file",
        "bench",
        "--face",
        face,
        "--target",
        "127.0.0.1:1",
        "--ca",
        "nowhere",
    )


@pytest.mark.parametrize(
    ("workload", "arrival", "more", "words"),
    [
        ({"num_prompts": 0}, {}, {}, "--num-prompts is 0; allowed"),
        ({}, {"request_rate": 0.0}, {}, "--request-rate is 0; allowed"),
        ({}, {"request_rate": math.nan}, {}, "--request-rate is nan"),
        ({}, {"burstiness": 0.5}, {}, "with --arrivals gamma only"),
        ({}, {"arrivals": "trace"}, {}, "with --trace FILE only"),
        ({"trace": Path("a"), "dataset": Path("b")}, {}, {}, "allowed: one of them"),
        ({"trace": Path("a")}, {"arrivals": "trace", "request_rate": 3.0}, {}, "which has its own times"),
        ({}, {}, {"percentiles": (101.0,)}, "allowed: 0 to 100"),
        ({}, {}, {"timeout": 0.0}, "--timeout is 0"),
    ],
)
def test_options_out_of_range_are_named(
    workload: dict[str, Any], arrival: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        check(BenchOptions(WorkloadOptions(**workload), ArrivalOptions(**arrival), **more))


def test_lengths_goodput_and_sweep_are_read_and_what_can_t_be_used_is_named() -> None:
    assert parse_goodput(("ttft:200 tpot:50", "e2el:3e3")) == {"ttft": 200, "tpot": 50, "e2el": 3000}
    assert parse_sweep("rate=1,2.5") == ("rate", [1.0, 2.5])
    for text in ("", "0", "-3", "uniform:5", "uniform:9-3", "lognormal:0,1", "normal:3", "1.5", "x"):
        with pytest.raises(UsageError, match=r"--output-tokens is .*; allowed: N, uniform"):
            Lengths.parse(text, "--output-tokens")
    for text in ("itl:3", "ttft", "ttft:x", "ttft:-1"):
        with pytest.raises(UsageError, match="--goodput has"):
            parse_goodput((text,))
    for text in ("rate", "rate=", "speed=1", "rate=1,0", "concurrency=1.5", "rate=inf"):
        with pytest.raises(UsageError, match="--sweep is"):
            parse_sweep(text)
