"""A headless Chromium, driven over its debugging protocol."""

import asyncio
import base64
import contextlib
import itertools
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
START_SECONDS = 60.0
CALL_SECONDS = 30.0
MODIFIERS = {"Control": 2}
OPTIONS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def chromium() -> str:
    """The path of a Chromium; without one, the test is skipped."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    return found


class Tab:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        """Errors and warnings of the page: exceptions, refused loads, breaches of its content security policy."""

    async def read(self) -> None:
        """Takes what the browser sends, until it ends."""
        async for message in self._socket:
            value = message.json()
            if "id" in value:
                self._answers.pop(value["id"]).set_result(value)
            elif value["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(value["params"]["exceptionDetails"]))
            elif value["method"] == "Log.entryAdded" and value["params"]["entry"]["level"] in ("error", "warning"):
                self.complaints.append(str(value["params"]["entry"]))

    async def call(self, method: str, **parameters: Any) -> Any:
        """One call of the debugging protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        value = await asyncio.wait_for(answer, CALL_SECONDS)
        assert "error" not in value, value["error"]
        return value["result"]

    async def open(self, url: str, width: int = 1400, height: int = 900, *, dark: bool = False) -> None:
        """Goes to a page, in a window of this size."""
        for domain in ("Runtime", "Log", "Page", "Network"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def value(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression, a promise's included."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, seconds: float = 30.0) -> Any:
        """Waits until an expression is true, and returns its value."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not (value := await self.value(expression)):
            assert asyncio.get_running_loop().time() < deadline, f"not within {seconds} s: {expression}"
            await asyncio.sleep(0.02)
        return value

    async def text(self, selector: str) -> str:
        """The text of an element."""
        return str(await self.value(f"document.querySelector({selector!r}).innerText"))

    async def press(self, key: str, *modifiers: str) -> None:
        """Presses a key as a person does."""
        codes = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40, "Tab": 9}
        event: dict[str, Any] = {"key": key, "modifiers": sum(MODIFIERS[name] for name in modifiers)}
        event["windowsVirtualKeyCode"] = codes.get(key) or ord(key.upper())
        if not modifiers and (len(key) == 1 or key == "Enter"):
            event["text"] = "\r" if key == "Enter" else key
        await self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def write(self, selector: str, text: str) -> None:
        """Replaces the text of a field."""
        await self.value(f"(document.querySelector({selector!r}).focus(), document.activeElement.select())")
        await self.call("Input.insertText", text=text)

    async def screenshot(self) -> bytes:
        """A picture of the window, as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Tab]:
    """A tab of a browser that keeps its files in `folder` and ends with the block."""
    process = await asyncio.create_subprocess_exec(
        chromium(),
        *OPTIONS,
        f"--user-data-dir={folder / 'chromium'}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        address = await asyncio.wait_for(_address(process), START_SECONDS)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address}/json") as answer:
                (page,) = [target for target in await answer.json() if target["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                reading = asyncio.create_task(tab.read(), name="browser")
                try:
                    yield tab
                finally:
                    reading.cancel()
                    await asyncio.wait((reading,))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


async def _address(process: asyncio.subprocess.Process) -> str:
    """host:port of the debugging protocol, which the browser prints."""
    assert process.stderr is not None
    while line := (await process.stderr.readline()).decode():
        if match := re.search(r"ws://([^/]+)/", line):
            return match[1]
    raise AssertionError(f"the browser has ended: {await process.wait()}")
