"""The workers that a request may use, by the rules that every policy keeps; and the numbers of each for predictions.

Only workers with equal digests are paired; the group of equal digests that can serve most requests comes first. Workers
and pairs to avoid are used only if there are no others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, count
from operator import is_not
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvrelay.router.placing.placement import AHEAD_PROMPTS, Demand, WorkerView
from kvrelay.rpc.compatibility import rank
from kvrelay.rpc.identity import WorkerId, WorkerRole

Rows = NDArray[np.intp]
PREFILLS, DECODES, COLOCATED = range(3)
"""Indices in `Group.sides`."""
SIDES: Final[dict[WorkerRole, int]] = {"prefill": PREFILLS, "decode": DECODES, "colocated": COLOCATED}


@dataclass(slots=True)
class Group:
    """The workers of one digest that a request may use: without those to avoid, unless nothing else is left."""

    prefills: list[WorkerView]
    decodes: list[WorkerView]
    colocated: list[WorkerView]
    alone: bool
    """Whether the decode workers compute prompts themselves, since nobody else is there."""
    any_pair: bool
    """Whether to use the pairs to avoid as well, since there are no others."""
    troubled: bool
    """Whether every option has a worker or a pair to avoid."""
    rows: tuple[Rows, ...] = ()
    """Indices of the workers of each of `sides` in `Fleet.workers`."""

    @property
    def sides(self) -> tuple[list[WorkerView], list[WorkerView], list[WorkerView]]:
        """The workers by role; a worker is in one of them."""
        return self.prefills, self.decodes, self.colocated

    @classmethod
    def of(cls, workers: Sequence[WorkerView], decode: bool) -> "Group | None":
        """None if the workers can't serve a request, which needs to be decoded or only its first token."""
        prefills, prefills_bad = _usable(workers, "prefill")
        decodes, decodes_bad = _usable(workers, "decode")
        colocated, colocated_bad = _usable(workers, "colocated")
        alone = bool(decodes) and not prefills and not colocated
        if alone:
            any_pair, paired, prefills_bad = False, True, False
        elif not decode:
            decodes, decodes_bad, any_pair, paired = [], False, True, bool(prefills)
        else:
            any_pair = not any(decode.id not in prefill.bad_peers for prefill in prefills for decode in decodes)
            paired = bool(prefills and decodes)
        if not paired and not colocated:
            return None
        pair_bad = not paired or prefills_bad or decodes_bad or (decode and any_pair)
        alone_bad = not colocated or colocated_bad
        if pair_bad and not alone_bad:
            prefills, decodes = [], []
        elif alone_bad and not pair_bad:
            colocated = []
        return cls(prefills, decodes, colocated, alone, any_pair, pair_bad and alone_bad)

    def allows(self, prefill: WorkerView, decode: WorkerView) -> bool:
        return self.any_pair or decode.id not in prefill.bad_peers


def _preferred(decodes: bool, workers: Sequence[WorkerView]) -> list[Group]:
    """The groups that can serve a request, the preferred one first; those with trouble only if there are no others."""
    found = [Group.of(group, decodes) for group in _groups([worker for worker in workers if worker.ready])]
    able = [group for group in found if group is not None]
    able = [group for group in able if not group.alone] or able
    return [group for group in able if not group.troubled] or able


def _usable(workers: Sequence[WorkerView], role: WorkerRole) -> tuple[list[WorkerView], bool]:
    """The workers of a role that need not be avoided, or all of them and True if each has to be."""
    all_ = [worker for worker in workers if worker.role == role]
    good = [worker for worker in all_ if not worker.avoided]
    return (good, False) if good else (all_, bool(all_))


def _groups(ready: Sequence[WorkerView]) -> list[list[WorkerView]]:
    """The workers by digest, the preferred digest first."""
    digests = {worker.compatibility for worker in ready}
    if len(digests) <= 1:
        return [list(ready)] if ready else []
    ranked = rank((worker.role, worker.compatibility) for worker in ready)
    return [[worker for worker in ready if worker.compatibility == digest] for digest in ranked]


STALL_SECONDS = 0.05
"""Pause between two tokens, in seconds, that counts twice."""


