"""The page in a headless Chromium: what a person sees and does. Skipped where there is no Chromium.

The browser knows no other host than this one, so whatever the page needs comes from the router.
"""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvrelay.client import AsyncClient
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from support.browser import Tab, browser, chromium
from support.page import KEYS, Steps, load
from support.router_fakes import FakeCluster, fake_cluster, run, until

SECONDS = 120.0
SERVING = "document.querySelector('#state').textContent === 'serving'"
BARS = "[...document.querySelectorAll('#life rect[rx]')].map((bar) => bar.getAttribute('class'))"
FIGURES = (
    "Object.fromEntries([...document.querySelectorAll('#figures div')].map((each) => "
    "[each.querySelector('dt').textContent, each.querySelector('dd').textContent]))"
)
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
GROUND = "getComputedStyle(document.documentElement).backgroundColor"


@asynccontextmanager
async def page(
    folder: Path, steps: Steps, *, dark: bool = False, **config: Any
) -> AsyncIterator[tuple[FakeCluster, Tab]]:
    """The page of a router over scripted workers, in a tab."""
    async with (
        fake_cluster(folder / "m", *steps.workers(), http_port=0, **config) as cluster,
        browser(folder) as tab,
    ):
        await tab.open(f"http://{cluster.router.http_address}/", dark=dark)
        yield cluster, tab


def test_a_request_appears_stage_by_stage_and_with_its_text(tmp_path: Path) -> None:
    chromium()

    async def test() -> None:
        steps = Steps()
        async with page(tmp_path, steps) as (cluster, tab), AsyncClient(cluster.router.address) as client:
            await tab.until(SERVING)
            await tab.value("document.querySelector('#chat').checked = false")
            await tab.press("/")
            assert await tab.value("document.activeElement.id") == "prompt"
            await tab.write("#prompt", "hello")
            await tab.value("document.querySelector('#max_tokens').value = 5")
            await tab.press("Enter", "Control")
            await cluster.job("prefill-0")
            await tab.until(f"{BARS}.includes('queue open')")
            steps.computed.set()
            await tab.until(f"{BARS}.includes('prefill open') && {BARS}.includes('transfer open')")
            await tab.until("document.querySelectorAll('#links path.flow.on').length === 1")
            steps.first.set()
            await tab.until("document.querySelector('#life text.mark')?.textContent.startsWith('first token')")
            assert await tab.value("document.querySelector('#stop').disabled") is False
            steps.arrived.set()
            await tab.until("document.querySelector('#life rect.handoff') !== null")
            steps.decoded.set()
            await tab.until("!document.querySelector('#go').disabled")
            expected = await client.detokenize([40, 41, 42, 43, 44])
            assert await tab.value("document.querySelector('#answer').textContent") == f"hello{expected}"
            assert await tab.value(BARS) == ["router", "queue", "prefill", "transfer", "decode_queue", "decode"]
            figures = await tab.value(FIGURES)
            shown = {"hand-off": "1.00ms", "KV sent": "123KB", "completion": "5tokens"}
            assert {name: figures[name] for name in shown} == shown
            assert {"TTFT", "TPOT", "speed", "total"} <= figures.keys()
            await tab.until("document.querySelectorAll('#rows tr').length === 1")
            assert tab.complaints == []

    run(test, SECONDS)


def test_workers_keys_themes_and_small_windows(tmp_path: Path) -> None:
    chromium()

    async def test() -> None:
        steps = Steps()
        async with page(tmp_path, steps, dark=True) as (cluster, tab), AsyncClient(cluster.router.address) as client:
            await tab.until(SERVING)
            cluster.workers["decode-0"].report_load(load(held=25, cached=50, running=3))
            await tab.until("document.querySelector('#decode').innerText.includes('3 running')")
            assert "KV 25 % of 1,600 tokens" in await tab.text("#decode")
            assert await tab.value("document.querySelector('#decode .held').style.width") == "25%"

            steps.all()
            names = ["first-one", "second-one"]
            for name in names:
                await client.complete("hello", max_tokens=2, request_id=name, timeout=30)
            await tab.until("document.querySelectorAll('#rows tr').length === 2")
            for key, name in (("ArrowDown", names[1]), ("ArrowDown", names[0]), ("ArrowUp", names[1])):
                await tab.press(key)
                assert name in await tab.text("#subject")
                assert name in await tab.text("#rows [aria-selected=true]")

            dark = await tab.value(GROUND)
            await tab.press("t")
            assert await tab.value(GROUND) != dark
            await tab.press("z")
            assert await tab.value("document.querySelector('#axis').getAttribute('aria-pressed')") == "true"
            await tab.press("?")
            assert await tab.value("document.querySelector('#keys').open")
            await tab.value("document.querySelector('#keys').close()")

            for width in (1400, 800, 390):
                await tab.resize(width, 900)
                assert await tab.value(OVERFLOW) == 0, f"wider than {width}"
            cluster.announce(prefill_0=MEMBER_STATE_DEAD, decode_0=MEMBER_STATE_DEAD)
            await tab.until("document.querySelector('#state').textContent !== 'serving'")
            assert tab.complaints == []

    run(test, SECONDS)


def test_a_stopped_request_frees_its_workers_and_a_wrong_key_is_asked_for_again(tmp_path: Path) -> None:
    chromium()
    keys = tmp_path / "keys"
    keys.write_text(KEYS.format(*(hashlib.sha256(key).hexdigest() for key in (b"right", b"other"))))

    async def test() -> None:
        steps = Steps()
        async with page(tmp_path, steps, api_keys=str(keys)) as (cluster, tab):
            for key, open_after in (("wrong", True), ("right", False)):
                await tab.until("document.querySelector('#login').open")
                await tab.write("#key", key)
                await tab.press("Enter")
                if open_after:
                    await tab.until("document.querySelector('#login-note').textContent.includes('not known')")
            await tab.until(SERVING)
            await tab.write("#prompt", "hello")
            await tab.press("Enter", "Control")
            job = await cluster.job("prefill-0")
            await tab.until("!document.querySelector('#stop').disabled")
            await tab.press("Escape")
            await until(job.cancelled.is_set, "cancelled on the worker")
            await tab.until("document.querySelector('#note').textContent.startsWith('stopped')")
            await tab.until("document.querySelector('#rows .total')?.textContent === 'cancelled'")
            await tab.value("document.querySelector('#temperature').value = 200")
            await tab.value("document.querySelector('#ask').noValidate = true")
            await tab.press("Enter", "Control")
            await tab.until("document.querySelector('#note').textContent.includes('temperature is 200')")
            refused = [complaint for complaint in tab.complaints if "status of 40" not in complaint]
            assert refused == []

    run(test, SECONDS)
