"""The meeting of a worker's ranks."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from kvrelay.engine.degree import Degree
from kvrelay.engine.ranks.collective import ALONE, NO_GROUP, Collective, CollectiveError, Place
from kvrelay.engine.ranks.process_group import GlooCollective
from kvrelay.engine.ranks.shared import SharedMemoryCollective, shared_memory_missing

logger = logging.getLogger(__name__)

MEET_SECONDS = 300.0
"""Longest time that a rank waits for another one, in a step or while models load. Ranks that are lost are noticed in
seconds by other means (`kvrelay.worker.ranks`)."""


class Meeting(NamedTuple):
    """Where the ranks of one worker find each other, and the way for a rank to get there."""

    name: str
    """Name by which another rank finds it: `file PATH`, or `hosts ADDRESS PORT` for ranks of several machines."""
    store: Callable[[Degree], Store]
    """Opens it for this rank."""
    host: str = "127.0.0.1"
    """Address at which the other ranks reach this one."""
    close: Callable[[], None] = lambda: None
    """Frees what the rank that has made it holds. Ranks that are late may still come before."""

    @classmethod
    def in_memory(cls) -> "Meeting":
        """A new meeting for ranks of this machine, which belong to the same user.

        Raises:
            OSError: there is no memory.
        """
        descriptor = os.memfd_create("kvrelay ranks")
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        # It stays open: another file would get its number, and ranks that are late would write to it.
        return cls(f"file {path}", lambda degree: FileStore(path, degree.ranks), close=lambda: os.close(descriptor))

    @classmethod
    def of_hosts(cls, host: str) -> "Meeting":
        """A new meeting for ranks of several machines.

        Args:
            host: address of this machine that the others reach.

        Raises:
            CollectiveError: no port can be opened.
        """
        with _as_lost():
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=MEET_SECONDS))
        return cls(f"hosts {host} {store.port}", lambda degree: store, host)

    @classmethod
    def named(cls, name: str, host: str = "") -> "Meeting":
        """The meeting that another rank has made.

        Args:
            host: address of this machine that the others reach, for ranks of several machines.
        """
        kind, where = name.split(" ", 1)
        if kind == "file":
            return cls(name, lambda degree: FileStore(where, degree.ranks))
        address, _, port = where.rpartition(" ")

        def store(_: Degree) -> Store:
            with _as_lost():
                return TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=MEET_SECONDS))

        return cls(name, store, host)


def meet(meeting: Meeting, degree: Degree, rank: int, threads: int, hosts: int = 1) -> Place:
    """Meets the other ranks of the worker. Groups of ranks on one machine share memory, unless they lack native
    kernels; others exchange their parts over Gloo.

    Args:
        threads: CPU threads that compute on this rank.
        hosts: machines over which the ranks are divided, in equal parts and in order.

    Raises:
        CollectiveError: a rank didn't come.
    """
    if degree.ranks == 1:
        return ALONE
    store, why, each = meeting.store(degree), shared_memory_missing(), degree.ranks // hosts

    def here(ranks: range) -> bool:
        """Whether the ranks are on one machine."""
        return ranks[0] // each == ranks[-1] // each

    def group(name: str, ranks: range) -> Collective:
        if len(ranks) == 1:
            return NO_GROUP
        own, place = PrefixStore(name, store), rank - ranks.start
        if why is None and here(ranks):
            return SharedMemoryCollective.join(own, place, len(ranks), MEET_SECONDS, threads)
        return GlooCollective(own, place, len(ranks), MEET_SECONDS, meeting.host)

    first = rank - rank % degree.tensor
    stage = range(first, first + degree.tensor)
    if why is not None and here(stage):
        logger.warning("ranks add their parts up over Gloo, which is far slower than shared memory: that %s", why)
    found = Place(degree, rank, all=group("all", range(degree.ranks)), store=store, one_machine=here(stage))
    own = found.all if degree.pipeline == 1 else group(f"stage {first // degree.tensor}", stage)
    return replace(found, group=own)


@contextmanager
def _as_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"the ranks of several machines can't meet: {error}") from error