class Fleet:
    """The workers that were seen last. What follows from more than their loads is kept until it changes: nearly every
    placement changes one or two loads, and nothing else."""

    def __init__(self) -> None:
        self.workers: list[WorkerView] = []
        self.row: dict[WorkerId, int] = {}
        """Index of each worker in `workers`."""
        self.numbers: NDArray[np.float64] = np.zeros((0, 0))
        """[workers, `COLUMNS`] `numbers_of` each."""
        self._bytes = memoryview(b"")
        """The bytes of `numbers`: to write a row there takes less than an assignment of numpy's."""
        self.estimates = self.numbers
        """[CONTEXT + 1, workers] the part of `numbers` that costs are estimated from."""
        self.figures: list[tuple[float, ...]] = []
        """`numbers_of` each."""
        self.sides: list[int] = []
        """Index of each worker's role in `Group.sides`."""
        self.known = False
        """Whether the costs of all workers that are ready are known."""
        self.suspects = 0
        """Workers that have some."""
        self._groups: dict[bool, list[Group]] = {}
        self._places: list[list[tuple[list[WorkerView], int]]] = []
        """For each worker, the lists of groups that it is in, and where."""

    def see(self, workers: Sequence[WorkerView]) -> bool:
        """Takes the workers' state now; returns whether more than loads has changed."""
        if len(workers) == len(self.workers):
            changed = list(compress(count(), map(is_not, workers, self.workers)))
            if all(_stands(workers[row], self.workers[row]) for row in changed):
                for row in changed:
                    self._replace(row, workers[row])
                return False
        self.workers = list(workers)
        self._groups, self._places = {}, [[] for _ in workers]
        self.row = {worker.id: row for row, worker in enumerate(workers)}
        self.suspects = sum([worker.suspects > 0 for worker in workers])
        self.known = all(worker.pace is not None for worker in workers if worker.ready)
        self.figures = [numbers_of(worker) for worker in workers]
        self.numbers = np.array(self.figures).reshape(-1, COLUMNS)
        self._bytes = self.numbers.data.cast("B") if len(workers) else memoryview(b"")
        self.estimates = self.numbers.T[: CONTEXT + 1]
        self.sides = [SIDES[worker.role] for worker in workers]
        return True

    def groups(self, demand: Demand) -> list[Group]:
        """The groups that can serve a request, the preferred one first."""
        decode = demand.decode_tokens > 0
        if decode not in self._groups:
            self._groups[decode] = found = _preferred(decode, self.workers)
            for group in found:
                group.rows = tuple(np.array([self.row[each.id] for each in side], np.intp) for side in group.sides)
                for side in group.sides:
                    for at, worker in enumerate(side):
                        self._places[self.row[worker.id]].append((side, at))
        return self._groups[decode]

    def _replace(self, row: int, worker: WorkerView) -> None:
        self.suspects += (worker.suspects > 0) - (self.workers[row].suspects > 0)
        self.workers[row] = worker
        self.figures[row] = found = numbers_of(worker)
        ROW.pack_into(self._bytes, row * ROW.size, *found)
        for side, at in self._places[row]:
            side[at] = worker


def _stands(new: WorkerView, old: WorkerView) -> bool:
    """Whether all that decides on groups is as it was."""
    return (
        new.id == old.id
        and new.role == old.role
        and new.ready == old.ready
        and new.avoided == old.avoided
        and new.compatibility == old.compatibility
        and new.bad_peers == old.bad_peers
        # The KV pool's size is known from the first report on; the prefix index depends on it.
        and new.kv_tokens == old.kv_tokens
        and (new.pace is None) == (old.pace is None)
    )


def _room(worker: WorkerView) -> float:
    return math.inf if worker.capacity is None else worker.capacity.sure_tokens


COLUMNS = 13
ROW = Struct(f"{COLUMNS}d")
WAIT, URGENT_WAIT, FIRST, TOKEN, PAIR, DELAY, STEP, CONTEXT = range(8)
BACKLOG, URGENT_BACKLOG, FLOOR, DELAY_FLOOR, ROOM = range(8, COLUMNS)


def numbers_of(worker: WorkerView) -> tuple[float, ...]:
    """Numbers by which a request's costs on a worker are estimated, in seconds but for the backlogs and the room; all 0
    if its costs aren't known.

    WAIT     until a prompt's first step; URGENT_WAIT is the same for one that passes less urgent ones
    FIRST    for any prompt, besides its tokens
    TOKEN    one more token of a prompt
    PAIR     one more pair of tokens that attention visits (`costs.step.pairs`)
    DELAY    by which all sequences that decode there are delayed together, for one token of a prompt (`stall`)
    STEP     for one token more of a newcomer, of itself and of those that it delays
    CONTEXT  in addition to STEP, for one token of its context
    BACKLOG  tokens that it has yet to compute, as `WorkerView.busy` counts them for a request that yields: twice, as
             half of the bound holds for it; infinite if it has enough prompts. URGENT_BACKLOG is for other requests
    FLOOR    for one token of a prompt at least, in whatever chunks it is computed; DELAY_FLOOR is that bound for DELAY
    ROOM     tokens up to which it surely has room for a request (`DecodeCapacity.sure_tokens`)
    """
    pace, urgent = worker.pace, worker.urgent_pace
    if pace is None or urgent is None:
        return (0.0,) * COLUMNS
    step, count = pace.costs.step, pace.load.sequences
    chunk, fixed, decodes = pace.chunk(0), step.fixed, pace.decodes
    first = max(fixed, step.prompt_fixed + step.token) + decodes
    full = max(fixed, step.prompt_fixed + step.token * chunk)
    delay = count * stall(full - fixed, 1, pace.bounded) / chunk
    decode = fixed + decodes + (count + 1) * step.sequence
    token, context = (full + decodes) / chunk, (count + 1) * step.context
    backlog: float = worker.outstanding_tokens + worker.pending_tokens
    waits, backlogs = (pace.wait, urgent.wait), (2 * backlog, backlog - worker.yielding_tokens)
    if worker.role == "prefill" and worker.running >= AHEAD_PROMPTS // 2:
        backlogs = math.inf, math.inf if worker.running >= AHEAD_PROMPTS else backlogs[1]
    floor = step.token + (step.prompt_fixed + decodes) / pace.most
    floors = floor, count * step.token if step.prompt_fixed >= fixed else 0.0
    return *waits, first, token, step.pair, delay, decode, context, *backlogs, *floors, _room(worker)


def stall(seconds: float, steps: int, bounded: bool) -> float:
    """Weighs the delay that a sequence has over `steps` steps: one long pause counts more than many short ones, unless
    the worker bounds the time of a step, as then no pause is long."""
    return seconds if bounded else seconds * (1 + seconds / steps / STALL_SECONDS)
