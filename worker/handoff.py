"""The common part of a worker's two sides of the hand-off: the worker's identity, its peers and transports."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvrelay.internal.v1.describe_pb2 import Description
from kvrelay.internal.v1.supervisor_pb2 import (
    MEMBER_STATE_DEAD,
    MEMBER_STATE_DRAINING,
    MEMBER_STATE_READY,
    MEMBER_STATE_SUSPECT,
    Member,
)
from kvrelay.internal.v1.supervisor_pb2 import Role as RoleNumber
from kvrelay.internal.v1.worker_pb2 import Failure
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.frames.frames import PoolFrames
from kvrelay.transfer.links.endpoint_loop import HandoffSetup
from kvrelay.transfer.protocol.endpoint import Endpoint
from kvrelay.transfer.protocol.messages import Code
from kvrelay.transfer.protocol.peers import Peer
from kvrelay.transfer.protocol.ports import NoTransportError
from kvrelay.transfer.transports.registry import available_transports, choose, entries
from kvrelay.worker.relay.requests import degree_of, states_of
from kvrelay.worker.role import Key, Role
from kvrelay.worker.worker import Worker

CAUSES = {
    Code.CLOSED: Failure.CAUSE_PEER_LOST,
    Code.DRAINING: Failure.CAUSE_DRAINING,
    Code.TIMEOUT: Failure.CAUSE_LINK,
    Code.UNKNOWN_PEER: Failure.CAUSE_PEER_LOST,
    Code.LINK: Failure.CAUSE_LINK,
    Code.INCOMPATIBLE: Failure.CAUSE_REFUSED,
}
"""Causes of a hand-off's failure that lie with the other worker, or the way to it, by code."""

OWN_CODES = {Failure.CAUSE_DRAINING: Code.DRAINING, Failure.CAUSE_PEER_LOST: Code.CLOSED}
"""Codes that tell the other worker that this one is the cause, because it stops or has failed."""

# A suspect may recover, and a draining worker completes what it has. A dead one never comes back.
REACHABLE = frozenset({MEMBER_STATE_READY, MEMBER_STATE_DRAINING, MEMBER_STATE_SUSPECT})


class HandoffRole(Role, ABC):
    """A role that hands KV over to, or takes it from, workers of `peer_role`."""

    peer_role: RoleNumber
    takes_states = False
    """Whether hidden states of prompts come from other workers."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.local(takes_states=self.takes_states), worker.config.transfer)
        self.worker = worker
        self.setup = self.make_setup()
        self.transports = entries(self.setup.transports)

    @property
    @abstractmethod
    def endpoint(self) -> Endpoint[Any]: ...

    def make_setup(self) -> HandoffSetup:
        """Everything that this worker hands KV over with."""
        worker, config, gpu = self.worker, self.worker.config, self.worker.pools[0].bytes.is_cuda
        return HandoffSetup(
            self.local,
            PoolFrames(worker.pools, config.transfer.checksum),
            self.peers,
            config.transfer,
            available_transports(
                config.host,
                config.transfer.transport,
                gpu,
                config.transfer.encrypt,
                worker.credentials.certificates,
                config.engine.hosts,
            ),
            worker.credentials,
            {} if worker.ranks is None else worker.ranks.channels(),
        )

    def members_changed(self, members: Sequence[Member]) -> None:
        peers, dead = [], []
        for member in members:
            worker = WorkerId(member.name, member.incarnation)
            if member.state == MEMBER_STATE_DEAD:
                dead.append(worker)
            elif member.role == self.peer_role and member.state in REACHABLE:
                peers.append(
                    Peer(worker, member.address, tuple(member.transports), states_of(member), degree_of(member))
                )
        self.peers.update(peers, dead)
        self.endpoint.peers_changed()

    @abstractmethod
    def end(self, key: Key, code: Code) -> None:
        """Ends this role's part of a request, for the reason that the peer is told. Unknown keys are allowed."""

    @abstractmethod
    async def close(self, code: Code) -> None:
        """Ends all hand-offs, for the reason that the peers are told."""

    def tell(self, found: Description) -> None:
        config = self.worker.config.transfer
        for peer in self.peers:
            state = found.pairs.add(peer=peer.name, epoch=self.endpoint.epoch(peer.incarnation))
            try:
                state.transport = choose(config.transport, self.transports, peer.transports)
            except NoTransportError as error:
                state.missing = str(error)

    async def stop(self, cause: Failure.Cause) -> None:
        await self.close(OWN_CODES[cause])

    def cancel(self, key: Key, cause: Failure.Cause = Failure.CAUSE_UNSPECIFIED) -> None:
        self.end(key, OWN_CODES.get(cause, Code.CANCELLED))

    def handoff_failed(self, key: Key, code: Code, message: str) -> None:
        """Returns the request to its router, which places it again if that may help.

        A peer that has cancelled the request knows why, and so does the router: the peer told it, or was told by it.
        This worker's word could only come first, and hide the reason.
        """
        if code is Code.CANCELLED:
            self.worker.drop(key)
            return
        failure = Failure(code=Failure.CODE_INTERNAL, message=f"hand-off {code.value}: {message}")
        if code is Code.NO_CAPACITY:
            failure.code = Failure.CODE_FULL
        elif code.retryable or code is Code.INCOMPATIBLE:
            failure.code, failure.cause = Failure.CODE_RETRY, CAUSES.get(code, Failure.CAUSE_UNSPECIFIED)
        if code is Code.DRAINING:
            failure.blamed.append(self.worker.peer(key))
        self.worker.fail(key, failure)
