"""Log lines: short, and JSON, whatever is logged and by whom."""

import json
import logging
import subprocess
import sys
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.rpc.log import LINE_BYTES, JsonFormatter

long = st.builds(lambda text, times: text * times, st.text(max_size=20), st.sampled_from([1, 300, 5_000]))
values = long | st.integers() | st.floats() | st.none() | st.binary(max_size=5) | st.lists(long, max_size=3)
extras = st.dictionaries(st.from_regex(r"[a-z]{1,9}_x", fullmatch=True) | long.map(lambda name: f"x{name}"), values)


def written(formatter: JsonFormatter, record: logging.LogRecord) -> dict[str, Any]:
    line = formatter.format(record)
    assert len(line.encode()) <= LINE_BYTES
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


@settings(max_examples=50, database=None)
@given(long, extras, st.none() | long)
def test_a_line_is_short_json(message: str, fields: dict[str, Any], reason: str | None) -> None:
    formatter = JsonFormatter({"part": "router", "name": "router-0"})
    error = None if reason is None else (ValueError, ValueError(reason), None)
    record = logging.LogRecord("kvrelay.x", logging.ERROR, "x.py", 1, "%s", (message,), error)
    vars(record).update(fields)
    found = written(formatter, record)
    assert (found["level"], found["logger"], found["part"]) == ("error", "kvrelay.x", "router")
    assert found["message"][:8] == message[:8]
    if reason is not None and len(reason) < 100:
        assert found["exception"].startswith("ValueError")


def test_the_reason_of_a_long_exception_is_kept() -> None:
    def fail(depth: int) -> None:
        if depth:
            fail(depth - 1)
        raise ValueError("the reason" + "." * 20)

    try:
        for _ in range(3):
            fail(200)
    except ValueError as error:
        record = logging.LogRecord("x", 40, "x.py", 1, "failed", (), (type(error), error, error.__traceback__))
    assert "the reason" in written(JsonFormatter({}), record)["exception"]


LIBRARIES = """
import asyncio, logging, threading, warnings
from kvrelay.rpc import log
log.configure(part="router")
logging.getLogger("aiohttp.server").error("x" * 10_000_000)
warnings.warn("a warning of Python")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()

async def main():
    asyncio.get_running_loop().create_future().set_exception(ValueError("never retrieved"))

asyncio.run(main())
"""


def test_lines_of_libraries_are_json_too() -> None:
    ended = subprocess.run([sys.executable, "-c", LIBRARIES], capture_output=True, text=True, timeout=60, check=True)
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [line["logger"] for line in lines] == ["aiohttp.server", "py.warnings", "kvrelay", "asyncio"]
    assert "ZeroDivisionError" in lines[2]["exception"]
    assert all(line["part"] == "router" for line in lines)
    assert max(map(len, ended.stderr.splitlines())) <= LINE_BYTES
