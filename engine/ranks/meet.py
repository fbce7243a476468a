"""How the ranks of a worker find each other."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import FileStore, PrefixStore

from kvrelay.engine.kv.degree import Degree
from kvrelay.engine.ranks.collective import NO_GROUP, Place
from kvrelay.engine.ranks.shared import SharedMemoryCollective

if TYPE_CHECKING:
    from torch.distributed import Store

MEET_SECONDS = 300.0
"""Longest time that a rank waits for another one, in a step or while models load. Ranks that are lost are noticed in
seconds by other means (`kvrelay.worker.ranks`)."""


def meet(folder: Path, degree: Degree, rank: int, threads: int) -> Place:
    """Meets the other ranks of the worker, all on this machine.

    Args:
        folder: private to the worker's ranks, and empty at first; no longer needed after this has returned on all.
        threads: CPU threads that compute on this rank.

    Raises:
        CollectiveError: a rank didn't come.
    """
    if degree.tensor == 1:
        return Place(degree, rank, NO_GROUP)
    stage, place = divmod(rank, degree.tensor)
    store: Store = PrefixStore(f"stage {stage}", FileStore(str(folder / "ranks"), degree.ranks))
    return Place(degree, rank, SharedMemoryCollective.join(store, place, degree.tensor, MEET_SECONDS, threads))
