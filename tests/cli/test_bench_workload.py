"""The workload of `kvrelay bench`: arrivals, lengths, prompts, and mistakes in its options and files."""

import asyncio
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.cli.bench.arrivals import offsets
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
from kvrelay.cli.bench.workload import Ask, asks
from kvrelay.cluster.errors import UsageError


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
    ],
)
def test_a_trace_that_can_t_be_used_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        made(WorkloadOptions(trace=path))
    with pytest.raises(UsageError, match="No such file"):
        made(WorkloadOptions(trace=tmp_path / "missing"))
    with pytest.raises(UsageError, match="No such file"):
        made(WorkloadOptions(dataset=tmp_path / "missing"))


@pytest.mark.parametrize("text", ["", "0", "-3", "uniform:5", "uniform:9-3", "lognormal:0,1", "normal:3", "1.5", "x"])
def test_lengths_that_can_t_be_used_are_named(text: str) -> None:
    with pytest.raises(UsageError, match=r"--output-tokens is .*; allowed: N, uniform"):
        Lengths.parse(text, "--output-tokens")


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


def test_goodput_and_sweep_are_read() -> None:
    assert parse_goodput(("ttft:200 tpot:50", "e2el:3e3")) == {"ttft": 200, "tpot": 50, "e2el": 3000}
    assert parse_sweep("rate=1,2.5") == ("rate", [1.0, 2.5])
    for text in ("itl:3", "ttft", "ttft:x", "ttft:-1"):
        with pytest.raises(UsageError, match="--goodput has"):
            parse_goodput((text,))
    for text in ("rate", "rate=", "speed=1", "rate=1,0", "concurrency=1.5", "rate=inf"):
        with pytest.raises(UsageError, match="--sweep is"):
            parse_sweep(text)
