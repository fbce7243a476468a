"""The decode role: reserves blocks for KV that a prefill worker computes, then generates from token 1 on.

    (router's Submit)          (prefill worker's offer)
        '-----------. .---------------'
                  EXPECTED     both must come, in either order
                     |         queue: offers without free blocks, the most urgent first; consumer `blocks_freed`
                  RESERVED     blocks are taken, prefix-cache hits first; the prefill worker may send
                     |         queue: the link's frames      producer the prefill worker, consumer the link's thread
                  COMMITTED    every frame has verified; the sequence enters the engine with all its prompt computed
                     |         queue: the scheduler's ready list      producer commit, consumer the engine's steps
                  DECODING     one token a step, or more if it guesses, to the router
                     |
                  DONE         the last token; or Failure at any point before, with the blocks released

A co-located request is computed here to its end, in the same engine.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import grpc

from kvrelay.decode_worker.handoff_service import HandoffService
from kvrelay.decode_worker.kv_receiver import Receiving
from kvrelay.engine.kv.blocks import IntegrityError
from kvrelay.engine.request import Request
from kvrelay.engine.scheduling.progress import Progress, Reservation
from kvrelay.engine.scheduling.room import REPORTED, Room
from kvrelay.internal.v1.supervisor_pb2 import ROLE_PREFILL
from kvrelay.internal.v1.worker_pb2 import (
    PHASE_COLOCATED,
    PHASE_DECODE,
    WAIT_BLOCKS,
    WAIT_ROW,
    Failure,
    Holding,
    Promised,
    Submit,
)
from kvrelay.transfer.failpoints import failpoint
from kvrelay.transfer.protocol.endpoint import Endpoint, TransferStats
from kvrelay.transfer.protocol.messages import Code
from kvrelay.worker.engine_thread import EngineEndedError
from kvrelay.worker.handoff import HandoffRole
from kvrelay.worker.relay.requests import peer_of
from kvrelay.worker.role import Key
from kvrelay.worker.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor


class DecodeRole(HandoffRole):
    """Decode's side of the hand-off; implements `ReceiverHost`."""

    phases = (PHASE_DECODE, PHASE_COLOCATED)
    peer_role = ROLE_PREFILL
    takes_states = True

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._promised: dict[Key, Holding] = {}
        """Blocks that requests without a reservation are expected to need in the end."""
        self._coming: dict[Key, tuple[int, int]] = {}
        """(rank, holder) of the requests that have not asked for blocks yet."""
        self._room = Room(worker.engine.scheduler.prefix.pool.total, worker.cache.block_size)
        self._service = HandoffService(self.setup, self)
        self._receiver = self._service.receiver

    def add_services(self, server: grpc.aio.Server) -> None:
        self._service.add_to(server)

    @property
    def endpoint(self) -> Endpoint[Receiving]:
        return self._receiver

    async def close(self, code: Code) -> None:
        await self._service.close(code)

    def expect(self, request: Request, submit: Submit) -> None:
        """Promises blocks, so that no router gives them away while the request waits for its KV."""
        if submit.phase == PHASE_DECODE:
            blocks = self._room.wanted(request, len(request.tokens))
            self._promised[request.key] = Holding(holder=request.holder, blocks=blocks)
            self._coming[request.key] = request.urgency.rank, request.holder
            self.worker.engine.scheduler.coming = frozenset(self._coming.values())

    def submit(self, request: Request, submit: Submit) -> None:
        peer = peer_of(submit)
        if submit.phase != PHASE_DECODE:
            self.worker.compute(request)
        elif peer is None:
            self.worker.fail(request.key, Failure(code=Failure.CODE_INTERNAL, message="it names no prefill worker"))
        else:
            self._receiver.expect(request.key, peer, request.tokens, request.urgency)

    def promised(self) -> Promised:
        blocks: Counter[int] = Counter()
        for each in self._promised.values():
            blocks[each.holder] += each.blocks
        holdings = [Holding(holder=holder, blocks=count) for holder, count in blocks.most_common(REPORTED)]
        return Promised(requests=len(self._promised), blocks=blocks.total(), holdings=holdings)

    def end(self, key: Key, code: Code) -> None:
        self._has_come(key, True)
        self._receiver.cancel(key, code)

    def on_step(self, progress: Sequence[Progress]) -> None:
        self.worker.post_to_loop(self._receiver.blocks_freed)

    # ReceiverHost.

    def reserve(self, key: Key, answer: Callable[[Reservation | Exception | None], None], *, passing: bool) -> None:
        worker, post, request = self.worker, self.worker.post_to_loop, self.worker.request(key)
        outcome: Reservation | Exception | None = None
        if request is not None:
            with worker.engine.lock:
                try:
                    if worker.thread.ended:
                        outcome = EngineEndedError("the engine has ended")
                    else:
                        outcome = worker.engine.scheduler.reserve(request, passing=passing)
                except ValueError as error:
                    post(worker.fail, key, Failure(code=Failure.CODE_INVALID, message=str(error)))
                except IntegrityError as error:
                    worker.hooks.failed(error)
                    outcome = EngineEndedError("the engine has failed")
                worker.note_load()
        failpoint("decode.after_reserve", key)
        # Posted after the load that shows the blocks as taken.
        post(self._has_come, key, isinstance(outcome, Reservation))
        post(answer, outcome)

    def _has_come(self, key: Key, settled: bool) -> None:
        """Notes that the request has asked for blocks; with `settled`, it needs no further ones."""
        if settled:
            self._promised.pop(key, None)
        if self._coming.pop(key, None) is not None:
            self.worker.engine.scheduler.coming = frozenset(self._coming.values())

    def waits(self, key: Key) -> None:
        self.worker.note_wait(key, WAIT_BLOCKS)

    def release(self, reservation: Reservation) -> None:
        self.worker.release(reservation)
        # Those that wait ask when the engine's thread has released the blocks: no step may follow that would tell.
        self.worker.thread.post(lambda: self.on_step(()))

    def imported(
        self, key: Key, reservation: Reservation, first_token: int, stats: TransferStats, states: "Tensor | None"
    ) -> None:
        failpoint("decode.before_commit", key)
        worker, request = self.worker, self.worker.request(key)
        worker.received(stats)
        if request is None:
            self.release(reservation)
            return

        def resume() -> None:
            scheduler = worker.engine.scheduler
            try:
                scheduler.resume(request, first_token, reservation.hold, states)
            except ValueError as error:  # a first token that no sound peer sends
                reservation.release()
                self.on_step(())  # no step may follow that would tell of these blocks
                worker.post_to_loop(worker.fail, key, Failure(code=Failure.CODE_INTERNAL, message=str(error)))
                return
            failpoint("decode.after_commit", key)
            if scheduler.rows_taken:
                worker.post_to_loop(worker.note_wait, key, WAIT_ROW)

        worker.thread.post(resume)

    def import_failed(self, key: Key, code: Code, message: str) -> None:
        self.handoff_failed(key, code, message)
