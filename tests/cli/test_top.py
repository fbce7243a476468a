"""`kvrelay top`: what it shows of several routers, and what it does when it can't."""

import asyncio
import json
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from command import call, fails
from rich.console import Console

from kvrelay.cli.top import run as top_run
from kvrelay.cli.top.model import MOST_DECISIONS, SORTS, Model
from kvrelay.cli.top.view import BAR_CELLS, frame
from kvrelay.client import Client
from support.router_fakes import background, until
from support.terminal import Terminal


def worker(name: str, computed: int = 0, **more: Any) -> dict[str, Any]:
    counts = {"running": 0, "waiting": 0, "pending_tokens": 0, "computed_tokens": computed, "block_size": 16}
    pool = {"total": 100, "free": 100, "cached": 0, "held": 0}
    return {"name": name, "role": "decode", "state": "ready", "avoided": False, **counts, **pool, **more}


def life(name: str, received: float, **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "received": received,
        "age": 1.0,
        "outcome": "stop",
        "placed": [0.01],
        "incidents": [],
        "prefill_worker": "p",
        "decode_worker": "d",
        "prompt_tokens": 10,
        "cached_tokens": 5,
        "completion_tokens": 8,
        "ttft": 0.1,
        "tpot": 0.02,
        "handoff": 0.01,
        "retries": 0,
        "migrations": 0,
        **more,
    }


def fleet(*workers: dict[str, Any], links: Any = (), lives: Any = ()) -> dict[str, Any]:
    return {"ready": True, "running": len(lives), "workers": list(workers), "links": list(links), "lives": list(lives)}


def two_routers() -> Model:
    model = Model(("a", "b"), {"ttft": 200.0})
    model.event("a", "fleet", fleet(worker("w", 100), links=[link(1000)]))
    model.event("b", "fleet", fleet(worker("w", 300), worker("v"), links=[link(500)]))
    return model


def link(nbytes: int) -> dict[str, Any]:
    return {"prefill": "p", "decode": "d", "nbytes": nbytes, "transfers": 1, "sending": 1}


def test_workers_are_counted_once_and_links_add_up() -> None:
    model = two_routers()
    model.sample(10.0)
    model.event("b", "fleet", fleet(worker("w", 400), worker("v"), links=[link(1500)]))
    model.sample(12.0)
    shown = model.frame()
    assert [(each["name"], each["computed_tokens"], each["tokens_per_second"]) for each in shown["workers"]] == [
        ("v", 0, 0.0),
        ("w", 400, 50.0),
    ]
    (pair,) = shown["links"]
    assert (pair["nbytes"], pair["transfers"], pair["sending"], pair["bytes_per_second"]) == (2500, 2, 2, 500.0)


def test_a_worker_that_starts_again_has_no_negative_rate() -> None:
    model = two_routers()
    model.sample(10.0)
    model.event("b", "fleet", fleet(worker("w", 7)))
    model.event("a", "fleet", fleet(worker("w", 7)))
    model.sample(12.0)
    assert all((each["tokens_per_second"] or 0.0) >= 0.0 for each in model.frame()["workers"])


def test_goodput_counts_requests_within_the_limits() -> None:
    model, now = two_routers(), time.time()
    model.event("a", "recent", [life("old", now - 500), life("good", now - 10)])
    model.event("b", "ended", life("slow", now - 8, ttft=0.5))
    model.event("b", "ended", life("bad", now - 6, outcome="unavailable", ttft=None, tpot=None))
    found = model.frame()["requests"]
    assert (found["ended"], found["completed"], found["failed"]) == (3, 2, 1)
    assert found["goodput_per_second"] == pytest.approx(found["requests_per_second"] / 2)
    assert found["p50_ttft"] == pytest.approx(0.3)
    assert found["cached_share"] == 0.5


def test_requests_are_counted_once_whatever_a_new_connection_tells_again() -> None:
    model, now = two_routers(), time.time()
    model.event("a", "recent", [life("first", now - 20)])
    model.event("a", "ended", life("second", now - 10))
    model.event("b", "ended", life("second", now - 9))  # another request of the same name
    model.lost("a", "connection reset")
    model.event("a", "recent", [life("second", now - 10), life("third", now - 5)])
    assert model.frame()["requests"]["ended"] == 4


def test_requests_are_kept_for_the_window_whichever_router_told_them_first() -> None:
    model, now = two_routers(), time.time()
    model.event("b", "recent", [life(f"late {index}", now - 10) for index in range(MOST_DECISIONS)])
    model.event("a", "recent", [life(f"old {index}", now - 500) for index in range(MOST_DECISIONS)])
    for index in range(10):
        model.event("a", "ended", life(f"new {index}", now - 5))
    assert model.frame()["requests"]["ended"] == MOST_DECISIONS + 10
    assert sum(map(len, model.ended.values())) == 2 * MOST_DECISIONS


def test_decisions_are_the_latest_first_with_their_reasons() -> None:
    model, now = two_routers(), time.time()
    model.event("a", "ended", life("first", now - 20, incidents=[["wait", 0.1, "all decode slots were taken"]]))
    model.event("a", "fleet", fleet(worker("w"), lives=[life("running", now - 1, outcome=None)]))
    first, second = model.frame()["decisions"]
    assert (first["id"], first["outcome"]) == ("running", None)
    assert (second["id"], second["why"]) == ("first", "all decode slots were taken")


