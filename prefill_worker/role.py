"""The prefill role: computes prompts, samples their first token, ships their KV to a decode worker.

    (router's Submit)
        |
    WAITING      nothing is held anywhere
        |        queue: the scheduler's waiting list        producer Submit, consumer the engine's steps
    OFFERED      the prompt has its blocks here and its first step runs; the decode worker is asked for room
        |
    COMPUTING    chunk by chunk; each finished chunk is on its way while the next one computes
        |        queue: the link's frames                   producer the engine's steps, consumer the link's thread
    FIRST TOKEN  goes to the router at once, and to the decode worker behind the last frame
        |
    EXPORTED     the blocks stay held until the decode worker has acknowledged them, or the lease ends
        |
    DONE         TransferReport to the router; or Failure at any point before, with the blocks released

The offer goes out no sooner, so whoever holds blocks on a decode worker has all that it needs to finish here: full
workers never wait for each other in a circle. A first token that ends the request withdraws the offer. A request
without a peer is computed here to its end.
"""

import os
from collections.abc import Sequence

import grpc

from kvrelay.engine.kv.blocks import Hold
from kvrelay.engine.layers import WatchedRunner
from kvrelay.engine.progress import Progress
from kvrelay.engine.request import Request
from kvrelay.engine.sequence import Sequence as EngineSequence
from kvrelay.internal.v1.supervisor_pb2 import ROLE_DECODE, Member
from kvrelay.internal.v1.worker_pb2 import (
    PHASE_COLOCATED,
    PHASE_PREFILL,
    Failure,
    RequestEvent,
    Submit,
    TransferReport,
)
from kvrelay.prefill_worker.kv_sender import KVSender
from kvrelay.prefill_worker.layers import LayerGroups
from kvrelay.transfer.control import TransferStats
from kvrelay.transfer.failpoints import failpoint
from kvrelay.transfer.messages import Code
from kvrelay.worker.handoff import HandoffRole
from kvrelay.worker.server import Key, WorkerServer


class PrefillRole(HandoffRole):
    """Prefill's side of the hand-off. The engine thread's are `_shipped`, `_partly`, `_layers`, all else the loop's."""

    phases = (PHASE_PREFILL, PHASE_COLOCATED)
    peer_role = ROLE_DECODE

    def __init__(self, worker: WorkerServer) -> None:
        super().__init__(worker)
        self._peer_of: dict[Key, tuple[str, str]] = {}
        """Where the KV of requests that wait is to go."""
        self._shipped: dict[Key, int] = {}
        """Blocks of each computing sequence that the exporter was given already."""
        self._partly: set[Key] = set()
        """Sequences whose last chunk the exporter was given in some layers."""
        self._layers: LayerGroups | None = None

    async def start(self, server: grpc.aio.Server) -> None:
        worker = self.worker
        self._exporter = KVSender(
            self.local(), worker.runner.pool, self.peers, worker.config.transfer, self.transports(), self
        )
        self._exporter.start()
        worker.engine.scheduler.on_start = self._on_start
        runner, groups = worker.runner, worker.config.transfer.layer_groups
        # On a GPU a layer's KV is written some time after its kernels were launched: nothing there can be told yet.
        if groups != 1 and isinstance(runner, WatchedRunner) and not runner.pool.tensor.is_cuda:
            threads = worker.config.engine.threads or len(os.sched_getaffinity(0))
            self._layers = LayerGroups(groups, runner.layout, threads, self._exporter.frame_cost, self._ship_layers)
            runner.watch = self._layers

    async def stop(self) -> None:
        await self._exporter.close()

    def members_changed(self, members: Sequence[Member]) -> None:
        super().members_changed(members)
        if self.worker.started:
            self._exporter.peers_changed()

    def take(self, request: Request, submit: Submit) -> None:
        handoff = submit.peer.name != ""
        if handoff:
            self._peer_of[request.key] = submit.peer.name, submit.peer.incarnation
        self.worker.compute(request, handoff=handoff)

    def cancel(self, key: Key) -> None:
        super().cancel(key)
        self._peer_of.pop(key, None)
        self._exporter.cancel(key)
        self.worker.thread.post(lambda: self._forget(key))

    def _forget(self, key: Key) -> None:
        self._shipped.pop(key, None)
        self._partly.discard(key)
        if self._layers is not None:
            self._layers.forget(key)

    def _on_start(self, sequence: EngineSequence) -> None:
        if sequence.handoff:
            if self._layers is not None:
                self._layers.sequences[sequence.handle] = sequence
            self.worker.loop.call_soon_threadsafe(self._offer, sequence.request)

    def _offer(self, request: Request) -> None:
        """Begins the hand-off, once: a sequence that was preempted starts again."""
        peer = self._peer_of.pop(request.key, None)
        if peer is not None:
            failpoint("prefill.before_offer", request.key)
            self._exporter.begin(request.key, peer, request.tokens)

    def on_step(self, progress: Sequence[Progress]) -> None:
        if self._layers is not None:
            self._layers.ended()
        for step in progress:
            if step.sequence.handoff:
                self._ship(step)

    def _ship(self, step: Progress) -> None:
        """Gives the exporter what the step computed; on the engine thread."""
        request = step.sequence.request
        soon = self.worker.loop.call_soon_threadsafe
        if step.token is None and step.error is None:
            chunk = (step.computed - 1) // self.worker.config.engine.max_batch_tokens
            failpoint("prefill.after_chunk", request.key, chunk=chunk)
            done = self._shipped.get(request.key, 0)
            whole = step.computed // self.worker.runner.layout.block_size
            # After a preemption the same blocks' worth is computed again: what was shipped then is as good.
            if whole > done:
                hold = self.worker.engine.scheduler.share(step.sequence, done, whole)
                self._shipped[request.key] = whole
                soon(self._exporter.progress, request.key, hold)
            return
        self._forget(request.key)
        if step.hold is not None and step.token is not None:
            failpoint("prefill.after_finish", request.key)
            soon(self._exporter.finished, request.key, step.token, step.hold)
        else:
            soon(self._exporter.cancel, request.key)

    def _ship_layers(self, sequence: EngineSequence, layers: int) -> None:
        """Gives the exporter what of the prompt's last chunk the first layers have; on the engine thread."""
        key, hold = sequence.request.key, None
        if key not in self._partly:
            self._partly.add(key)
            end = self.worker.runner.layout.blocks_for(len(sequence.tokens))
            hold = self.worker.engine.scheduler.share(sequence, self._shipped.get(key, 0), end)
        self.worker.loop.call_soon_threadsafe(self._exporter.layers_computed, key, layers, hold)

    # ExportHost.

    def release(self, hold: Hold) -> None:
        self.worker.thread.post(hold.release)
        self.worker.refresh_load()

    def exported(self, key: Key, stats: TransferStats) -> None:
        failpoint("prefill.after_ack", key)
        report = TransferReport(
            transfer_seconds=stats.transfer_seconds,
            handoff_seconds=stats.handoff_seconds,
            transfer_bytes=stats.nbytes,
        )
        self.worker.send(RequestEvent(request_id=key[0], attempt=key[1], transfer=report), last=True)

    def export_failed(self, key: Key, code: Code, message: str) -> None:
        verdict = Failure.CODE_RETRY if code.retryable else Failure.CODE_INTERNAL
        self.worker.fail(key, verdict, f"hand-off {code.value}: {message}")
