"""The page's server: who sees what, what is sent as it happens, and what never is."""

import asyncio
import json
import re
from contextlib import AsyncExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from support.http_calls import BYTES, Steps, events, load
from support.router_fakes import key_file, until
from support.scenes import Serve

ASSETS = files("kvrelay.router.faces.page") / "assets"
SECRET = "zebra crossing"
SECONDS = 30


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


@pytest.fixture
def steps() -> Steps:
    return Steps()


async def first(stream: Any, wanted: str) -> Any:
    """The value of the next event of this name."""
    async with asyncio.timeout(SECONDS):
        async for name, value in stream:
            if name == wanted:
                return value
    raise AssertionError(f"the stream ended without {wanted}")


async def test_a_viewer_sees_workers_links_and_the_stages_of_requests_but_no_text(
    serve: Serve, steps: Steps, stack: AsyncExitStack
) -> None:
    cluster = await serve(*steps.workers())
    session = cluster.http.session
    response = await stack.enter_async_context(session.get("/page/events"))
    seen: list[tuple[str, Any]] = []

    async def watch() -> None:
        async for event in events(response):
            seen.append(event)  # noqa: PERF401  # others read it meanwhile

    watching = asyncio.create_task(watch())
    cluster.workers["decode-0"].report_load(load(held=25, cached=50, running=3))
    asking = asyncio.create_task(cluster.client.complete(SECRET, max_tokens=3, request_id="mine", timeout=SECONDS))

    def fleets(check: Any) -> bool:
        return any(name == "fleet" and check(value) for name, value in seen)

    async def stages(*wanted: str) -> None:
        """Waits until the request is in exactly these stages."""

        def in_them(fleet: Any) -> bool:
            return any({span["stage"] for span in life["spans"]} == set(wanted) for life in fleet["lives"])

        await until(lambda: fleets(in_them), f"it is in {wanted}")

    await stages("router", "queue")
    steps.computed.set()
    await stages("router", "prefill", "transfer")
    await until(lambda: fleets(lambda fleet: [link["sending"] for link in fleet["links"]] == [1]), "KV on its way")
    steps.all()
    completion = await asking
    (shown,) = await until(lambda: [value for name, value in seen if name == "ended"], "its end")
    assert shown["id"].startswith("mine/")
    assert (shown["outcome"], shown["completion_tokens"]) == ("length", 3)
    assert (shown["transfer_bytes"], shown["handoff"]) == (BYTES, 0.001)
    assert {"transfer", "decode_queue", "decode"} <= {span["stage"] for span in shown["spans"]}
    await until(lambda: fleets(lambda fleet: fleet["links"] and fleet["links"][0]["nbytes"] == BYTES), "its bytes")
    worker = next(worker for worker in seen[-1][1]["workers"] if worker["name"] == "decode-0")
    assert (worker["total"], worker["held"], worker["cached"], worker["free"]) == (100, 25, 50, 25)
    assert (worker["role"], worker["state"], worker["running"]) == ("decode", "ready", 3)
    watching.cancel()
    await asyncio.wait((watching,))
    async with session.get("/page/events") as again:
        (known,) = await first(events(again), "recent")
    assert (known["outcome"], known["completion_tokens"]) == ("length", 3)
    said = json.dumps([*seen, known])
    assert SECRET not in said
    assert completion.text not in said


async def test_with_api_keys_only_the_page_itself_is_open_and_tenants_see_their_own(
    serve: Serve, steps: Steps, tmp_path: Path
) -> None:
    steps.all()
    cluster = await serve(*steps.workers(), api_keys=key_file(tmp_path, a="", b=""))
    session = cluster.http.session
    for key in (None, "wrong"):
        for path in ("/", "/page/style.css", "/page/main.js"):
            async with session.get(path, headers=bearer(key)) as answer:
                assert answer.status == 200
        for path in ("/page/about", "/page/events", "/page/requests/mine"):
            async with session.get(path, headers=bearer(key)) as answer:
                assert answer.status == 401
                assert "API key" in (await answer.json())["error"]["message"]
    assert not cluster.workers["prefill-0"].jobs
    ask = {"prompt": "hello", "max_tokens": 2}
    async with session.post("/v1/completions", json=ask, headers=bearer("a")) as answer:
        assert answer.status == 200
    for key, count in (("a", 1), ("b", 0)):
        async with session.get("/page/events", headers=bearer(key)) as answer:
            assert len(await first(events(answer), "recent")) == count


async def test_an_open_page_does_not_delay_a_stop(serve: Serve, steps: Steps) -> None:
    cluster = await serve(*steps.workers())
    async with cluster.http.session.get("/page/events") as response:
        stream = events(response)
        await first(stream, "fleet")
        began = asyncio.get_running_loop().time()
        await cluster.router.stop(60.0)
        assert asyncio.get_running_loop().time() - began < SECONDS
        await first(stream, "over")


async def test_without_the_option_there_is_no_page(serve: Serve, steps: Steps) -> None:
    cluster = await serve(*steps.workers(), page=False)
    session = cluster.http.session
    for path in ("/", "/page/events", "/page/main.js"):
        async with session.get(path) as answer:
            assert answer.status == 404


async def test_the_page_loads_nothing_from_elsewhere_and_has_no_inline_code(serve: Serve, steps: Steps) -> None:
    cluster = await serve(*steps.workers())
    session = cluster.http.session
    async with session.get("/") as answer:
        html = await answer.text()
        policy = answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', html))
    for name in ASSETS.iterdir():
        text = name.read_text()
        assert re.findall(r"""https?://[^\s"'`]+""", text.replace("http://www.w3.org/2000/svg", "")) == []
        named |= set(re.findall(r'from "\./([^"]+)"', text))
    assert re.findall(r"<script(?! type=\"module\" src=)|<style|\son\w+=|\sstyle=", html) == []
    assert named == {name.name for name in ASSETS.iterdir()} - {"index.html"}, "a file that nothing loads"
    for name in named:
        async with session.get(f"/page/{name}") as answer:
            assert answer.status == 200
            assert answer.headers["Content-Security-Policy"] == policy
