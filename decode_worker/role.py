"""The decode role: reserves blocks for KV that a prefill worker computes, then generates from token 1 on.

    (router's Submit)          (prefill worker's offer)
        '-----------. .---------------'
                  EXPECTED     both must come, in either order
                     |         queue: waiting offers, first come first served; consumer `blocks_freed`
                  RESERVED     blocks are taken, prefix-cache hits first; the prefill worker may send
                     |         queue: the link's frames      producer the prefill worker, consumer the link's thread
                  COMMITTED    every frame has verified; the sequence enters the engine with all its prompt computed
                     |         queue: the scheduler's ready list      producer commit, consumer the engine's steps
                  DECODING     one token a step, to the router
                     |
                  DONE         the last token; or Failure at any point before, with the blocks released

A co-located request is computed here to its end, in the same engine.
"""

from collections.abc import Sequence

import grpc

from kvrelay.decode_worker.kv_receiver import KVReceiver
from kvrelay.engine.progress import Progress
from kvrelay.engine.request import Request
from kvrelay.engine.scheduler import Reservation
from kvrelay.internal.v1.handoff_pb2_grpc import add_HandoffServiceServicer_to_server
from kvrelay.internal.v1.supervisor_pb2 import ROLE_PREFILL, Member
from kvrelay.internal.v1.worker_pb2 import PHASE_COLOCATED, PHASE_DECODE, Failure, Promised, Submit
from kvrelay.transfer.control import TransferStats
from kvrelay.transfer.failpoints import failpoint
from kvrelay.transfer.messages import Code
from kvrelay.worker.handoff import HandoffRole
from kvrelay.worker.server import Key, WorkerServer


class DecodeRole(HandoffRole):
    """Decode's side of the hand-off."""

    phases = (PHASE_DECODE, PHASE_COLOCATED)
    peer_role = ROLE_PREFILL

    def __init__(self, worker: WorkerServer) -> None:
        super().__init__(worker)
        self._promised: dict[Key, int] = {}
        """Blocks that requests will need for their KV, of those that have none yet."""

    async def start(self, server: grpc.aio.Server) -> None:
        worker = self.worker
        self._importer = KVReceiver(
            self.local(), worker.runner.pool, self.peers, worker.config.transfer, self.transports(), self
        )
        add_HandoffServiceServicer_to_server(self._importer, server)
        self._importer.start()

    async def stop(self) -> None:
        await self._importer.close()

    def members_changed(self, members: Sequence[Member]) -> None:
        super().members_changed(members)
        if self.worker.started:
            self._importer.peers_changed()

    def submit(self, request: Request, submit: Submit) -> None:
        if submit.phase == PHASE_DECODE:
            self._promised[request.key] = self.worker.runner.layout.blocks_for(len(request.tokens) + 1)
        super().submit(request, submit)

    def take(self, request: Request, submit: Submit) -> None:
        if submit.phase == PHASE_DECODE:
            self._importer.expect(request.key, (submit.peer.name, submit.peer.incarnation), request.tokens)
        else:
            self.worker.compute(request)

    def promised(self) -> Promised:
        return Promised(requests=len(self._promised), blocks=sum(self._promised.values()))

    def cancel(self, key: Key) -> None:
        super().cancel(key)
        self._promised.pop(key, None)
        self._importer.cancel(key)

    def on_step(self, progress: Sequence[Progress]) -> None:
        self.worker.loop.call_soon_threadsafe(self._importer.blocks_freed)

    # ImportHost.

    async def reserve(self, key: Key) -> Reservation | None:
        request = self.worker.request(key)
        if request is None:
            return None
        try:
            reservation = await self.worker.with_load(lambda: self.worker.engine.scheduler.reserve(request))
        except ValueError as error:
            self.worker.fail(key, Failure.CODE_INVALID, str(error))
            return None
        if reservation is not None:
            self._promised.pop(key, None)
        failpoint("decode.after_reserve", key)
        return reservation

    def release(self, reservation: Reservation) -> None:
        self.worker.thread.post(reservation.release)
        self.worker.refresh_load()
        self._importer.blocks_freed()

    def imported(self, key: Key, reservation: Reservation, first_token: int, stats: TransferStats) -> None:
        failpoint("decode.before_commit", key)
        request = self.worker.request(key)
        if request is None:
            self.release(reservation)
            return
        self.worker.thread.post(lambda: self._resume(request, first_token, reservation))

    def _resume(self, request: Request, first_token: int, reservation: Reservation) -> None:
        """Gives the sequence to the engine; on the engine thread, which a wrong token of a peer's must not end."""
        vocab_size = self.worker.runner.spec.vocab_size
        try:
            if first_token >= vocab_size:
                raise ValueError(f"first_token is {first_token}; allowed: 0 to {vocab_size - 1}")
            self.worker.engine.scheduler.resume(request, first_token, reservation.hold)
            failpoint("decode.after_commit", request.key)
        except ValueError as error:
            reservation.release()
            self.worker.loop.call_soon_threadsafe(self.worker.fail, request.key, Failure.CODE_INTERNAL, str(error))
            self.worker.loop.call_soon_threadsafe(self._importer.blocks_freed)

    def import_failed(self, key: Key, code: Code, message: str) -> None:
        if code is Code.NO_ROOM:
            verdict = Failure.CODE_FULL
        else:
            verdict = Failure.CODE_RETRY if code.retryable else Failure.CODE_INTERNAL
        self.worker.fail(key, verdict, f"hand-off {code.value}: {message}")
