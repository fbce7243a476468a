"""Ranks in processes of their own sum and gather the same bits, and notice those that are lost."""

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore, HashStore

from kvrelay.engine.degree import Degree
from kvrelay.engine.ranks.collective import Collective, CollectiveError, Place, Ring
from kvrelay.engine.ranks.meet import Meeting, meet
from kvrelay.engine.ranks.process_group import GlooCollective, NcclCollective
from kvrelay.engine.ranks.shared import SharedMemoryCollective
from kvrelay.kernels.cpu.library import library
from kvrelay.kernels.cpu.packed import SQUARES, NormArgs
from kvrelay.kernels.cpu.program import Program, Team
from kvrelay.kernels.cpu.reduce import ALL_REDUCE, SLOT_BYTES, ReduceArgs
from support.forks import spawned

MAKERS: dict[str, Callable[..., Collective]] = {"shared": SharedMemoryCollective.join, "gloo": GlooCollective}
DTYPES = torch.float32, torch.bfloat16
NUMBERS = (0, 1, 3, 17, 1000, 2 * SLOT_BYTES // 4 + 5, 1_000_003)
"""Sizes of parts: up to several slots, and no multiples of anything."""
TIMEOUT = 30.0
SHORT = 3.0
"""Timeout in seconds of groups that lose a rank."""
LATE = 20.0
"""Longest time in seconds that a busy machine takes for what should take none."""


def parts_of(size: int, numbers: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """All ranks' parts, whose sum depends on the order."""
    noise = torch.Generator().manual_seed(seed)
    return [(torch.randn(numbers, generator=noise) * 10**rank).to(dtype) for rank in range(size)]


def summed(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def _rank(
    connection: Connection, kind: str, path: str, place: int, size: int, timeout: float, scene: Callable[..., str]
) -> None:
    torch.set_num_threads(1)
    # All processes have started before one waits for another.
    connection.send("here")
    connection.recv()
    group = MAKERS[kind](FileStore(path, size), place, size, timeout)
    connection.send("ready")
    try:
        connection.send(scene(group))
    except CollectiveError as error:
        connection.send(str(error))
    # The process lives as long as the test, so that the others lose no rank at their ends.
    with suppress(EOFError):
        connection.recv()


def _sums_and_gathers(group: Collective) -> str:
    for numbers in NUMBERS:
        for dtype in DTYPES:
            parts = parts_of(group.size, numbers, dtype)
            mine = parts[group.place].clone()
            found = group.sum(mine)
            if found is not mine or not torch.equal(found, summed(parts)):
                return f"the sum of {numbers} of {dtype} is wrong"
            if not torch.equal(group.gather(parts[group.place]), torch.stack(parts)):
                return f"the parts of {numbers} of {dtype} are wrong"
    tokens = torch.arange(6).view(2, 3) + group.place
    if not torch.equal(group.gather(tokens.T), torch.stack([tokens.T - group.place + r for r in range(group.size)])):
        return "integers are wrong"
    return _exchanges(group)


def _exchanges(group: Collective) -> str:
    """Rows from each rank to each, some of them none, and some longer than a slot, with and without known numbers."""
    size, place = group.size, group.place
    for seed, (width, most) in enumerate([(1, 3), (7, 40), (300, 0), (65, 700), (2000, 100)]):
        numbers = random.Random(seed)
        counts = [[numbers.choice([0, most, numbers.randint(0, most)]) for _ in range(size)] for _ in range(size)]

        def rows(source: int, to: int, counts: list[list[int]] = counts, width: int = width) -> Tensor:
            count = counts[source][to]
            return (torch.arange(count * width).view(count, width) + 1000 * source + 100 * to).float()

        given = torch.cat([rows(place, to) for to in range(size)])
        expected, received = (
            torch.cat([rows(source, place) for source in range(size)]),
            [each[place] for each in counts],
        )
        for known in (received, None):
            found, numbers_found = group.exchange(given, counts[place], known, size * most)
            if not torch.equal(found, expected) or numbers_found != received:
                return f"exchange {seed} is wrong"
    return "done"


def _crowded(group: Collective) -> str:
    """More rows than there is room for."""
    group.exchange(torch.ones(3, 5), [3, *[0] * (group.size - 1)], None, 2 * (group.size - 1))
    return "done"


def _paces(group: Collective) -> str:
    """Each rank is now ahead of the others and now behind, by more than a thread spins."""
    pace = random.Random(group.place)
    for seed in range(150):
        numbers = random.Random(seed).choice([1, 500, 20_000])
        parts = parts_of(group.size, numbers, torch.float32, seed)
        if not torch.equal(group.sum(parts[group.place].clone()), summed(parts)):
            return f"sum number {seed} is wrong"
        if pace.random() < 0.2:
            time.sleep(pace.choice([0.0001, 0.001, 0.01]))
    return "done"


def _for_ever(group: Collective) -> str:
    part = torch.ones(1000)
    while True:
        group.sum(part)


def _nameless(group: Collective) -> str:
    group.sum(torch.ones(1))
    maps = [line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines()]
    shared = {name[0] for name in maps if name and name[0].startswith(("/memfd", "/dev/shm"))}
    return "done" if shared == {"/memfd:kvrelay (deleted)"} else str(shared)


def _messages(group: Collective) -> str:
    """Rows of many sizes to the next rank, as fast as each rank can."""
    ring, pace = (
        group.ring((group.place + 1) % group.size, (group.place - 1) % group.size, 4 * 3000, 2),
        random.Random(1),
    )
    for number in range(60):
        if random.Random(group.place + number).random() < 0.2:
            time.sleep(0.002)
        shape = pace.choice([(0, 7), (1, 7), (30, 100)])
        ring.send(torch.full((shape[0], 120), float(group.place + number))[:, : shape[1]])
        found = torch.empty(shape[0], 128)[:, : shape[1]]
        ring.receive(found)
        if not (found == (group.place - 1) % group.size + number).all():
            return f"message {number} is wrong"
    return "done"


def _waiting(group: Collective) -> str:
    """Sends until the ring is full: the next rank never receives."""
    ring = group.ring((group.place + 1) % group.size, (group.place - 1) % group.size, 64, 1)
    if group.place:
        return "done"
    ring.send(torch.ones(1, 4))
    ring.send(torch.ones(1, 4))
    return "done"


class Ranks:
    """Processes of one group, all connected."""

    def __init__(self, stack: ExitStack, folder: Path, kind: str, size: int, timeout: float, scene: Any) -> None:
        given = [(kind, str(folder / "store"), place, size, timeout, scene) for place in range(size)]
        started = [stack.enter_context(spawned(_rank, *each)) for each in given]
        self.processes = [process for process, _ in started]
        self.connections = [connection for _, connection in started]
        assert [self.result(place) for place in range(size)] == ["here"] * size
        for connection in self.connections:
            connection.send("join")
        assert [self.result(place) for place in range(size)] == ["ready"] * size

    def result(self, place: int, seconds: float = 120.0) -> str:
        assert self.connections[place].poll(seconds), f"rank {place} says nothing"
        return str(self.connections[place].recv())


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    with ExitStack() as stack:
        yield lambda *given: Ranks(stack, tmp_path, *given)


@pytest.mark.more
def test_rows_without_room_end_an_exchange_on_all_ranks(ranks: Callable[..., Ranks]) -> None:
    found = ranks("shared", 2, SHORT, _crowded)
    texts = [found.result(place) for place in range(2)]
    assert "more rows were sent to rank 0 than it has room for" in texts[0]
    assert texts[1] == "done" or "aborted" in texts[1]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.more), pytest.param(4, marks=pytest.mark.more)])
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("scene", [_sums_and_gathers, _paces, _messages])
def test_ranks_get_the_bits_of_a_sum_in_order(ranks: Callable[..., Ranks], kind: str, size: int, scene: Any) -> None:
    group = ranks(kind, size, TIMEOUT, scene)
    assert [group.result(place) for place in range(size)] == ["done"] * size


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_lost_rank_is_noticed_within_the_timeout(ranks: Callable[..., Ranks], kind: str, number: int) -> None:
    group = ranks(kind, 3, SHORT, _for_ever)
    time.sleep(0.1)
    os.kill(group.processes[1].pid, number)
    began = time.monotonic()
    errors = [group.result(place) for place in (0, 2)]
    assert time.monotonic() - began < SHORT + LATE
    if kind == "shared":
        assert any(f"no exchange within {SHORT:g} s" in error for error in errors)
        assert [error.partition("come to rank ")[2] for error in errors] == ["0: 1", "2: 1"]


