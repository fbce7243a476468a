"""Hundreds of seeded worlds: whatever fails or is damaged, in whatever order, no guarantee of the hand-off breaks.

A seed that breaks one is printed with its last events. `KVRELAY_SEED=n pytest -s` on this file runs that one world and
prints all of its events.
"""

import multiprocessing
import os
import random
import re
import typing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.transfer.protocol import events, messages
from kvrelay.transfer.protocol import table as protocol
from kvrelay.transfer.protocol.events import State
from support.simulation.damage import DAMAGES
from support.simulation.world import Explored, World, explore, run_world, trace

MANY_SEEDS = 100_000
NOISE = 0.3
"""Share of the frames that are damaged in a noisy world."""
OVERTAKEN = 8254
"""A world in which a frame could overtake one of the same hand-off and link that waited for its step."""
SLICE = 500
SEED = os.environ.get("KVRELAY_SEED")

pytestmark = pytest.mark.timeout(1800)
many_seeds = pytest.mark.skipif(SEED is not None, reason="needs more than one seed")


def seeds(some: int, *further: int, always: Sequence[int] = ()) -> pytest.MarkDecorator:
    """Runs a test over the first seeds, and `always` these; over those up to each further number in later tiers."""
    ends = [(some, "some", ()), *zip(further, ("more", "many"), (pytest.mark.more, pytest.mark.slow), strict=False)]
    begins = [0, some, *further]
    cases = [
        pytest.param([*range(begin, end), *(() if begin else always)], marks=marks, id=name)
        for begin, (end, name, marks) in zip(begins, ends, strict=False)
    ]
    return pytest.mark.parametrize("seeds", cases)


Transition = tuple[str, str, str, str]
"""(machine, state, event, next state), states as in `State`'s values."""

EVENTS = {kind.__name__ for kind in typing.get_args(events.SendEvent | events.ReceiveEvent)} | {"Deadline"}
ACTIONS = {
    kind.__name__
    for kind in typing.get_args(events.SendAction | events.ReceiveAction) + typing.get_args(messages.Message)
}


def _words(cell: str) -> set[str]:
    return set(re.findall("[A-Za-z]+", cell))


def specified() -> dict[Transition, set[str]]:
    """The actions that each transition may return, by the tables in the docstring of the protocol. Any other transition
    changes nothing and returns no action."""
    transitions: dict[Transition, set[str]] = {}
    machine = ""
    states: list[State] = []
    live: list[State] = []
    for line in (protocol.__doc__ or "").splitlines():
        if line.count("|") != 3 or line.startswith("--"):
            continue
        left, event, becomes, actions = line.split("|")
        if event.strip() == "event":
            machine, live = left.strip().lower(), []
            continue
        if left.startswith("any of these"):
            states = live
        elif left.startswith("ended"):
            states = [state for state in State if state.over]
        elif left[0] != " ":
            states = [State[left.split()[0]]]
            live = live + states
        for state in states:
            after = state if becomes.strip() == "same" else State[becomes.strip()]
            for name in EVENTS & _words(event):
                allowed = transitions.setdefault((machine, state.value, name, after.value), set())
                allowed |= ACTIONS & _words(actions)
    return transitions


def run_seeds(seeds: Sequence[int], noise: float | None = None, ranks: bool | None = None) -> Explored:
    """Runs the worlds of `seeds`; more than a slice of them in two processes."""
    if len(seeds) <= SLICE:
        return explore(seeds, noise=noise, ranks=ranks)
    whole = Explored()
    slices = [seeds[start : start + SLICE] for start in range(0, len(seeds), SLICE)]
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
        for part in pool.map(partial(explore, noise=noise, ranks=ranks), slices):
            whole.add(part)
    return whole


def check(explored: Explored) -> None:
    """Checks for violations, and for transitions and actions that `kvrelay.transfer.protocol.table` doesn't have."""
    first = "\n\n".join(text for _, text in sorted(explored.violations.items())[:3])
    assert not explored.violations, f"seeds {sorted(explored.violations)[:20]}\n{first}"
    table = specified()
    for transition, actions in explored.seen.items():
        _, state, _, after = transition
        if actions or state != after:
            assert transition in table, f"{transition} returns {actions}"
            assert actions <= table[transition], f"{transition} returns {actions - table[transition]}, too"


@seeds(250, 1000)
def test_no_interleaving_breaks_a_guarantee_or_leaves_the_table(seeds: Sequence[int]) -> None:
    if SEED is not None:
        seeds = [int(SEED)]
        print("\n".join(trace(int(SEED))))
    explored = run_seeds(seeds)
    check(explored)
    assert explored.commits > explored.worlds or SEED is not None, "worlds in which little is committed prove little"


@many_seeds
@seeds(150, 500, 3000)
def test_no_damage_is_committed(seeds: Sequence[int]) -> None:
    """Bytes that differ from those that the sender read never become KV or hidden states, and nothing leaks."""
    explored = run_seeds(seeds, noise=NOISE)
    check(explored)
    assert explored.damages.keys() == {damage.__name__ for damage in DAMAGES}
    assert min(explored.damages.values()) > len(seeds) // 20
    assert explored.commits > len(seeds) // 2


@many_seeds
@seeds(100, 300, 10_000, always=[OVERTAKEN])
def test_no_interleaving_breaks_a_guarantee_between_workers_of_several_ranks(seeds: Sequence[int]) -> None:
    """Their numbers of ranks differ, and any link between two ranks may be lost."""
    explored = run_seeds(seeds, ranks=True)
    check(explored)
    assert explored.commits > 0.9 * explored.worlds, "worlds in which little is committed prove little"


@many_seeds
@pytest.mark.slow
def test_many_worlds_walk_every_row_of_the_table() -> None:
    """Live states: every transition; states that are over: every event in at least one of them."""
    explored = run_seeds(range(MANY_SEEDS))
    check(explored)
    table = specified()
    over = {"committed", "failed", "cancelled"}

    def joined(transitions: Iterable[Transition]) -> set[Transition]:
        """Takes the states that are over as one."""
        return {
            (machine, "over" if state in over else state, event, "over" if state in over else after)
            for machine, state, event, after in transitions
        }

    assert not joined(table) - joined(explored.visits)
    returned = {name for actions in explored.seen.values() for name in actions}
    assert {name for actions in table.values() for name in actions} == returned


@many_seeds
@pytest.mark.more
def test_a_world_without_checksums_commits_wrong_kv() -> None:
    """The simulation notices what a missing protection lets through, and nothing breaks with the protection."""
    broken = explore(range(100), checksums=False).violations
    assert broken
    assert all(text.startswith("token: ") for text in broken.values())
    for seed in broken:
        run_world(seed)


def test_the_same_seed_is_the_same_world() -> None:
    for seed in (3, 176, 405):
        assert trace(seed) == trace(seed)
        assert trace(seed)


@pytest.mark.more
@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_hypothesis_finds_no_shorter_way_to_break_a_guarantee(rng: random.Random) -> None:
    World(rng).run()
