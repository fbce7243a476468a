"""The prefill role: computes prompts, samples their first token, ships their KV to a decode worker.

    (router's Submit)
        |
    OFFERED      the decode worker is asked for room while the prompt waits and computes
        |        queue: the scheduler's waiting list        producer Submit, consumer the engine's steps
    COMPUTING    chunk by chunk; each finished chunk is on its way while the next one computes
        |        queue: the exporter's frames               producer the engine's steps, consumer the link's thread
    FIRST TOKEN  goes to the router at once, and to the decode worker behind the last frame
        |
    EXPORTED     the blocks stay held until the decode worker has acknowledged them, or the lease ends
        |
    DONE         TransferReport to the router; or Failure at any point before, with the blocks released

A first token that ends the request withdraws the offer; a request without a peer is computed here to its end.
"""


from kvrelay.internal.v1.worker_pb2 import (
    PHASE_COLOCATED,
    PHASE_PREFILL,
)
from kvrelay.transfer.exporter import Exporter
from kvrelay.transfer.peers import PeerTable
from kvrelay.worker.role import Role
from kvrelay.worker.server import Key, WorkerServer


class PrefillRole(Role):
    """Prefill's side of the hand-off. `_shipped` belongs to the engine thread, all else to the event loop."""

    phases = (PHASE_PREFILL, PHASE_COLOCATED)

    def __init__(self, worker: WorkerServer) -> None:
        super().__init__(worker)
        self._peers = PeerTable()
        self._exporter: Exporter | None = None
        self._shipped: dict[Key, int] = {}
        """Blocks of each computing sequence that the exporter was given already."""