def test_a_rank_that_takes_no_message_is_noticed_within_the_timeout(ranks: Callable[..., Ranks]) -> None:
    group = ranks("shared", 2, SHORT, _waiting)
    assert group.result(0, SHORT + LATE) == f"the next stage takes nothing within {SHORT:g} s"


@pytest.mark.parametrize("kind", MAKERS)
def test_an_abort_ends_a_wait_for_a_message(kind: str) -> None:
    groups, rings = pair(kind, 2 * SHORT if kind == "gloo" else TIMEOUT)
    threading.Timer(0.5, (groups[0] if kind == "gloo" else groups[1]).abort).start()
    with pytest.raises(CollectiveError, match="aborted"):
        rings[0].receive(torch.empty(1, 4))


def test_a_message_over_gloo_is_awaited_as_long_as_a_sum() -> None:
    _, rings = pair("gloo", SHORT)
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="Timed out"):
        rings[0].receive(torch.empty(1, 4))
    assert SHORT / 2 < time.monotonic() - began < SHORT + LATE


def test_ranks_that_disagree_on_a_message_find_it() -> None:
    _, rings = pair("shared", TIMEOUT)
    rings[0].send(torch.ones(1, 4))
    with pytest.raises(CollectiveError, match=r"disagree on a message of \[1, 5\]"):
        rings[1].receive(torch.empty(1, 5))
    with pytest.raises(CollectiveError, match=r"disagree on a message of \[5, 4\]"):
        rings[1].send(torch.ones(5, 4))
    with pytest.raises(ValueError, match="numbers lie side by side"):
        rings[0].send(torch.ones(4, 4).T[:2])


