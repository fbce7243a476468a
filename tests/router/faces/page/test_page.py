"""The page's server: who sees what, what is sent as it happens, and what never is."""

import asyncio
import json
import re
from contextlib import AsyncExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kvrelay.router.faces.page import page
from support.page import BYTES, Steps, events, load
from support.router_fakes import key_file, until
from support.scenes import Serve

ASSETS = files("kvrelay.router.faces.page") / "assets"
SECRET = "zebra crossing"
SECONDS = 10


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


async def test_a_request_is_followed_through_its_stages(serve: Serve, steps: Steps) -> None:
    cluster = await serve(*steps.workers())
    session = cluster.http.session
    ask = {"text": "hello", "max_tokens": 3, "temperature": 0, "seed": 7}
    async with session.post("/page/generate", json=ask) as response:
        assert response.status == 200
        stream = events(response)

        async def stages() -> set[str]:
            return {span["stage"] for span in (await first(stream, "life"))["spans"]}

        assert await stages() == {"router", "queue"}
        steps.computed.set()
        assert await stages() == {"router", "prefill", "transfer"}
        steps.first.set()
        text = await first(stream, "text")
        assert (text["tokens"], text["seed"]) == (1, "7")
        steps.arrived.set()
        steps.decoded.set()
        end = await first(stream, "end")
    assert end["finish_reason"] == "length"
    assert end["usage"]["completion_tokens"] == 3
    shown = end["life"]
    assert (shown["outcome"], shown["transfer_bytes"], shown["handoff"]) == ("length", BYTES, 0.001)
    assert {"transfer", "decode_queue", "decode"} <= {span["stage"] for span in shown["spans"]}


async def test_a_viewer_sees_workers_links_and_requests_but_no_text(
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
    asking = asyncio.create_task(cluster.client.complete(SECRET, max_tokens=3, temperature=0, timeout=SECONDS))

    def fleets(check: Any) -> bool:
        return any(name == "fleet" and check(value) for name, value in seen)

    await cluster.job("prefill-0")
    steps.computed.set()
    await until(lambda: fleets(lambda fleet: fleet["lives"] and fleet["links"][0]["sending"] == 1), "KV on its way")
    steps.all()
    completion = await asking
    await until(lambda: any(name == "ended" for name, _ in seen), "its end")
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
        for method, path in (("GET", "/page/about"), ("GET", "/page/events"), ("POST", "/page/generate")):
            async with session.request(method, path, json={"text": "x"}, headers=bearer(key)) as answer:
                assert answer.status == 401
                assert "API key" in (await answer.json())["error"]["message"]
    assert not cluster.workers["prefill-0"].jobs
    ask = {"text": "hello", "max_tokens": 2}
    async with session.post("/page/generate", json=ask, headers=bearer("a")) as answer:
        await first(events(answer), "end")
    for key, count in (("a", 1), ("b", 0)):
        async with session.get("/page/events", headers=bearer(key)) as answer:
            assert len(await first(events(answer), "recent")) == count


def test_the_turns_of_a_conversation_are_one_session() -> None:
    said = [page.Turn(role="user", content="hello"), page.Turn(role="assistant", content="yes")]
    request = page.Ask(messages=said, session="one").request()
    assert request.session == "one"
    assert [(turn.role, turn.content) for turn in request.messages.messages] == [
        ("user", "hello"),
        ("assistant", "yes"),
    ]


async def test_what_the_playground_may_not_send_is_refused_by_name(serve: Serve, steps: Steps) -> None:
    cluster = await serve(*steps.workers())
    for body, status, said in (
        ('{"text": ""}', 400, "is ''; allowed: at least 1 character"),
        ('{"text": "hello", "max_tokens": 999}', 400, "max_tokens"),
        ('{"text": "hello", "temperature": -1}', 400, "temperature is -1"),
        ('{"text": "hello", "stop": "x"}', 400, "stop is not a field"),
        ('{"text": "hello", "session": "%s"}' % ("x" * 129), 400, "session"),
        ("{}", 400, "input"),
        ('{"text": ', 400, "not valid JSON"),
        ("[]", 400, "allowed: "),
        ('{"text": "%s"}' % ("x" * page.MAX_BODY_BYTES), 413, "number of bytes"),
    ):
        headers = {"Content-Type": "application/json"}
        async with cluster.http.session.post("/page/generate", data=body, headers=headers) as answer:
            assert answer.status == status
            assert said in (await answer.json())["error"]["message"]
    # A form of another site can't generate.
    headers = {"Content-Type": "text/plain"}
    async with cluster.http.session.post("/page/generate", data='{"text": "x"}', headers=headers) as answer:
        assert answer.status == 400


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
