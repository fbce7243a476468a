"""What both sides of the hand-off share in a worker: who this worker is to its peers, and who they are."""

import asyncio
from collections.abc import Mapping, Sequence

from kvrelay.engine.request import Request
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_SUSPECT,
    Member,
)
from kvrelay.internal.v1.supervisor_pb2 import Role as MemberRole
from kvrelay.internal.v1.worker_pb2 import Submit
from kvrelay.transfer.control import LocalWorker
from kvrelay.transfer.peers import MEET_SECONDS, Peer, PeerTable
from kvrelay.transfer.transports.base import Transport
from kvrelay.transfer.transports.registry import available_transports, entries
from kvrelay.worker.role import Role
from kvrelay.worker.server import Key, WorkerServer

# A suspect may yet be heard of, and a draining worker finishes what it has; a dead one never comes back.
REACHABLE = frozenset({MEMBER_STATE_READY, MEMBER_STATE_DRAINING, MEMBER_STATE_SUSPECT})


class HandoffRole(Role):
    """A role that hands KV over to, or takes it from, workers of `peer_role`."""

    peer_role: MemberRole

    def __init__(self, worker: WorkerServer) -> None:
        super().__init__(worker)
        self.peers = PeerTable()
        self._transports: dict[str, Transport] = {}
        self._early: dict[Key, asyncio.Task[None]] = {}
        """Requests whose peer this worker has yet to hear of: the router may hear of a new worker first."""

    def take(self, request: Request, submit: Submit) -> None:
        """Begins this role's part of a request."""
        raise NotImplementedError

    def submit(self, request: Request, submit: Submit) -> None:
        peer = submit.peer
        if peer.name and self.peers.is_news(peer.name, peer.incarnation):
            task = asyncio.create_task(self._take_early(request, submit), name=f"early {request.key}")
            self._early[request.key] = task
        else:
            self.take(request, submit)

    async def _take_early(self, request: Request, submit: Submit) -> None:
        """Takes it in any case: a peer that stays unknown is refused by the hand-off, with its reason."""
        await self.peers.met(submit.peer.name, submit.peer.incarnation, MEET_SECONDS)
        del self._early[request.key]
        self.take(request, submit)

    def cancel(self, key: Key) -> None:
        early = self._early.pop(key, None)
        if early is not None:
            early.cancel()

    def local(self) -> LocalWorker:
        """This worker, as it introduces itself to its peers."""
        worker = self.worker
        runner = worker.runner
        gpu = runner.pool.tensor.is_cuda
        return LocalWorker(worker.config.name, worker.incarnation, runner.layout, runner.spec.fingerprint, gpu)

    def transports(self) -> Mapping[str, Transport]:
        """What this worker's links can do, best first."""
        if not self._transports:
            config = self.worker.config
            gpu = self.worker.runner.pool.tensor.is_cuda
            self._transports = available_transports(config.host, config.transfer.transport, gpu)
        return self._transports

    def describe(self, member: Member) -> None:
        member.transports.extend(entries(self._transports))

    def members_changed(self, members: Sequence[Member]) -> None:
        self.peers.update(
            Peer(member.name, member.incarnation, member.address, tuple(member.transports))
            for member in members
            if member.role == self.peer_role and member.state in REACHABLE
        )