def test_shared_memory_is_a_file_without_a_name(ranks: Callable[..., Ranks]) -> None:
    group = ranks("shared", 2, TIMEOUT, _nameless)
    assert [group.result(place) for place in range(2)] == ["done"] * 2


def on_threads(make: Callable[[int], Any], size: int) -> list[Any]:
    """Result or error of `make(place)`, called on a thread for each rank."""
    found: list[Any] = [None] * size

    def run(place: int) -> None:
        try:
            found[place] = make(place)
        except Exception as error:  # noqa: BLE001  # the test looks at it
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def pair(kind: str, timeout: float) -> tuple[list[Collective], list[Ring]]:
    """Two ranks of a group, and their rings with room for one message of 64 bytes."""
    store = HashStore()
    groups = on_threads(lambda place: MAKERS[kind](store, place, 2, timeout), 2)
    return groups, on_threads(lambda place: groups[place].ring(1 - place, 1 - place, 64, 1), 2)


@pytest.mark.parametrize("kind", MAKERS)
def test_an_abort_ends_a_wait_and_all_later_calls(kind: str) -> None:
    """The text of the error says that the wait didn't end by its timeout."""
    (waiting, other), _ = pair(kind, 2 * SHORT if kind == "gloo" else TIMEOUT)
    threading.Timer(0.2, (waiting if kind == "gloo" else other).abort).start()
    with pytest.raises(CollectiveError, match="aborted"):
        waiting.sum(torch.ones(4))
    with pytest.raises(CollectiveError, match="aborted"):
        waiting.gather(torch.ones(4))
    if kind == "shared":
        with pytest.raises(CollectiveError, match="aborted"):
            other.sum(torch.ones(4))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_rank_that_never_joins(kind: str, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(CollectiveError):
        MAKERS[kind](FileStore(str(tmp_path / "store"), 2), 1, 2, SHORT)
    assert time.monotonic() - began < SHORT + LATE


@pytest.mark.parametrize(
    "part", [torch.ones(4, dtype=torch.float64), torch.ones(4, 4).T[:2]], ids=["a type", "strides"]
)
def test_a_part_that_cant_be_summed_is_refused_before_others_wait(part: Tensor) -> None:
    groups, _ = pair("shared", TIMEOUT)
    with pytest.raises(ValueError, match="allowed: contiguous float32 or bfloat16"):
        groups[0].sum(part)


class Sums:
    """A rank whose team of threads runs a program of sums of `rows` rows, in rows' strides."""

    def __init__(self, store: HashStore, place: int, size: int, threads: int, count: int) -> None:
        self.group = SharedMemoryCollective.join(store, place, size, TIMEOUT, threads)
        kernels = library()
        self.team, self.rows = Team(kernels, threads), ctypes.c_int64()
        self.part, self.out = torch.zeros(count, 64, 1040), torch.zeros(count, 64, 1024)
        self.behind = torch.full((64,), torch.nan)
        """[rows] what a kernel behind the sums writes: squares of the last one's rows."""
        given = [self._args(self.part[step], self.out[step]) for step in range(count)]
        last = NormArgs(
            rows=ctypes.addressof(self.rows),
            input=self.out[-1].data_ptr(),
            input_stride=self.out.stride(1),
            out=self.behind.data_ptr(),
            out_stride=1,
            width=1000,
        )
        steps = *((ALL_REDUCE, args) for args in given), (SQUARES, last)
        self.program = Program(kernels, *steps, stop=self.group.failure)

    def _args(self, part: Tensor, out: Tensor) -> ReduceArgs:
        return ReduceArgs(
            rows=ctypes.addressof(self.rows),
            group=ctypes.addressof(self.group.group),
            part=part.data_ptr(),
            out=out.data_ptr(),
            part_stride=part.stride(0),
            out_stride=out.stride(0),
            width=1000,
            add=1,
        )

    def run(self, rows: int) -> None:
        self.rows.value = rows
        self.team.run(self.program)
        self.group.check()


@pytest.mark.parametrize("threads", [(1, 1), (2, 2), (3, 1, 2)])
def test_teams_add_sums_to_rows(threads: tuple[int, ...]) -> None:
    """Teams of different sizes share a sum on as many threads as the smallest one has."""
    size, store = len(threads), HashStore()
    sums = on_threads(lambda place: Sums(store, place, size, threads[place], 3), size)
    for rows in (1, 5, 64, 2):
        for each in sums:
            each.part[:, :, :1000].normal_()
            each.out.fill_(0.5)
        assert on_threads(lambda place, rows=rows: sums[place].run(rows), size) == [None] * size
        expected = 0.5 + summed([each.part[:, :rows, :1000] for each in sums])
        for each in sums:
            assert torch.equal(each.out[:, :rows, :1000], expected)
            torch.testing.assert_close(each.behind[:rows], expected[-1].square().sum(1))
            assert (each.out[:, rows:] == 0.5).all()
            assert (each.out[:, :, 1000:] == 0.5).all()


def test_a_program_ends_at_the_sum_that_was_aborted() -> None:
    store = HashStore()
    first, second = on_threads(lambda place: Sums(store, place, 2, 2, 2), 2)
    first.out.fill_(0.5)
    threading.Timer(0.2, second.group.abort).start()
    with pytest.raises(CollectiveError, match=r"aborted; .*haven't come to rank 0: 1"):
        first.run(4)
    assert (first.out == 0.5).all()
    assert first.behind.isnan().all()
    with pytest.raises(CollectiveError):
        first.run(4)


class NcclTwin:
    """A process group whose operations never end."""

    def __init__(self) -> None:
        self.aborts = 0

    def allreduce(self, tensors: list[Tensor]) -> Any:
        return self

    def wait(self) -> None:
        """On the stream."""

    def is_completed(self) -> bool:
        return False

    def abort(self) -> None:
        self.aborts += 1


def test_an_operation_of_nccl_that_doesnt_end_aborts_the_group() -> None:
    twin, group = NcclTwin(), NcclCollective.__new__(NcclCollective)
    group._watch(twin, 0, 2, 0.3)
    group.sum(torch.ones(4))
    group.check()
    began = time.monotonic()
    while not twin.aborts and time.monotonic() - began < LATE:
        time.sleep(0.01)
    assert time.monotonic() - began > 0.25
    with pytest.raises(CollectiveError, match=r"no exchange within 0\.3 s"):
        group.sum(torch.ones(4))
    group.abort()
    assert twin.aborts == 1


GLOO, SHARED = GlooCollective, SharedMemoryCollective


@pytest.mark.parametrize(
    ("degree", "hosts", "kernels", "types"),
    [
        pytest.param(Degree(2, 2), 1, False, (GLOO, GLOO), id="without native kernels"),
        pytest.param(Degree(2, 2), 2, True, (SHARED, GLOO), id="a stage on each host"),
        pytest.param(Degree(2, 2), 4, True, (GLOO, GLOO), id="a stage over two hosts"),
        pytest.param(Degree(2), 2, True, (GLOO, GLOO), id="one stage over two hosts"),
    ],
)
def test_ranks_share_memory_with_those_of_their_group_if_all_are_on_one_machine(
    degree: Degree, hosts: int, kernels: bool, types: tuple[type, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`types`: of the group of a rank's stage, and of that of all ranks."""
    if not kernels:
        monkeypatch.setattr("kvrelay.engine.ranks.meet.shared_memory_missing", lambda: "needs the native CPU kernels")
    elif library() is None:
        pytest.skip("there are no native kernels")
    first = Meeting.in_memory() if hosts == 1 else Meeting.of_hosts("127.0.0.1")

    def join(rank: int) -> Place:
        return meet(first if rank == 0 else Meeting.named(first.name, "127.0.0.1"), degree, rank, 1, hosts)

    with ThreadPoolExecutor(degree.ranks) as pool:
        met = list(pool.map(join, range(degree.ranks)))
        assert [(type(place.group), type(place.all)) for place in met] == [types] * degree.ranks
        assert {place.one_machine for place in met} == {hosts <= degree.pipeline}
        sums = pool.map(lambda place: place.group.sum(torch.tensor([10.0**place.rank])).item(), met)
        assert list(sums) == [11.0, 11.0, 1100.0, 1100.0][: degree.ranks]
    for place in met:
        place.abort()
    first.close()
