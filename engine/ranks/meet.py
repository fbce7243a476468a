"""How the ranks of a worker find each other."""

import logging
from pathlib import Path

from torch._C._distributed_c10d import FileStore, PrefixStore

from kvrelay.engine.degree import Degree
from kvrelay.engine.ranks.collective import ALONE, NO_GROUP, Collective, Place
from kvrelay.engine.ranks.process_group import GlooCollective
from kvrelay.engine.ranks.shared import SharedMemoryCollective, shared_memory_missing

logger = logging.getLogger(__name__)

MEET_SECONDS = 300.0
"""Longest time that a rank waits for another one, in a step or while models load. Ranks that are lost are noticed in
seconds by other means (`kvrelay.worker.ranks`)."""


def meet(file: Path, degree: Degree, rank: int, threads: int) -> Place:
    """Meets the other ranks of the worker, all on this machine. They share memory, or without native kernels use Gloo.

    Args:
        file: private to the worker's ranks, and empty at first; no longer needed after this has returned on all. A
            file in memory will do.
        threads: CPU threads that compute on this rank.

    Raises:
        CollectiveError: a rank didn't come.
    """
    if degree.ranks == 1:
        return ALONE
    store, why = FileStore(str(file), degree.ranks), shared_memory_missing()
    if why is not None:
        logger.warning("ranks add their parts up over Gloo, which is far slower than shared memory: that %s", why)

    def group(name: str, place: int, size: int) -> Collective:
        if size == 1:
            return NO_GROUP
        own = PrefixStore(name, store)
        if why is not None:
            return GlooCollective(own, place, size, MEET_SECONDS)
        return SharedMemoryCollective.join(own, place, size, MEET_SECONDS, threads)

    all_ranks = group("all", rank, degree.ranks)
    if degree.pipeline == 1:
        return Place(degree, rank, all_ranks, all_ranks)
    stage, place = divmod(rank, degree.tensor)
    return Place(degree, rank, group(f"stage {stage}", place, degree.tensor), all_ranks)
