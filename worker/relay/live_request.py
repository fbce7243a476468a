"""A live request of a worker, and its state."""

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrelay.engine.request import Request
from kvrelay.internal.v1.worker_pb2 import WAIT_UNSPECIFIED, ClientCall, PeerRef, Submit, Wait
from kvrelay.worker.relay.stream import RelayStream


@dataclass(slots=True)
class LiveRequest:
    """A request of this worker, from its Submit to its last event."""

    request: Request
    peer: PeerRef
    """The other worker of its hand-off; without a name if there is none."""
    stream: RelayStream
    slot: int
    """Number of the request on the stream."""
    expiry: asyncio.TimerHandle | None
    """Timer that ends the request if it has no token by then."""
    client_call: ClientCall
    suspect_tokens: int
    """Number of tokens until the request is no suspect any more (`Submit.suspect_tokens`)."""
    on_trial: bool
    """Whether it may share this worker with no other suspect."""
    held: Submit | None
    """Message that a suspect came with, until its router lets it begin."""
    trace_id: str
    """Trace id for log lines."""
    chain: Sequence[int]
    """Names of the prompt's prefixes, `Submit.chain`, until other routers were told of them."""
    waits: Wait = WAIT_UNSPECIFIED
    """Reason why nothing of the request is computed now, as its router was told."""
    decode_reported: bool = False
    """Whether the router was told of its first step after a hand-off."""

    @classmethod
    def of(
        cls, submit: Submit, request: Request, stream: RelayStream, expiry: asyncio.TimerHandle | None
    ) -> "LiveRequest":
        """The request of a message that has come on `stream`."""
        # Copies: a part of a message keeps the whole message in memory.
        call = ClientCall(key=submit.client_call.key, call=submit.client_call.call)
        peer = PeerRef(name=submit.peer.name, incarnation=submit.peer.incarnation)
        chain = array("Q", submit.chain)
        suspect, held = submit.suspect_tokens, submit if submit.suspect_tokens else None
        return cls(
            request,
            peer,
            stream,
            submit.slot,
            expiry,
            call,
            suspect,
            submit.on_trial,
            held,
            submit.trace_id,
            chain,
        )

    def sent(self, tokens: int, computed: int = 0) -> None:
        """Notes that the router gets so many tokens, or is told how many have their KV by now."""
        self.suspect_tokens = max(0, self.suspect_tokens - tokens)
        if tokens or computed:
            self.waits = WAIT_UNSPECIFIED
        if tokens and self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


def refused_suspect(submit: Submit, others: Iterable[LiveRequest]) -> str:
    """The reason why a worker that has these requests can't take this one beside its suspects; empty if it can."""
    suspects = [live for live in others if live.suspect_tokens] if submit.suspect_tokens else []
    on_trial = submit.on_trial or any(live.on_trial for live in suspects)
    return f"{len(suspects)} other suspects, and one of all is on trial" if suspects and on_trial else ""
