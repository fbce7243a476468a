"""Clients that ask all the time; each stream's tokens are compared with the model's."""

import threading
from typing import Self

from kvrelay.client import Client, KvrelayError
from support.drawn import sampling_options, seed_of
from support.faults import CLIENT_SECONDS, oracle, prompt_of
from support.processes import wait_until

STREAMS = 6
TOKENS = 120
MORE_SECONDS = 90.0


class Load:
    """STREAMS clients, each with one request after another, from `with` on until its end."""

    def __init__(self, router: str, tokens: int = TOKENS) -> None:
        self.failures: list[str] = []
        """Descriptions of what went wrong: errors, and wrong tokens."""
        self.resumes = 0
        """Times that a stream went on over another router."""
        self.done = 0
        """Requests that are over."""
        self._router = router
        self._tokens = tokens
        self._running: set[str] = set()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(STREAMS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def until_running(self, count: int = STREAMS) -> None:
        """Waits until so many streams have begun to yield tokens."""
        wait_until(lambda: self.done + len(self._running) >= count, "streams run", MORE_SECONDS)

    def more(self, count: int) -> None:
        """Waits until so many more requests are over."""
        enough = self.done + count
        wait_until(lambda: self.done >= enough, lambda: f"{count} more requests: {self.failures}", MORE_SECONDS)

    def _ask(self, number: int) -> None:
        round_ = 0
        with Client(self._router) as client:
            while not self._stop.is_set():
                round_ += 1
                self._one(client, f"load {self._router} {id(self)} {number} {round_}")
                self.done += 1

    def _one(self, client: Client, name: str) -> None:
        prompt, seed = prompt_of(name, 90), seed_of(name)
        tokens: list[int] = []
        options = sampling_options(seed) | {"max_tokens": self._tokens, "ignore_eos": True}
        try:
            for chunk in client.generate(prompt, timeout=CLIENT_SECONDS, **options):
                tokens += chunk.token_ids
                self._running.add(name)
                self.resumes += 0 if chunk.timeline is None else chunk.timeline.resumes
            if tokens != oracle(prompt, self._tokens, seed):
                self.failures.append(f"{name}: wrong tokens")
        except KvrelayError as error:
            self.failures.append(f"{name}: {error}")
        finally:
            self._running.discard(name)
