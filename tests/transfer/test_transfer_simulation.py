"""Thousands of seeded worlds: whatever fails, in whatever order, no guarantee of the hand-off breaks.

A seed that breaks one is printed with its last events. `KVRELAY_SEED=n pytest -s` on this file runs that one world and
prints all of its events.
"""

import multiprocessing
import os
import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.simulated_blocks import Violation
from support.simulation import Explored, World, explore, run_world, trace
from support.specification import Transition, specified

SEEDS, MANY_SEEDS = 4000, 100_000
SLICE = 500
SEED = os.environ.get("KVRELAY_SEED")

pytestmark = pytest.mark.timeout(1800)
many_seeds = pytest.mark.skipif(SEED is not None, reason="needs more than one seed")


def run_seeds(seeds: Sequence[int]) -> Explored:
    """Runs the worlds of `seeds` in two processes at most, and prints a summary."""
    whole = Explored()
    slices = [seeds[start : start + SLICE] for start in range(0, len(seeds), SLICE)]
    processes = min(2, os.cpu_count() or 1, len(slices))
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for part in pool.map(explore, slices):
            whole.add(part)
    print(
        f"{whole.worlds} worlds, {whole.events} events, {whole.commits} commits,"
        f" {len(whole.visits)} transitions, {whole.cpu_seconds:.0f} s of CPU"
    )
    return whole


@pytest.fixture(scope="module")
def explored() -> Explored:
    """Results of the worlds of the default run."""
    if SEED is not None:
        print("\n".join(trace(int(SEED))))
        return explore([int(SEED)])
    return run_seeds(range(SEEDS))


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


def test_no_interleaving_breaks_a_guarantee_or_leaves_the_table(explored: Explored) -> None:
    check(explored)


@many_seeds
def test_most_worlds_commit(explored: Explored) -> None:
    assert explored.commits > explored.worlds, "worlds in which little is committed prove little"


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
def test_a_world_without_checksums_commits_wrong_kv() -> None:
    """The simulation notices what a missing protection lets through, and nothing breaks with the protection."""
    seed, violation = first_violation(2000)
    assert violation.kind == "token"
    run_world(seed)


def first_violation(seeds: int) -> tuple[int, Violation]:
    """The first seed whose world breaks without checksums, and how."""
    for seed in range(seeds):
        try:
            World(random.Random(seed), checksums=False).run()
        except Violation as violation:
            return seed, violation
    return pytest.fail(f"nothing broke in {seeds} worlds")


def test_the_same_seed_is_the_same_world() -> None:
    for seed in (3, 176, 405):
        assert trace(seed) == trace(seed)
        assert trace(seed)


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_hypothesis_finds_no_shorter_way_to_break_a_guarantee(rng: random.Random) -> None:
    World(rng).run()
