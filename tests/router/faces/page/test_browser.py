"""The page in a headless Chromium: what a person sees and does. Skipped where there is no Chromium.

The browser knows no other host than this one, so whatever the page needs comes from the router.
"""

import itertools
import re
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_DEAD
from support.browser import Tab, browser, chromium
from support.http_calls import Steps, load
from support.router_fakes import FakeCluster, FakeWorker, fake, key_file, until
from support.scenes import Serve
from support.tokenizers import byte_level_tokenizer, model_folder

SERVING = "document.querySelector('#state').textContent === 'serving'"
BARS = "[...document.querySelectorAll('#life rect[rx]')].map((bar) => bar.getAttribute('class'))"
FIGURES = (
    "Object.fromEntries([...document.querySelectorAll('#figures div')].map((each) => "
    "[each.querySelector('dt').textContent, each.querySelector('dd').textContent]))"
)
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
GROUND = "getComputedStyle(document.documentElement).backgroundColor"
DRAWN = "document.querySelector('#life svg').viewBox.baseVal.width === document.querySelector('#life').clientWidth"
CUT = """(() => {
  document.querySelector('#links').style.pointerEvents = 'auto';
  const cut = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode, holder = text.parentElement;
    if (!text.data.trim() || !holder.checkVisibility()) continue;
    if (holder.closest('.scroll, .sr, .skip, dialog, noscript, textarea, #life')) continue;
    const range = document.createRange();
    range.selectNodeContents(text);
    for (const { left, right, top, bottom } of range.getClientRects())
      for (const x of [left + 1, right - 1])
        if (!holder.contains(document.elementFromPoint(x, (top + bottom) / 2))) cut.push(text.data);
  }
  return cut;
})()"""
"""Texts that aren't wholly in view, or that something covers. The chart has its own test; tables scroll."""
CROSSED = """(() => {
  const all = [...document.querySelectorAll('#life text')].filter((text) => text.textContent);
  const boxes = all.map((text) => [text.textContent, text.getBBox()]);
  const width = document.querySelector('#life svg').clientWidth;
  const crossed = boxes.filter(([, box]) => box.x < -1 || box.x + box.width > width + 1).map(([text]) => text);
  for (const [index, [text, one]] of boxes.entries())
    for (const [other, two] of boxes.slice(index + 1))
      if (one.x + 2 < two.x + two.width && two.x + 2 < one.x + one.width &&
          one.y + 2 < two.y + two.height && two.y + 2 < one.y + one.height) crossed.push([text, other]);
  return crossed;
})()"""
"""Texts of the chart that reach beyond it, or into another one."""

MOVED = """import(new URL('page/map.js', location.href)).then(({ WorkerMap }) => {
  const place = document.querySelector('#map').cloneNode(true);
  place.querySelectorAll('li').forEach((card) => card.remove());
  const worker = { name: 'worker-0', state: 'ready', ready: true, running: 0, computed_tokens: 0, block_size: 16 };
  const map = new WorkerMap(place);
  for (const role of ['prefill', 'decode']) map.show({ workers: [{ ...worker, role }], links: [] });
  return ['prefill', 'decode'].map((role) => place.querySelector(`#${role}`).textContent);
})"""
"""The text of both columns after a worker has gone from prefill to decode."""


Open = Callable[..., Awaitable[tuple[FakeCluster, Tab]]]


@pytest.fixture
def page(serve: Serve, stack: AsyncExitStack, tmp_path: Path) -> Open:
    chromium()

    async def open_page(
        *workers: FakeWorker, dark: bool = False, height: int = 900, **config: Any
    ) -> tuple[FakeCluster, Tab]:
        """Opens the page of a router over scripted workers, which serves, in a tab."""
        cluster = await serve(*workers, **config)
        tab = await stack.enter_async_context(browser(tmp_path))
        await tab.open(f"{cluster.http.base}/", dark=dark, height=height)
        if "api_keys" not in config:
            await tab.until(SERVING)
        return cluster, tab

    return open_page


@pytest.fixture
def steps() -> Steps:
    return Steps()


async def test_a_request_appears_stage_by_stage_and_with_its_text(page: Open, steps: Steps) -> None:
    cluster, tab = await page(*steps.workers())
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
    await tab.until(f"!{BARS}.some((bar) => bar.includes('open'))")
    expected = await cluster.client.detokenize([40, 41, 42, 43, 44])
    assert await tab.value("document.querySelector('#answer').textContent") == f"hello{expected}"
    assert await tab.value(BARS) == ["router", "queue", "prefill", "transfer", "decode_queue", "decode"]
    figures = await tab.value(FIGURES)
    shown = {"hand-off": "1.00ms", "KV sent": "123KB", "completion": "5tokens"}
    assert {name: figures[name] for name in shown} == shown
    assert {"TTFT", "TPOT", "speed", "total"} <= figures.keys()
    await tab.until("document.querySelectorAll('#rows tr').length === 1")
    assert tab.complaints == []


async def test_workers_keys_themes_and_small_windows(page: Open, steps: Steps) -> None:
    cluster, tab = await page(*steps.workers(), dark=True)
    cluster.workers["decode-0"].report_load(load(held=25, cached=50, running=3))
    await tab.until("document.querySelector('#decode').innerText.includes('3 running')")
    assert "KV 25 % in use, 50 % cached of 1,600 tokens" in await tab.text("#decode")
    bar = "document.querySelector('#decode .kv .{}').style.width"
    assert [await tab.value(bar.format(part)) for part in ("held", "cached")] == ["25%", "50%"]
    roles = "[...document.querySelectorAll('.worker')].map((card) => card.innerText.split('\\n').slice(0, 2))"
    assert await tab.value(roles) == [["prefill-0", "prefill"], ["decode-0", "decode"]]

    steps.all()
    names = ["first-one", "second-one"]
    for name in names:
        await cluster.client.complete("hello", max_tokens=2, request_id=name, timeout=30)
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


