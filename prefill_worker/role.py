"""The prefill role: computes prompts, samples their first token, ships their KV to a decode worker.

    (router's Submit)
        |
    WAITING      nothing is held anywhere
        |        queue: the scheduler's waiting list        producer Submit, consumer the engine's steps
    OFFERED      the prompt has its blocks here and its first step runs; the decode worker is asked for blocks
        |
    COMPUTING    chunk by chunk; each finished chunk is sent while the next one computes. Of a step that runs by itself
        |        (on a GPU), a chunk is given to the sender when the step is launched, with its `KVWrites`
        |        queue: the link's frames                   producer the engine's steps, consumer the link's thread
    FIRST TOKEN  goes to the router at once, and to the decode worker behind the last frame
        |
    EXPORTED     the blocks stay held until the decode worker has acknowledged them, or the lease ends
        |
    DONE         TransferReport to the router; or Failure at any point before, with the blocks released

Prefill offers only after its own blocks are allocated, so a reservation on decode never waits for prefill memory: no
deadlock. A first token that ends the request withdraws the offer. A request without a peer is computed here to its end.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvrelay.engine.kv.blocks import Hold
from kvrelay.engine.kv.writes import WRITTEN, KVWrites
from kvrelay.engine.request import Request
from kvrelay.engine.scheduling.progress import Progress
from kvrelay.engine.sequence import Sequence as EngineSequence
from kvrelay.engine.states import StatesLayout
from kvrelay.internal.v1.supervisor_pb2 import ROLE_DECODE
from kvrelay.internal.v1.worker_pb2 import PHASE_COLOCATED, PHASE_PREFILL, RequestEvent, Submit, TransferReport
from kvrelay.prefill_worker.handoff_client import HandoffClient
from kvrelay.prefill_worker.kv_sender import Sending
from kvrelay.rpc.identity import WorkerId
from kvrelay.transfer.failpoints import failpoint
from kvrelay.transfer.protocol.endpoint import Endpoint, TransferStats
from kvrelay.transfer.protocol.messages import Code
from kvrelay.transfer.protocol.peers import Peer
from kvrelay.worker.handoff import HandoffRole
from kvrelay.worker.relay.requests import peer_of
from kvrelay.worker.role import Key
from kvrelay.worker.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor


class PrefillRole(HandoffRole):
    """Prefill's side of the hand-off; implements `SenderHost`. Only the engine thread touches `_shipped`."""

    phases = (PHASE_PREFILL, PHASE_COLOCATED)
    peer_role = ROLE_DECODE

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._peer_of: dict[Key, WorkerId] = {}
        """Decode workers of requests whose prompt has not started yet."""
        self._shipped: dict[Key, int] = {}
        """Blocks of each computing sequence that the sender has already."""
        self._fetched = 0
        """Number of copies of hidden states that were asked for; the engine thread's."""
        self._came = 0
        """Number of these copies that have arrived on the event loop."""
        self._client = HandoffClient(self.setup, self)
        self._sender = self._client.sender
        worker.engine.scheduler.on_start, worker.engine.on_launch = self._on_start, self._on_launch

    @property
    def endpoint(self) -> Endpoint[Sending]:
        return self._sender

    @property
    def active(self) -> int:
        # What comes with hidden states may hold blocks of a request that was cancelled.
        return super().active + self._fetched - self._came

    async def close(self, code: Code) -> None:
        await self._client.close(code)

    def submit(self, request: Request, submit: Submit) -> None:
        peer = peer_of(submit)
        member = None if peer is None else self.peers.get(peer)
        if peer is not None:
            self._peer_of[request.key] = peer
        self.worker.compute(request, handoff=peer is not None, states=self._kept_for(member))

    def end(self, key: Key, code: Code) -> None:
        self._peer_of.pop(key, None)
        self._sender.cancel(key, code)
        self.worker.thread.post(lambda: self._shipped.pop(key, None))

    def _kept_for(self, peer: Peer | None) -> StatesLayout | None:
        """Hidden states that the peer wants and steps here can keep; where they can't, the hand-off is refused."""
        wanted = None if peer is None else peer.states
        return None if wanted is None or wanted.misfit(self.worker.states_shape) is not None else wanted

    def _keep(self, key: Key, first: int, end: Callable[[], None] | None, states: "Tensor") -> None:
        """Gives the sender hidden states in host memory; `end` tells it of the prompt's end, if the step had that."""
        self._came += 1
        self._sender.keep(key, first, states)
        if end is not None:
            end()

    def _offer(self, request: Request) -> None:
        """Begins the hand-off, once: a preempted sequence starts again."""
        peer = self._peer_of.pop(request.key, None)
        if peer is not None:
            failpoint("prefill.before_offer", request.key)
            self._sender.begin(request.key, peer, request.tokens)

    # Engine thread.

    def _on_start(self, sequence: EngineSequence) -> None:
        if sequence.handoff:
            self.worker.post_to_loop(self._offer, sequence.request)

    def _on_launch(self, sequences: Sequence[EngineSequence], written: KVWrites) -> None:
        for sequence in sequences:
            if sequence.handoff:
                self._give(sequence, sequence.reach, written)

    def _give(self, sequence: EngineSequence, computed: int, written: KVWrites) -> None:
        """Gives the sender the blocks of the first `computed` tokens that it doesn't have. A partial last one is given
        at the prompt's end only, where nothing more is written to it.
        """
        worker, key = self.worker, sequence.request.key
        done, size = self._shipped.get(key, 0), worker.cache.block_size
        end = computed // size if computed < sequence.num_tokens else -(-computed // size)
        # A preempted sequence computes the same blocks again; those shipped before have the same content.
        if end > done:
            self._shipped[key] = end
            hold = worker.engine.scheduler.share(sequence, done, end)
            worker.post_to_loop(self._sender.progress, key, hold, written)

    def on_step(self, progress: Sequence[Progress]) -> None:
        worker, step_tokens = self.worker, self.worker.engine.scheduler.config.max_batch_tokens
        for step in progress:
            if not step.sequence.handoff:
                continue
            key = step.sequence.request.key
            end: Callable[[], None] | None = None
            if step.token is None and step.error is None:
                failpoint("prefill.after_chunk", key, chunk=(step.computed - 1) // step_tokens)
            else:
                self._shipped.pop(key, None)
                end = partial(self._sender.cancel, key)
                if step.hold is not None and step.token is not None:
                    failpoint("prefill.after_finish", key)
                    end = partial(self._sender.finished, key, step.token, step.hold)
            # Hidden states may come later, and the prompt's end behind them.
            if step.states is not None and step.sequence.states is not None:
                self._fetched += 1
                keep = partial(worker.post_to_loop, self._keep, key, step.computed - len(step.states), end)
                worker.fetch(step.states, step.state_places, step.sequence.states.dtype, keep)
            elif end is not None:
                worker.post_to_loop(end)
            if end is None:
                self._give(step.sequence, step.computed, WRITTEN)

    # SenderHost.

    def release(self, hold: Hold) -> None:
        self.worker.release(hold)

    def exported(self, key: Key, stats: TransferStats) -> None:
        failpoint("prefill.after_ack", key)
        self.worker.metrics.sent(stats)
        report = TransferReport(
            transfer_seconds=stats.transfer_seconds,
            handoff_seconds=stats.handoff_seconds,
            transfer_bytes=stats.nbytes,
            grant_seconds=stats.grant_seconds,
        )
        self.worker.send(RequestEvent(request_id=key[0], attempt=key[1], transfer=report), last=True)

    def export_failed(self, key: Key, code: Code, message: str) -> None:
        self.handoff_failed(key, code, message)
