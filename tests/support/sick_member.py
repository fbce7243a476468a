"""A member that only sends heartbeats, and whose first life falls ill: `python -m support.sick_member --config FILE`.

It ignores SIGTERM, as a process does whose event loop hangs.
"""

import asyncio
import ctypes
import json
import os
import signal
import sys
import time
import uuid
from pathlib import Path

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    ROLE_PREFILL,
    ROLE_ROUTER,
    Member,
)
from kvrelay.internal.v1.worker_pb2 import Load
from kvrelay.rpc.heartbeat import HeartbeatClient
from support.secrets import credentials

HEALTHY_SECONDS = 0.5
HELD_SECONDS = 7
"""Seconds for which the event loop, or the interpreter, is held."""


async def main(options: dict[str, str], sick: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    incarnation = uuid.uuid4().hex
    started = time.monotonic()

    def describe() -> tuple[Member, Load]:
        member = Member(
            name=options["name"],
            role=ROLE_ROUTER if options["name"].startswith("router") else ROLE_PREFILL,
            incarnation=incarnation,
            address="127.0.0.1:1",
            pid=os.getpid(),
            state=MEMBER_STATE_READY,
        )
        ill = time.monotonic() - started - HEALTHY_SECONDS
        if sick and ill > 0:
            if options["sickness"] == "failed":
                member.state, member.failed = MEMBER_STATE_DRAINING, True
            elif options["sickness"] == "draining":
                member.state = MEMBER_STATE_DRAINING
            elif options["sickness"] == "stuck":
                member.step_age_seconds = ill
        return member, Load()

    def hold() -> None:
        if sick and options["sickness"] == "loop":
            time.sleep(HELD_SECONDS)
        elif sick and options["sickness"] == "interpreter":
            ctypes.PyDLL(None).sleep(HELD_SECONDS)

    fenced = asyncio.Event()
    heartbeat = HeartbeatClient(
        options["supervisor"], credentials("worker"), describe, lambda members: None, fenced.set, interval=0.1
    )
    heartbeat.start()
    asyncio.get_running_loop().call_later(4 * HEALTHY_SECONDS, hold)
    await fenced.wait()


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[2]).read_text())
    marker = Path(given["marker"])
    first = not marker.exists()
    marker.touch()
    asyncio.run(main(given, first))
