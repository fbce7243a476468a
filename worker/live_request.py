"""What a worker knows of a request that it has."""

import asyncio
from dataclasses import dataclass

from kvrelay.engine.request import Request
from kvrelay.internal.v1.worker_pb2 import ClientCall, PeerRef
from kvrelay.worker.relay_stream import RelayStream


@dataclass(slots=True)
class LiveRequest:
    """A request of this worker, from its Submit to its last event."""

    request: Request
    peer: PeerRef
    """The other worker of its hand-off; without a name if there is none."""
    stream: RelayStream
    expiry: asyncio.TimerHandle | None
    """Ends the request if it has no token by then."""
    client_call: ClientCall
    trial_tokens: int
    """Tokens until its trial ends (`Submit.trial_tokens`)."""
