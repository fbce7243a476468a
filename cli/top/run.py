"""Follows the routers and draws a frame each second, until a key or a signal ends it."""

import asyncio
import json
import os
import re
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.live import Live

from kvrelay.cli.top.model import SORTS, Model
from kvrelay.cli.top.view import frame
from kvrelay.cluster.asking.routers import Access, Routers
from kvrelay.cluster.errors import RunError, UsageError

FRAME_SECONDS = 1.0
RETRY_SECONDS = 1.0
FIRST_SECONDS = 5.0
"""Seconds for every router to be heard or to fail, before the first frame. The connection's own limit is longer."""
ONCE_LINES = 40
SVG_FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""Without rich's fonts, which a viewer would fetch from another host."""


@dataclass(frozen=True, slots=True)
class TopOptions:
    """Options of how the cluster is shown."""

    goodput: Mapping[str, float]
    """Limits in milliseconds that a good request keeps."""
    sort: str = "name"
    """Order of the workers: a key of SORTS."""
    once: bool = False
    """Whether to end after one frame."""
    wide: bool = False
    """Whether every column is shown."""
    as_json: bool = False
    """Whether to print each frame as a line of JSON."""
    svg: Path | None = None
    """File for a picture of the only frame."""


async def run(access: Access, options: TopOptions, console: Console) -> None:
    """
    Raises:
        RunError: no router answers.
        UsageError: the authorities or the picture's file can't be opened.
    """
    async with Routers(access) as routers:
        model = Model(routers.urls, options.goodput)
        heard = {url: asyncio.Event() for url in routers.urls}
        following = [asyncio.create_task(_follow(routers, url, model, heard[url]), name=url) for url in routers.urls]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(FIRST_SECONDS):
                    await asyncio.gather(*(event.wait() for event in heard.values()))
            for url in routers.urls:
                if not heard[url].is_set():
                    model.lost(url, f"router {url}: no answer within {FIRST_SECONDS:g} s")
            errors = [view.error for view in model.routers.values() if view.error]
            if len(errors) == len(model.routers):
                raise RunError(*errors)
            await _show(model, options, console)
        finally:
            for task in following:
                task.cancel()
            await asyncio.wait(following)


async def _follow(routers: Routers, url: str, model: Model, heard: asyncio.Event) -> None:
    """Passes a router's events on; asks again a while after it was lost."""
    while True:
        try:
            model.about(url, await routers.about(url))
            async for name, value in routers.events(url):
                model.event(url, name, value)
                if name == "fleet":
                    heard.set()
        except RunError as error:
            model.lost(url, str(error))
            heard.set()
        except (KeyError, TypeError) as error:
            model.lost(url, f"router {url}: its answer is not that of a router of this version: {error!r}")
            heard.set()
        await asyncio.sleep(RETRY_SECONDS)


async def _show(model: Model, options: TopOptions, console: Console) -> None:
    if options.once:
        model.sample(time.monotonic())
        await asyncio.sleep(FRAME_SECONDS)  # rates need two views
        model.sample(time.monotonic())
        _once(model, options, console)
    elif options.as_json:
        while True:
            model.sample(time.monotonic())
            print(json.dumps(model.frame()), flush=True)
            await asyncio.sleep(FRAME_SECONDS)
    else:
        await _live(model, options, console)


def _once(model: Model, options: TopOptions, console: Console) -> None:
    if options.as_json:
        print(json.dumps(model.frame()))
        return
    shown = frame(model.frame(), options.sort, (console.width, ONCE_LINES), wide=options.wide)
    console.print(shown, crop=False)
    if options.svg is not None:
        try:
            console.save_svg(str(options.svg), title="kvrelay top", code_format=SVG_FORMAT)
        except OSError as error:
            raise UsageError(f"--svg {options.svg}: {error.strerror}") from None


async def _live(model: Model, options: TopOptions, console: Console) -> None:
    """Draws until q is pressed."""
    sort, wide = options.sort, options.wide
    keys: asyncio.Queue[str] = asyncio.Queue()
    orders, paused = list(SORTS), False
    shown = model.frame()
    with Live(console=console, screen=True, auto_refresh=False) as live, _pressed(keys.put_nowait):
        while True:
            model.sample(time.monotonic())
            if not paused:
                shown = model.frame()
            note = f"sorted by {sort}" + ("   PAUSED" if paused else "")
            live.update(frame(shown, sort, console.size, note, wide=wide), refresh=True)
            try:
                key = await asyncio.wait_for(keys.get(), FRAME_SECONDS)
            except TimeoutError:
                continue
            if key in ("q", "\x03", "\x04"):
                return
            if key == "p":
                paused = not paused
            elif key == "w":
                wide = not wide
            elif key == "s":
                sort = orders[(orders.index(sort) + 1) % len(orders)]


@contextmanager
def _pressed(take: Callable[[str], None]) -> Iterator[None]:
    """Passes keys on as they are pressed; without a terminal there are none."""
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        for key in os.read(descriptor, 64).decode(errors="replace"):
            take(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
