"""Roles: what a worker does with its requests besides computing them."""

from collections.abc import Sequence
from typing import Any

import grpc

from kvrelay.engine.request import Request
from kvrelay.engine.scheduling.progress import Progress
from kvrelay.internal.v1.describe_pb2 import Description
from kvrelay.internal.v1.supervisor_pb2 import Member
from kvrelay.internal.v1.worker_pb2 import Failure, Phase, Promised, Submit
from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.endpoint import Endpoint
from kvrelay.transfer.protocol.handshake import LocalWorker
from kvrelay.transfer.protocol.peers import PeerTable

Key = tuple[str, int]


class Role:
    """Behaviour of a worker besides computing its requests.

    The co-located role adds nothing; the prefill and the decode role add their side of the hand-off. Every method runs
    on the event loop, except `on_step`, which runs on the engine thread.
    """

    phases: tuple[Phase, ...]
    """Phases of the requests that this role takes."""
    transports: Sequence[str] = ()
    """Transports of this worker as the membership lists them, best first."""

    def __init__(self, local: LocalWorker, transfer: TransferConfig) -> None:
        self.local = local
        self.compatibility = local.digest(transfer)
        """Digest of all that two workers must have in common. A co-located one has it too: routers compare whole
        groups."""
        self.peers = PeerTable()
        """Workers that KV is handed over to, or comes from. The router may learn of a new one first."""

    def add_services(self, server: grpc.aio.Server) -> None:
        """Adds the role's own gRPC services to `server`, before it starts."""

    def members_changed(self, members: Sequence[Member]) -> None:
        """Takes a change of the supervisor's membership."""

    def expect(self, request: Request, submit: Submit) -> None:
        """Counts a request of one of `phases`, which `submit` takes at once or once nothing is missing."""

    def submit(self, request: Request, submit: Submit) -> None:
        """Takes a request that `expect` has counted."""
        raise NotImplementedError

    def cancel(self, key: Key, cause: Failure.Cause = Failure.CAUSE_UNSPECIFIED) -> None:
        """Ends the role's part of a request; the worker ends the engine's part. Unknown keys are allowed.

        Args:
            cause: why this worker returns the request, if it does.
        """

    def promised(self) -> Promised:
        """Requests of this role that will need blocks and have none yet."""
        return Promised()

    @property
    def endpoint(self) -> Endpoint[Any] | None:
        """This worker's end of its hand-offs; None for a role without."""
        return None

    @property
    def active(self) -> int:
        """Hand-offs that may hold blocks."""
        return 0 if self.endpoint is None else self.endpoint.active

    def on_step(self, progress: Sequence[Progress]) -> None:
        """Called when a step has ended, with its tokens queued for the routers; or, without progress, when a sequence
        was cancelled between two steps. Blocks may be free.
        """

    def tell(self, found: Description) -> None:
        """Adds what this role knows of its pairs. Event loop."""

    async def stop(self, cause: Failure.Cause) -> None:
        """Ends what the role has in progress, before the engine ends; `cause` as in `cancel`."""
