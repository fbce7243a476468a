"""Ranks as threads of the test's process, and their collective."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore

from kvrelay.engine.degree import Degree
from kvrelay.engine.ranks.collective import CollectiveError, Place
from kvrelay.engine.ranks.shared import SharedMemoryCollective

T = TypeVar("T")


class ThreadGroup:
    """What the ranks of a group share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.parts: list[Tensor] = [torch.empty(0)] * size


class ThreadCollective:
    """Implements `Collective` for a thread."""

    def __init__(self, shared: ThreadGroup, place: int) -> None:
        self._shared = shared
        self.place = place
        self.size = len(shared.parts)
        self.summed: list[int] = []
        """Bytes of each part that was summed."""

    def sum(self, part: Tensor) -> Tensor:
        assert part.is_contiguous()
        self.summed.append(part.nbytes)
        total, *others = self.gather(part)
        for other in others:
            total += other
        return part.copy_(total)

    def gather(self, part: Tensor) -> Tensor:
        try:
            self._shared.parts[self.place] = part
            self._shared.barrier.wait()
            found = torch.stack(self._shared.parts)
            self._shared.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise CollectiveError("a rank is lost") from error
        return found

    def abort(self) -> None:
        self._shared.barrier.abort()


def shared_places(tensor: int, threads: int = 1) -> list[Place]:
    """The places of all ranks of a worker with one stage, which share memory."""
    store = HashStore()
    with ThreadPoolExecutor(tensor) as pool:
        groups = pool.map(lambda place: SharedMemoryCollective.join(store, place, tensor, 30, threads), range(tensor))
        return [Place(Degree(tensor), rank, group) for rank, group in enumerate(groups)]


def places(degree: Degree) -> list[Place]:
    """The places of all ranks of a worker."""
    stages = [ThreadGroup(degree.tensor) for _ in range(degree.pipeline)]
    return [
        Place(degree, rank, ThreadCollective(stages[rank // degree.tensor], rank % degree.tensor))
        for rank in range(degree.ranks)
    ]


def on_ranks(places: list[Place], run: Callable[[Place], T]) -> list[T]:
    """What each rank returns. A rank that fails ends the others."""

    def safely(place: Place) -> T:
        try:
            return run(place)
        except BaseException:
            place.group.abort()
            raise

    with ThreadPoolExecutor(len(places)) as pool:
        futures = [pool.submit(safely, place) for place in places]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, CollectiveError)):
        raise error
    return [future.result() for future in futures]
