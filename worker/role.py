"""What a worker does with a request besides computing it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import grpc

from kvrelay.engine.progress import Progress
from kvrelay.engine.request import Request
from kvrelay.internal.v1.supervisor_pb2 import Member
from kvrelay.internal.v1.worker_pb2 import PHASE_COLOCATED, Phase, Promised, Submit

if TYPE_CHECKING:
    from kvrelay.worker.server import WorkerServer


class Role:
    """The co-located role: computes prompts and completions here, with no hand-off.

    The prefill and the decode role extend it by their side of the hand-off. Every method runs on the event loop but
    `on_step`, which runs on the engine thread.
    """

    phases: tuple[Phase, ...] = (PHASE_COLOCATED,)
    """Of the requests that this role takes."""

    def __init__(self, worker: "WorkerServer") -> None:
        self.worker = worker

    async def start(self, server: grpc.aio.Server) -> None:
        """Called once the engine is there; adds the role's own services to `server`, which starts next."""

    async def stop(self) -> None:
        """Ends what the role has under way, before the engine ends."""

    def describe(self, member: Member) -> None:
        """Adds what peers need to know to this worker's heartbeat."""

    def members_changed(self, members: Sequence[Member]) -> None:
        """The supervisor's membership, whenever it changed."""

    def submit(self, request: Request, submit: Submit) -> None:
        self.worker.compute(request)

    def cancel(self, key: tuple[str, int]) -> None:
        """Ends the role's part of a request; the engine's ends by itself."""

    def promised(self) -> Promised:
        """Requests that were submitted to this role and have no blocks yet, though they will need some."""
        return Promised()

    def on_step(self, progress: Sequence[Progress]) -> None:
        """What a step yielded, when its tokens are on their way to the router; on the engine thread."""
