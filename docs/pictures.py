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

from benchmarks.local_cluster import LocalCluster, local_cluster
from support.browser import browser

IMAGES = Path(__file__).parent / "images"
WORKERS = ("--prefill", "2", "--decode", "2")
LOAD = ("--request-rate", "3", "--num-prompts", "90", "--input-tokens", "uniform:100-600", "--output-tokens", "96")
LOADED_SECONDS = 15.0
"""Of load, before the pictures."""
TOKEN = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
"""Of a Ray that asks for one; its dashboard keeps it as a cookie."""
ENTER = """fetch('/api/authenticate', {method: 'POST', headers: {Authorization: 'Bearer TOKEN'}})
    .then(answer => { window.entered = answer.status })"""
ROWS = "[...document.querySelectorAll('tr')].filter(row => row.innerText.includes('ALIVE')).length"
SECONDS = 60.0


async def dashboard(cluster: LocalCluster, members: int, token: str) -> None:
    """Ray's page of actors, when it shows them all; `token` if Ray asks for one."""
    with tempfile.TemporaryDirectory() as folder:
        async with browser(Path(folder)) as tab:
            if token:
                await tab.open(cluster.dashboard)
                await tab.value(ENTER.replace("TOKEN", token) + " && 0")
                await tab.until("window.entered === 200")
            await tab.open(f"{cluster.dashboard}/?#/actors", width=1600, height=800)
            await tab.until(f"{ROWS} >= {members}", SECONDS)
            (IMAGES / "ray-dashboard.png").write_bytes(await tab.screenshot())


def main() -> None:
    with local_cluster(*WORKERS) as cluster, ThreadPoolExecutor() as threads:
        status = cluster.status()
        load = threads.submit(cluster.run, "bench", *LOAD)
        time.sleep(LOADED_SECONDS)
        cluster.run("top", "--once", "--svg", str(IMAGES / "top.svg"))
        token = TOKEN.read_text().strip() if TOKEN.is_file() else ""
        asyncio.run(dashboard(cluster, len(status["workers"]) + len(status["routers"]) + 1, token))
        load.result()


if __name__ == "__main__":
    main()