def test_a_lost_router_is_shown_and_its_view_is_gone() -> None:
    model = two_routers()
    model.lost("b", "connection refused")
    shown = model.frame()
    assert [router["error"] for router in shown["routers"]] == ["", "connection refused"]
    assert [each["name"] for each in shown["workers"]] == ["w"]
    assert shown["workers"][0]["computed_tokens"] == 100


@pytest.mark.parametrize("sort", SORTS)
def test_every_order_draws_empty_and_full_clusters(sort: str) -> None:
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  # the console's own
    for model in (two_routers(), Model(("a",), {})):
        for wide in (False, True):
            console.print(frame(model.frame(), sort, (160, 30), wide=wide))
    assert "worker" in console.export_text()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("columns", [80, 100, 120])
def test_what_matters_most_is_never_cut(columns: int, wide: bool) -> None:
    pool = {"total": 128_000, "free": 0, "cached": 0, "held": 128_000}
    names = ("worker-10", "worker-11")
    busy = [worker(name, role="colocated", running=4321, waiting=1234, avoided=True, **pool) for name in names]
    pair = {"prefill_worker": names[0], "decode_worker": names[1]}
    model = Model(("a",), {"ttft": 200.0})
    model.event("a", "fleet", fleet(*busy, links=[link(1000)], lives=[life("a" * 32, time.time(), **pair)]))
    console = Console(width=columns, file=StringIO(), force_terminal=False)
    console.print(frame(model.frame(), "load", console.size, wide=wide))
    lines = console.file.getvalue().splitlines()
    for name in names:
        (row,) = [line.split() for line in lines if line.startswith(name) and "→" not in line]
        assert row[:6] == [name, "colocated", "avoided", "4321", "1234", "█" * BAR_CELLS]
        assert row[6] == "100%"
    assert any(line.startswith("worker-10 → worker-11  stop") for line in lines)
    assert max(map(len, lines)) <= columns
    shown = " ".join(lines)
    assert all(name in shown for name in ("running", "tokens/s", "hand-off p50/p99", "failed", "moved"))
    if columns == 120:
        assert "a" * 32 in shown or wide


@pytest.mark.more
def test_one_frame_of_a_real_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with background(tmp_path / "cluster", lambda index: 40 + index % 9, http_port=0) as cluster:
        router = cluster.router
        target = f"http://{router.http_address}"
        with Client(router.address) as client:
            client.complete([1, 2, 3], max_tokens=4, temperature=0, request_id="mine")
        result = call("top", "--once", "--json", "--target", target)
        assert result.exit_code == 0, result.output
        shown = json.loads(result.stdout)
        assert {each["name"] for each in shown["workers"]} == {"prefill-0", "decode-0"}
        assert shown["requests"]["completed"] == 1
        (decision,) = shown["decisions"]
        assert decision["id"].startswith("mine/")
        assert (decision["prefill"], decision["decode"]) == ("prefill-0", "decode-0")
        picture = tmp_path / "top.svg"
        result = call("top", "--once", "--target", target, "--svg", str(picture))
        assert "prefill-0 → decode-0" in result.stdout
        assert "prefill-0" in picture.read_text()
        assert "url(" not in re.sub(r"url\(#[^)]*\)", "", picture.read_text())
        with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
            monkeypatch.setattr(top_run, "FIRST_SECONDS", 3.0)
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            result = call("top", "--once", "--json", "--target", f"{url},{target}")
            assert result.exit_code == 0, result.output
            errors = [each["error"] for each in json.loads(result.stdout)["routers"]]
            assert errors == [f"router {url}: no answer within 3 s", ""]
            result = call("top", "--once", "--json", "--target", url)
            assert (result.exit_code, result.stderr) == (1, f"kvrelay: router {url}: no answer within 3 s\n")
        with Terminal([sys.executable, "-m", "kvrelay.cli", "top", "--target", target], os.environ, 160) as terminal:
            terminal.wait_for("q quit")
            terminal.wait_for("prefill-0")
            terminal.press("swpq")
            assert terminal.end() == 0


def test_mistakes_are_one_line(tmp_path: Path, nobody: str) -> None:
    with background(tmp_path / "cluster", lambda index: 40, http_port=0, page=False) as cluster:
        target = f"http://{cluster.router.http_address}"
        for code, words, arguments in (
            (1, "it has no page; the router's options", ("--once", "--target", target)),
            (1, nobody, ("--once", "--target", nobody)),
            (2, "stdout is no terminal", ("--target", target)),
            (2, "--svg is given", ("--json", "--svg", "x.svg")),
            (2, "--goodput has", ("--once", "--goodput", "x")),
        ):
            fails(code, words, "top", *arguments)


async def test_a_router_that_answers_otherwise_is_named_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[dict[str, str]] = [{}, {"router": "router-0", "model": "pico", "version": "1"}]

    class Answering:
        async def about(self, url: str) -> dict[str, str]:
            return answers.pop(0)

        async def events(self, url: str) -> AsyncIterator[tuple[str, Any]]:
            yield "fleet", fleet(worker("w"))
            await asyncio.Event().wait()

    model, heard = Model(("a",), {}), asyncio.Event()
    told: list[str] = []
    monkeypatch.setattr(model, "lost", lambda url, error: told.append(error))
    following = asyncio.create_task(top_run._follow(Answering(), "a", model, heard))  # type: ignore[arg-type]
    await asyncio.wait_for(heard.wait(), 10)
    await until(lambda: model.routers["a"].ready, "it is asked again")
    assert told == ["router a: its answer is not that of a router of this version: KeyError('router')"]
    following.cancel()
