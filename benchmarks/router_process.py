"""A router process that also notes how long tokens stay in it; `router_throughput.py` starts it.

    python -m router_process --config FOLDER/NAME.json

From the router's receipt of the message with a token to the end of its write towards the client, in milliseconds, for
one request in SAMPLED: what the others cost is not changed by it. When such a request ends, its tokens' times become a
line of FOLDER/NAME.held, a JSON list.
"""

import json
import sys
import time
import zlib
from pathlib import Path

from kvrelay.internal.v1.worker_pb2 import RelayResponse
from kvrelay.router import __main__ as router
from kvrelay.router.placing.worker_stream import WorkerStream
from kvrelay.router.session.attempt import Attempt
from kvrelay.router.session.output import Output, Piece

SAMPLED = 8


class Held:
    """Follows the tokens of some requests through the router."""

    def __init__(self, path: Path) -> None:
        self._lines = path.open("w", buffering=1)
        self._attempts: dict[str, tuple[Attempt, list[float], list[float]]] = {}
        """Attempts by the request's name, each with the arrival times of those of its tokens that came in order, and
        the milliseconds of those that were sent."""
        self._arrived = 0.0
        """Arrival time of the message that is being delivered."""

    def install(self) -> None:
        """Starts to observe."""
        submit, deliver = Attempt.submit, WorkerStream._deliver
        sent, finish = Output._sent, Output.finish

        def submitting(attempt: Attempt, *args: float) -> None:
            name = attempt._key[0]
            if not zlib.crc32(name.encode()) % SAMPLED:
                self._attempts[name] = attempt, [], []
            submit(attempt, *args)

        async def delivering(stream: WorkerStream, response: RelayResponse) -> None:
            self._arrived = time.monotonic()
            await deliver(stream, response)
            for attempt, times, _ in self._attempts.values():
                times.extend([self._arrived] * (len(attempt.tokens) - len(times)))

        def sending(output: Output, now: float) -> None:
            sent(output, now)
            if (name := output._request.wire_id) in self._attempts:
                _, times, held = self._attempts[name]
                end = len(output.tokens)
                times.extend([self._arrived] * (end - len(times)))  # sent while their message is delivered
                held.extend((now - at) * 1e3 for at in times[len(held) : end])

        async def finishing(output: Output, piece: Piece) -> None:
            await finish(output, piece)
            if ended := self._attempts.pop(output._request.wire_id, None):
                self._lines.write(json.dumps(ended[2]) + "\n")

        Attempt.submit, WorkerStream._deliver = submitting, delivering  # type: ignore[method-assign]
        Output._sent, Output.finish = sending, finishing  # type: ignore[method-assign]


if __name__ == "__main__":
    Held(Path(sys.argv[sys.argv.index("--config") + 1]).with_suffix(".held")).install()
    sys.exit(router.run())
