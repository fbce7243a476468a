"""A router process that also notes how long tokens stay in it; `router_throughput.py` starts it.

    python benchmarks/router_process.py --config FILE --held FILE

From the router's receipt of the message with a token to the end of its write towards the client, for one request in
SAMPLED: what the others cost is not changed by it.
"""

import json
import sys
import time
import zlib
from array import array
from pathlib import Path

from kvrelay.internal.v1.worker_pb2 import RelayResponse
from kvrelay.router import __main__ as router
from kvrelay.router.placing.worker_stream import WorkerStream
from kvrelay.router.session.attempt import Attempt
from kvrelay.router.session.output import Output, Piece

SAMPLED = 8


class Held:
    """Follows the tokens of some requests through the router."""

    def __init__(self) -> None:
        self.milliseconds = array("d")
        self._attempts: dict[str, tuple[Attempt, list[float]]] = {}
        """Attempts by the request's name, each with the arrival times of those of its tokens that came in order."""
        self._sent: dict[str, int] = {}
        """Tokens that were sent, by the request's name."""
        self._arrived = 0.0
        """Arrival time of the message that is being delivered."""

    def install(self) -> None:
        """Starts to observe."""
        submit, deliver = Attempt.submit, WorkerStream._deliver
        sent, finish = Output._sent, Output.finish

        def submitting(attempt: Attempt, *args: float) -> None:
            name = attempt._key[0]
            if not zlib.crc32(name.encode()) % SAMPLED:
                self._attempts[name] = attempt, []
            submit(attempt, *args)

        def delivering(stream: WorkerStream, response: RelayResponse) -> None:
            self._arrived = time.monotonic()
            deliver(stream, response)
            for attempt, times in self._attempts.values():
                times.extend([self._arrived] * (len(attempt.tokens) - len(times)))

        def sending(output: Output, now: float) -> None:
            sent(output, now)
            name = output._request.wire_id
            if name in self._attempts:
                _, times = self._attempts[name]
                end = len(output.tokens)
                times.extend([self._arrived] * (end - len(times)))  # sent while their message is delivered
                self.milliseconds.extend((now - at) * 1e3 for at in times[self._sent.get(name, 0) : end])
                self._sent[name] = end

        async def finishing(output: Output, piece: Piece) -> None:
            await finish(output, piece)
            self._attempts.pop(output._request.wire_id, None)

        Attempt.submit, WorkerStream._deliver = submitting, delivering  # type: ignore[method-assign]
        Output._sent, Output.finish = sending, finishing  # type: ignore[method-assign]


if __name__ == "__main__":
    at = sys.argv.index("--held")
    path = Path(sys.argv[at + 1])
    del sys.argv[at : at + 2]
    held = Held()
    held.install()
    code = router.run()
    path.write_text(json.dumps(held.milliseconds.tolist()))
    sys.exit(code)
