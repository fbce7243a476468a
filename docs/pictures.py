"""Pictures of a running cluster in operations.md: `PYTHONPATH=.:tests python docs/pictures.py`. Needs Chromium.

images/top.svg             `kvrelay top` under load
images/ray-dashboard.png   the actors on Ray's dashboard
"""

import asyncio
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.browser import browser
from support.ray_commands import World

IMAGES = Path(__file__).parent / "images"
WORKERS = ("--prefill", "2", "--decode", "2")
LOAD = ("--request-rate", "3", "--num-prompts", "90", "--input-tokens", "uniform:100-600", "--output-tokens", "96")
LOADED_SECONDS = 15.0
"""Seconds of load before the pictures."""
TOKEN = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
"""Token of a Ray that asks for one; its dashboard keeps it as a cookie."""
ENTER = """fetch('/api/authenticate', {method: 'POST', headers: {Authorization: 'Bearer TOKEN'}})
    .then(answer => { window.entered = answer.status })"""
ROWS = "[...document.querySelectorAll('tr')].filter(row => row.innerText.includes('ALIVE')).length"
SECONDS, BENCH_SECONDS = 60.0, 300.0


async def dashboard(address: str, members: int, token: str) -> None:
    """Ray's page of actors, when it shows them all; `token` if Ray asks for one."""
    with tempfile.TemporaryDirectory() as folder:
        async with browser(Path(folder)) as tab:
            if token:
                await tab.open(address)
                await tab.value(ENTER.replace("TOKEN", token) + " && 0")
                await tab.until("window.entered === 200")
            await tab.open(f"{address}/?#/actors", width=1600, height=800)
            await tab.until(f"{ROWS} >= {members}", SECONDS)
            (IMAGES / "ray-dashboard.png").write_bytes(await tab.screenshot())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
        world = World(Path(folder))
        world.up(*WORKERS)
        try:
            status = world.status()
            load = threads.submit(world.call, "bench", *LOAD, seconds=BENCH_SECONDS)
            time.sleep(LOADED_SECONDS)
            world.call("top", "--once", "--svg", str(IMAGES / "top.svg")).check_returncode()
            token = TOKEN.read_text().strip() if TOKEN.is_file() else ""
            members = len(status["workers"]) + len(status["routers"]) + 1
            asyncio.run(dashboard(world.remembered()["dashboard"], members, token))
            load.result().check_returncode()
        finally:
            world.down()


if __name__ == "__main__":
    main()
