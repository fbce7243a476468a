"""Learns from failed attempts which workers, and which ways between two workers, new requests should avoid.

One `Avoidance` for pairs and one for workers, each with this life of a key:

    trusted --failure--> avoided for 1 s --> probation --the next attempt, as a probe--> trusted, if it succeeds
                            ^                                        |
                            +--- for twice as long, at most 30 s ----+ if it fails

A pair fails with the first attempt whose hand-off fails. A worker fails after STREAK attempts in a row that it returned
or was silent in, or if its hand-offs with PEERS different workers fail. Failures of attempts that began before the
latest failure became known don't count again: they tell of the same event. Pure decisions: the clock is given, and
nothing here waits.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvrelay.rpc.identity import WorkerId

FIRST_SECONDS = 1.0
LONGEST_SECONDS = 30.0
STREAK = 3
PEERS = 2

Pair = tuple[WorkerId, WorkerId]
"""(prefill worker, decode worker)."""
KeyT = TypeVar("KeyT")


@dataclass(slots=True)
class _Trouble:
    """A key that has failed and has not succeeded since."""

    since: int
    """Number of the first attempt that began after the latest failure."""
    pause: float
    until: float
    probe: int | None = None
    """Number of the attempt that probes the key."""


class Avoidance(Generic[KeyT]):
    """Keys to avoid. Attempts are numbered in the order in which they begin."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._troubles: dict[KeyT, _Trouble] = {}

    def __contains__(self, key: KeyT) -> bool:
        """Whether new attempts should avoid the key."""
        trouble = self._troubles.get(key)
        return trouble is not None and (self._clock() < trouble.until or trouble.probe is not None)

    @property
    def failed(self) -> Collection[KeyT]:
        """The keys that have failed and have not succeeded since: the avoided ones and those on probation."""
        return self._troubles.keys()

    def begin(self, key: KeyT, attempt: int) -> None:
        """An attempt uses the key: if it is on probation, as its probe."""
        if key not in self and (trouble := self._troubles.get(key)) is not None:
            trouble.probe = attempt

    def fail(self, key: KeyT, attempt: int, latest: int) -> None:
        """`attempt` has failed because of the key; `latest` is the number of the latest attempt that has begun."""
        trouble = self._troubles.get(key)
        if trouble is None:
            self._troubles[key] = _Trouble(latest + 1, FIRST_SECONDS, self._clock() + FIRST_SECONDS)
        elif attempt >= trouble.since:
            trouble.since = latest + 1
            trouble.pause = min(LONGEST_SECONDS, 2 * trouble.pause)
            trouble.until = self._clock() + trouble.pause
            trouble.probe = None

    def succeed(self, key: KeyT, attempt: int) -> None:
        """`attempt` has shown that the key works."""
        trouble = self._troubles.get(key)
        if trouble is not None and attempt >= trouble.since:
            del self._troubles[key]

    def end(self, key: KeyT, attempt: int) -> None:
        """`attempt` is over. If it was a probe without a result, the next attempt is one."""
        trouble = self._troubles.get(key)
        if trouble is not None and trouble.probe == attempt:
            trouble.probe = None

    def keep(self, wanted: Callable[[KeyT], bool]) -> None:
        """Forgets the keys that are not wanted any more."""
        self._troubles = {key: trouble for key, trouble in self._troubles.items() if wanted(key)}


class FleetHealth:
    """Health of all workers and pairs of one router."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.pairs: Avoidance[Pair] = Avoidance(clock)
        self.workers: Avoidance[WorkerId] = Avoidance(clock)
        self._streaks: dict[WorkerId, int] = {}
        self._attempts = 0

    @property
    def troubled(self) -> bool:
        """Whether there is anything to avoid, or on probation."""
        return bool(self.workers.failed or self.pairs.failed)

    def avoids(self, worker: WorkerId) -> bool:
        """Whether new requests should avoid the worker as a whole."""
        return worker in self.workers

    def bad_peers(self, worker: WorkerId) -> frozenset[WorkerId]:
        """Decode workers to which this prefill worker should not hand over."""
        return frozenset(
            decode for prefill, decode in self.pairs.failed if prefill == worker and (prefill, decode) in self.pairs
        )

    def begin(self, prefill: WorkerId, decode: WorkerId | None) -> "Evidence":
        """An attempt begins on these workers; the same worker twice, or no decode worker, means no hand-off."""
        self._attempts += 1
        return Evidence(self, self._attempts, prefill, decode)

    def keep(self, workers: Collection[WorkerId]) -> None:
        """Forgets all other workers: an incarnation that has left never comes back."""
        self.workers.keep(lambda worker: worker in workers)
        self.pairs.keep(lambda pair: pair[0] in workers and pair[1] in workers)
        self._streaks = {worker: streak for worker, streak in self._streaks.items() if worker in workers}

    def fail_pair(self, pair: Pair, attempt: int) -> None:
        """The attempt's hand-off between these two has failed."""
        self.pairs.fail(pair, attempt, self._attempts)
        for side, worker in enumerate(pair):
            if sum(failed[side] == worker for failed in self.pairs.failed) >= PEERS:
                self.workers.fail(worker, attempt, self._attempts)

    def fail_worker(self, worker: WorkerId, attempt: int) -> None:
        """The attempt was returned by the worker, or found it silent."""
        self._streaks[worker] = self._streaks.get(worker, 0) + 1
        if self._streaks[worker] >= STREAK:
            self.workers.fail(worker, attempt, self._attempts)

    def finish(self, worker: WorkerId) -> None:
        """The worker has done its part of an attempt to the end."""
        self._streaks.pop(worker, None)


class Evidence:
    """Evidence of one attempt about its workers. `end` must be called when the attempt is over."""

    def __init__(self, health: FleetHealth, number: int, prefill: WorkerId, decode: WorkerId | None) -> None:
        self._health = health
        self._number = number
        self._workers = sorted({prefill, decode or prefill})
        self._pair: Pair | None = None if decode is None or decode == prefill else (prefill, decode)
        self.doubtful = any(worker in health.workers for worker in self._workers) or (
            self._pair is not None and self._pair in health.pairs
        )
        """Whether the attempt uses what should be avoided, for want of anything better."""
        for worker in self._workers:
            health.workers.begin(worker, number)
        if self._pair is not None:
            health.pairs.begin(self._pair, number)

    def delivered(self) -> None:
        """The worker that generates has sent a token: it works, and so does the way to it."""
        for worker in self._workers:
            self._health.workers.succeed(worker, self._number)
        if self._pair is not None:
            self._health.pairs.succeed(self._pair, self._number)

    def finished(self) -> None:
        """The attempt has sent all of its tokens."""
        for worker in self._workers:
            self._health.finish(worker)

    def handoff_failed(self) -> None:
        """The hand-off between the two workers failed. With several peers, one of the two must be at fault."""
        if self._pair is not None:
            self._health.fail_pair(self._pair, self._number)

    def failed(self, workers: Iterable[WorkerId]) -> None:
        """These workers returned the request, or were silent."""
        for worker in workers:
            self._health.fail_worker(worker, self._number)

    def end(self) -> None:
        """The attempt is over."""
        for worker in self._workers:
            self._health.workers.end(worker, self._number)
        if self._pair is not None:
            self._health.pairs.end(self._pair, self._number)
