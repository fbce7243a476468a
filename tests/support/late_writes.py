"""KV writes of a step that runs by itself, without a GPU."""

import threading
from collections.abc import Callable


class LateWrites:
    """Writes of a step that have ended once `end` was called; implements `KVWrites`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []
        self.begun = True
        self.ended = False

    def follow(self) -> None:
        """The CPU has no queue to follow them in: whoever reads now reads what was there before."""

    def then(self, call: Callable[[], object]) -> None:
        with self._lock:
            if not self.ended:
                self._calls.append(call)
                return
        call()

    def end(self) -> None:
        with self._lock:
            self.ended = True
        for call in self._calls:
            call()
