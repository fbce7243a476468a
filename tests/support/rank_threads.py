"""Ranks as threads of the test's process, and their collective."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore

from kvrelay.engine.degree import Degree
from kvrelay.engine.ranks.collective import NO_GROUP, CollectiveError, Place
from kvrelay.engine.ranks.shared import SharedMemoryCollective

T = TypeVar("T")


class ThreadGroup:
    """State that the ranks of a group share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=120)
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.exchanges: list[list[Tensor]] = [[] for _ in range(size)]
        self.messages: list[queue.Queue[Tensor]] = []
        """Messages that each rank has sent."""


class ThreadCollective:
    """Implements `Collective` for a thread."""

    def __init__(self, shared: ThreadGroup, place: int) -> None:
        self._shared = shared
        self.place = place
        self.size = len(shared.parts)
        self.summed: list[int] = []
        """Bytes of each part that was summed."""
        self.gathered: list[int] = []
        """Bytes of each part that was gathered."""
        self.exchanged: list[list[int]] = []
        """Bytes for each rank, of each exchange."""

    def sum(self, part: Tensor) -> Tensor:
        assert part.is_contiguous()
        self.summed.append(part.nbytes)
        total, *others = self._gather(part)
        for other in others:
            total += other
        return part.copy_(total)

    def gather(self, part: Tensor) -> Tensor:
        self.gathered.append(part.nbytes)
        return self._gather(part)

    def _gather(self, part: Tensor) -> Tensor:
        try:
            self._shared.parts[self.place] = part
            self._shared.barrier.wait()
            found = torch.stack(self._shared.parts)
            self._shared.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise CollectiveError("a rank is lost") from error
        return found

    def exchange(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int] | None = None, most: int = 0
    ) -> tuple[Tensor, list[int]]:
        assert rows.is_contiguous()
        assert len(rows) == sum(sent)
        self.exchanged.append([count * rows.shape[1] * rows.itemsize for count in sent])
        try:
            self._shared.exchanges[self.place] = list(rows.split(list(sent)))
            self._shared.barrier.wait()
            found = [parts[self.place] for parts in self._shared.exchanges]
            out, counts = torch.cat(found), [len(part) for part in found]
            self._shared.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise CollectiveError("a rank is lost") from error
        assert received is None or list(received) == counts
        return out, counts

    def ring(self, to: int, source: int, message_bytes: int, depth: int) -> "ThreadRing":
        if self.place == 0:
            self._shared.messages = [queue.Queue(depth) for _ in range(self.size)]
        self.gather(torch.zeros(1))
        return ThreadRing(self._shared.messages[self.place], self._shared.messages[source])

    def check(self) -> None:
        if self._shared.barrier.broken:
            raise CollectiveError("a rank is lost")

    def abort(self) -> None:
        self._shared.barrier.abort()


class ThreadRing:
    """Implements `Ring` for a thread."""

    def __init__(self, sent: "queue.Queue[Tensor]", received: "queue.Queue[Tensor]") -> None:
        self._sent, self._received = sent, received

    def send(self, rows: Tensor) -> None:
        self._sent.put(rows.clone(), timeout=30)

    def receive(self, rows: Tensor) -> None:
        found = self._received.get(timeout=30)
        assert found.shape == rows.shape
        assert found.dtype == rows.dtype
        rows.copy_(found)

    def abort(self) -> None: ...


def shared_places(tensor: int, pipeline: int = 1, threads: int = 1) -> list[Place]:
    """The places of all ranks of a worker, which share memory."""
    degree, stores = Degree(tensor, pipeline), [HashStore() for _ in range(1 + pipeline)]

    def join(rank: int) -> Place:
        stage, number = divmod(rank, tensor)
        join = partial(SharedMemoryCollective.join, timeout=30, threads=threads)
        all_ranks = join(stores[0], rank, degree.ranks)
        if pipeline == 1:
            return Place(degree, rank, all_ranks, all_ranks)
        return Place(degree, rank, join(stores[1 + stage], number, tensor) if tensor > 1 else NO_GROUP, all_ranks)

    with ThreadPoolExecutor(degree.ranks) as pool:
        return list(pool.map(join, range(degree.ranks)))


def places(degree: Degree) -> list[Place]:
    """The places of all ranks of a worker."""
    stages, ranks = [ThreadGroup(degree.tensor) for _ in range(degree.pipeline)], ThreadGroup(degree.ranks)
    return [
        Place(
            degree,
            rank,
            ThreadCollective(stages[rank // degree.tensor], rank % degree.tensor),
            ThreadCollective(ranks, rank),
        )
        for rank in range(degree.ranks)
    ]


def on_ranks(places: list[Place], run: Callable[[Place], T]) -> list[T]:
    """Result of each rank. A rank that fails ends the others."""

    def safely(place: Place) -> T:
        try:
            return run(place)
        except BaseException:
            place.abort()
            raise

    with ThreadPoolExecutor(len(places)) as pool:
        futures = [pool.submit(safely, place) for place in places]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, CollectiveError)):
        raise error
    return [future.result() for future in futures]
