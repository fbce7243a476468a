"""What both sides of the hand-off share in a worker: who this worker is to its peers, and who they are."""

from collections.abc import Mapping, Sequence

from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_SUSPECT,
    Member,
)
from kvrelay.internal.v1.supervisor_pb2 import Role as MemberRole
from kvrelay.transfer.control import Local
from kvrelay.transfer.peers import Peer, PeerTable
from kvrelay.transfer.transport import Transport
from kvrelay.transfer.transports import available_transports
from kvrelay.worker.role import Role
from kvrelay.worker.server import WorkerServer

# A suspect may yet be heard of, and a draining worker finishes what it has; a dead one never comes back.
REACHABLE = frozenset({MEMBER_STATE_READY, MEMBER_STATE_DRAINING, MEMBER_STATE_SUSPECT})


class HandoffRole(Role):
    """A role that hands KV over to, or takes it from, workers of `peer_role`."""

    peer_role: MemberRole

    def __init__(self, worker: WorkerServer) -> None:
        super().__init__(worker)
        self.peers = PeerTable()
        self._transports: dict[str, Transport] = {}

    def local(self) -> Local:
        """This worker, as it introduces itself to its peers."""
        worker = self.worker
        runner = worker.runner
        return Local(worker.config.name, worker.incarnation, runner.layout, runner.spec.fingerprint)

    def transports(self) -> Mapping[str, Transport]:
        """What this worker's links can do, best first."""
        if not self._transports:
            config = self.worker.config
            gpu = self.worker.runner.pool.tensor.is_cuda
            self._transports = available_transports(config.host, config.transfer.transport, gpu)
        return self._transports

    def describe(self, member: Member) -> None:
        member.transports.extend(self._transports)

    def members_changed(self, members: Sequence[Member]) -> None:
        self.peers.update(
            Peer(member.name, member.incarnation, member.address, tuple(member.transports))
            for member in members
            if member.role == self.peer_role and member.state in REACHABLE
        )
