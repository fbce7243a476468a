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
    slot: int
    """The number of the request on the stream."""
    expiry: asyncio.TimerHandle | None
    """Ends the request if it has no token by then."""
    client_call: ClientCall
    trial_tokens: int
    """Tokens until its trial ends (`Submit.trial_tokens`)."""

    def sent(self, tokens: int) -> None:
        """Its router gets so many tokens."""
        self.trial_tokens = max(0, self.trial_tokens - tokens)
        if tokens and self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None
