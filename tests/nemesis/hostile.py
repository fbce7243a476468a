"""Hostile clients as faults: processes of `benchmarks/siege/load.py` that call one router for some seconds."""

import asyncio
import json
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvrelay.v1.inference_pb2 import GenerateRequest, SamplingParams, TokenIds
from nemesis.ground import Ground, Inject
from support.hostile import GENERATE

LOAD = Path(__file__).parents[2] / "benchmarks" / "siege" / "load.py"
SECONDS = 8.0
"""Seconds that an attack lasts."""
START_SECONDS = 120.0
"""Seconds within which the clients' process says that it has started. The machine gives it less than the cluster."""
END_SECONDS = 30.0
LONG = {"prompts": (1500, 1500), "counts": (2000, 2000), "at_once": 30, "distinct": 0}
"""Streams that want four times the KV of both decode workers."""
Requests = Callable[[Path, random.Random], list[tuple[str, Path]]]
"""Writes bodies of requests to files of a folder; returns the path and the file of each."""
FUZZED = 200
"""Number of damaged bodies."""


def attacked(kind: str, requests: Requests | None = None, **options: Any) -> Inject:
    """Clients of this kind call one router, with the bodies of `requests`; their answers don't count."""

    async def inject(ground: Ground, rng: random.Random) -> dict[str, int]:
        number = rng.randrange(len(ground.load.addresses))
        reach = {"grpc": ground.load.addresses[number], "http": ground.webs[number], "authority": ground.authority}
        given = {**reach, "key": "hostile", "seed": rng.randrange(2**31), "name": f"hostile-{rng.random()}", **options}
        if requests is not None:
            given["requests"] = [(path, str(file)) for path, file in requests(ground.cluster.folder, rng)]
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


def errors(folder: Path, rng: random.Random) -> list[tuple[str, Path]]:
    """Bodies that are wrong in very many places."""
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


def fuzzed(folder: Path, rng: random.Random) -> list[tuple[str, Path]]:
    """Bodies for HTTP and for gRPC that were right before some of their bytes were changed."""
    prompt = GenerateRequest(token_ids=TokenIds(ids=[5, 6, 7]), sampling=SamplingParams(max_tokens=4, temperature=0.5))
    right = [
        ("/v1/completions", b'{"prompt": "a b", "max_tokens": 4, "stop": ["x"], "seed": 3}'),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "logprobs": true}',
        ),
        ("/tokenize", b'{"prompt": "a b"}'),
        (GENERATE, prompt.SerializeToString()),
    ]
    made = []
    for number in range(FUZZED):
        path, body = rng.choice(right)
        data = bytearray(body)
        for _ in range(rng.randint(1, 3)):
            at = rng.randint(0, len(data))
            data[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 4))
        file = folder / f"fuzzed-{number}"
        file.write_bytes(data)
        made.append((path, file))
    return made
