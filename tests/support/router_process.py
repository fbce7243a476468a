"""A router in a process of its own, over a worker of the test's process."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from support.router_fakes import FakeSupervisor, FakeWorker, until
from support.tokenizers import model_folder


@asynccontextmanager
async def router_process(
    folder: Path, worker: FakeWorker, *, command: Sequence[str] = (), **options: object
) -> AsyncIterator[tuple[str, int]]:
    """Address and pid of a router in a process of its own, which has reached the worker.

    Args:
        command: a program that becomes the router, as its arguments say.
    """
    supervisor = FakeSupervisor()
    await supervisor.start()
    await worker.start()
    config = folder / "router.json"
    settings = {"model": str(model_folder(folder / "model")), "grpc_port": 0, "http_port": None, **options}
    config.write_text(json.dumps(settings | {"supervisor": f"127.0.0.1:{supervisor.port}"}))
    command = [*command, sys.executable, "-m", "kvrelay.router", "--config", str(config)]
    with (folder / "router.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        address = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))["address"]
        supervisor.announce(worker.member())
        await until(lambda: worker.streams, "the router has reached the worker", 30)
        yield address, process.pid
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await worker.stop()
        await supervisor.stop()