async def test_no_name_and_no_figure_is_cut_at_any_width(page: Open, steps: Steps) -> None:
    prefill, decode = "prefill-worker-12", "decode-worker-with-a-long-name-7"

    steps.all()
    workers = fake(prefill, steps.prefill), fake(decode, steps.decode)
    cluster, tab = await page(*workers, height=3000)
    for worker in workers:
        worker.report_load(load(held=25, cached=50, running=3))
    await cluster.client.complete("hello", max_tokens=2, request_id="one", timeout=30)
    await tab.until("document.querySelectorAll('#rows tr').length === 1")
    await tab.press("ArrowDown")
    await tab.until("document.querySelector('#links text')?.textContent === '123 KB'")
    for width in (400, 700, 1100, 1400):
        await tab.resize(width, 3000)
        await tab.until(DRAWN)
        assert await tab.value(CUT) == [], f"at {width}"
        assert await tab.value(CROSSED) == [], f"at {width}"
        shown = await tab.value("document.querySelector('#links').checkVisibility()")
        assert shown == (width > 640)
        assert shown or f"→ {decode} 123 KB" in await tab.text("#prefill")
        assert await tab.value(OVERFLOW) == 0


async def test_no_request_has_no_time(page: Open, steps: Steps) -> None:
    _, tab = await page(*steps.workers())
    texts = await tab.value("[...document.querySelectorAll('#life text')].map((text) => text.textContent)")
    assert "prefill" in texts
    assert [text for text in texts if re.search(r"\d", text)] == []
    # A worker in another role moves to its column.
    assert await tab.value(MOVED) == ["", "worker-0decode0 runningidle"]


@pytest.mark.parametrize("template", [True, False])
async def test_the_playground_chats_with_models_that_have_a_template_only(
    page: Open, steps: Steps, tmp_path: Path, template: bool
) -> None:
    model = model_folder(tmp_path / "own")
    if not template:
        (model / "chat_template.jinja").unlink()

    steps.all()
    cluster, tab = await page(*steps.workers(), model=str(model))
    await tab.until("document.querySelector('#model').textContent.trim() !== ''")
    assert await tab.value("document.querySelector('#chat').checkVisibility()") == template
    await tab.write("#prompt", "hello")
    await tab.press("Enter", "Control")
    job = await cluster.job("prefill-0")
    assert (list(job.submit.token_ids) == byte_level_tokenizer().encode("hello").ids) == (not template)
    await tab.until("!document.querySelector('#go').disabled")


async def test_the_playground_holds_a_conversation(page: Open, steps: Steps, tmp_path: Path) -> None:
    cluster, tab = await page(*steps.workers(), model=str(model_folder(tmp_path / "own")))
    await tab.until("document.querySelector('#chat').checkVisibility()")
    assert await tab.value("document.querySelector('#prompt').value") == ""
    assert await tab.value("document.querySelector('#fresh').checkVisibility()") is False
    await tab.value("document.querySelector('#max_tokens').value = 3")
    answer = await cluster.client.detokenize([40, 41, 42])
    requests = itertools.count()

    async def say(text: str, *before: str) -> None:
        """Sends a message, which is asked behind the others of its conversation, user's and answers by turns."""
        await tab.write("#prompt", text)
        await tab.press("Enter", "Control")
        job = await cluster.job("prefill-0", next(requests))
        said = zip(itertools.cycle(("user", "assistant")), (*before, text), strict=False)
        turns = "".join(f"{role}: {content}\n" for role, content in said)
        assert byte_level_tokenizer().decode(list(job.submit.token_ids)) == f"{turns}assistant:"

    async def shown() -> str:
        await tab.until("!document.querySelector('#go').disabled")
        return str(await tab.value("document.querySelector('#answer').textContent"))

    await say("hello")
    await tab.until("!document.querySelector('#stop').disabled")
    await tab.press("Escape")
    assert await shown() == "", "no answer came"
    assert await tab.value("document.querySelector('#prompt').value") == "hello"
    steps.all()
    await say("hello")
    assert await shown() == f"hello{answer}"
    assert await tab.value("document.querySelector('#prompt').value") == ""
    await say("and now", "hello", answer)
    assert await shown() == f"hello{answer}and now{answer}"
    for width in (400, 1400):
        await tab.resize(width, 3000)
        await tab.until(DRAWN)
        assert await tab.value(CUT) == [], f"at {width}"
        assert await tab.value(OVERFLOW) == 0
    await tab.value("document.querySelector('#fresh').click()")
    assert await shown() == ""
    await say("again")
    assert await shown() == f"again{answer}"
    await tab.value("document.querySelector('#chat').checked = false")
    await tab.write("#prompt", "a text")
    await tab.press("Enter", "Control")
    await cluster.job("prefill-0", next(requests))
    assert await shown() == f"a text{answer}"
    assert await tab.value("document.querySelector('#fresh').checkVisibility()") is False
    assert tab.complaints == []


async def test_a_stopped_request_frees_its_workers_and_a_wrong_key_is_asked_for_again(
    page: Open, steps: Steps, tmp_path: Path
) -> None:
    cluster, tab = await page(*steps.workers(), api_keys=key_file(tmp_path, right="", other=""))
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
