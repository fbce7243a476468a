"""How the ranks of a worker find each other."""

from pathlib import Path

from torch._C._distributed_c10d import FileStore, PrefixStore

from kvrelay.engine.degree import Degree
from kvrelay.engine.ranks.collective import ALONE, NO_GROUP, Collective, Place
from kvrelay.engine.ranks.shared import SharedMemoryCollective

MEET_SECONDS = 300.0
"""Longest time that a rank waits for another one, in a step or while models load. Ranks that are lost are noticed in
seconds by other means (`kvrelay.worker.ranks`)."""


def meet(file: Path, degree: Degree, rank: int, threads: int) -> Place:
    """Meets the other ranks of the worker, all on this machine.

    Args:
        file: private to the worker's ranks, and empty at first; no longer needed after this has returned on all. A
            file in memory will do.
        threads: CPU threads that compute on this rank.

    Raises:
        CollectiveError: a rank didn't come.
    """
    if degree.ranks == 1:
        return ALONE
    store = FileStore(str(file), degree.ranks)

    def group(name: str, place: int, size: int) -> Collective:
        if size == 1:
            return NO_GROUP
        return SharedMemoryCollective.join(PrefixStore(name, store), place, size, MEET_SECONDS, threads)

    all_ranks = group("all", rank, degree.ranks)
    if degree.pipeline == 1:
        return Place(degree, rank, all_ranks, all_ranks)
    stage, place = divmod(rank, degree.tensor)
    return Place(degree, rank, group(f"stage {stage}", place, degree.tensor), all_ranks)
