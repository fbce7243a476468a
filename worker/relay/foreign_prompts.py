"""Tells each router of the prompts that others have sent to this worker, and of their answers, for its index of prefix
caches."""

from kvrelay.internal.v1.worker_pb2 import Answered, ForeignPrompt, RequestEvent
from kvrelay.worker.relay.live_request import LiveRequest
from kvrelay.worker.relay.stream import RelayStream


class ForeignPrompts:
    """Tells routers of each other's prompts. Used on the event loop."""

    def __init__(self) -> None:
        self._streams: set[RelayStream] = set()

    def attach(self, stream: RelayStream) -> None:
        """Adds a stream, whose router is told from now on."""
        self._streams.add(stream)

    def detach(self, stream: RelayStream) -> None:
        self._streams.discard(stream)

    def note(self, live: LiveRequest, event: RequestEvent) -> None:
        """Takes note of an event of a live request that goes out. The first one with a report shows that its prompt's
        KV is here.
        """
        if not live.chain or not (event.HasField("prefill") or event.HasField("decode")):
            return
        prompt = ForeignPrompt(chain=live.chain)
        if event.HasField("prefill"):
            prompt.cached_tokens = event.prefill.cached_tokens
        live.chain = ()
        self._tell(prompt, live.stream)

    def answered(self, answered: Answered, stream: RelayStream) -> None:
        """Takes the chain of a prompt with its answer, whose KV is here, from the router of this stream."""
        self._tell(ForeignPrompt(chain=answered.chain), stream)

    def _tell(self, prompt: ForeignPrompt, known_to: RelayStream) -> None:
        for stream in self._streams:
            if stream is not known_to:
                stream.tell(prompt)
