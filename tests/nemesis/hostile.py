"""Hostile clients as faults: processes of `benchmarks/siege/load.py` that call one router for some seconds."""

import asyncio
import json
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemesis.ground import Ground, Inject

LOAD = Path(__file__).parents[2] / "benchmarks" / "siege" / "load.py"
SECONDS = 8.0
"""Seconds that an attack lasts."""
START_SECONDS = 120.0
"""Seconds within which the clients' process says that it has started. The machine gives it less than the cluster."""
END_SECONDS = 30.0
LONG = {"prompts": (1500, 1500), "counts": (2000, 2000), "at_once": 30, "distinct": 0}
"""Streams that want four times the KV of both decode workers."""


def attacked(kind: str, **options: Any) -> Inject:
    """Clients of this kind call one router; their answers don't count."""

    async def inject(ground: Ground, rng: random.Random) -> dict[str, int]:
        number = rng.randrange(len(ground.load.addresses))
        reach = {"grpc": ground.load.addresses[number], "http": ground.webs[number], "authority": ground.authority}
        given = {**reach, "key": "hostile", "seed": rng.randrange(2**31), "name": f"hostile-{rng.random()}", **options}
        if kind == "bodies":
            given["requests"] = [(path, str(file)) for path, file in errors(ground.cluster.folder)]
        command = (sys.executable, str(LOAD), kind, json.dumps(given))
        client = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        try:
            if client.stdout is not None:
                await asyncio.wait_for(client.stdout.readline(), START_SECONDS)
            await asyncio.sleep(SECONDS)
            # It ends when its standard input does. How soon is no promise of the cluster.
            if client.stdin is not None:
                client.stdin.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(client.communicate(), END_SECONDS)
            if client.returncode:
                raise RuntimeError(f"the clients of {kind} ended with {client.returncode}")
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()
        return {}

    return inject


def errors(folder: Path) -> list[tuple[str, Path]]:
    """Bodies that are wrong in very many places: path and file."""
    wrong: dict[str, tuple[str, Any]] = {
        "ids": ("/detokenize", {"tokens": [-1] * 500_000}),
        "stops": ("/v1/completions", {"prompt": "a", "stop": [5] * 65_000}),
        "contents": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [5] * 65_000}]}),
        "roles": ("/v1/chat/completions", {"messages": [{"role": "r" * 4_000_000, "content": "a"}]}),
        "fields": ("/v1/completions", {"y" * 4_000_000: 0}),
        "prompts": ("/v1/completions", {"prompt": [[5]] * 1024, "max_tokens": 2**40}),
    }
    made = []
    for name, (path, body) in wrong.items():
        file = folder / f"wrong-{name}.json"
        if not file.exists():
            file.write_text(json.dumps(body))
        made.append((path, file))
    return made
