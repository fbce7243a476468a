"""The co-located role: computes prompts and completions on one worker, with no hand-off."""

from collections.abc import Sequence

import grpc

from kvrelay.engine.progress import Progress
from kvrelay.engine.request import Request
from kvrelay.internal.v1.supervisor_pb2 import Member
from kvrelay.internal.v1.worker_pb2 import PHASE_COLOCATED, Phase, Promised, Submit
from kvrelay.worker.worker import Key, Worker


class ColocatedRole:
    """Gives every request to the engine. Prefill and decode roles extend it by their side of the hand-off."""

    phases: tuple[Phase, ...] = (PHASE_COLOCATED,)

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    @property
    def transports(self) -> Sequence[str]:
        return ()

    def add_services(self, server: grpc.aio.Server) -> None:
        """This role has no service of its own."""

    def members_changed(self, members: Sequence[Member]) -> None:
        """A worker without hand-offs needs no peers."""

    def submit(self, request: Request, submit: Submit) -> None:
        self.worker.compute(request)

    def cancel(self, key: Key) -> None:
        """Only the engine has a part of the request."""

    def promised(self) -> Promised:
        return Promised()

    def on_step(self, progress: Sequence[Progress]) -> None:
        """The tokens are queued already."""

    async def stop(self) -> None:
        """Nothing is in progress besides the engine's work."""
