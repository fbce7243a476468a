"""The engine thread: commands run between steps, errors reach their caller, and it ends for good."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from kvrelay.engine.scheduling.progress import Progress
from kvrelay.worker.engine_thread import EngineThread
from support.processes import wait_until

pytestmark = pytest.mark.anyio
SECONDS = 30.0


class ScriptedEngine:
    """An engine with `work` steps to do; each reports the thread it ran on."""

    def __init__(self, work: int = 0, error: Exception | None = None) -> None:
        self.work = work
        self.error = error
        self.steps = 0
        self.scheduler = SimpleNamespace(preemptions=0)
        self.lock = threading.Lock()

    @property
    def has_work(self) -> bool:
        return self.work > 0

    def step(self) -> list[object]:
        if self.error is not None:
            raise self.error
        self.work -= 1
        self.steps += 1
        return [threading.current_thread()]


@pytest.fixture
def started() -> Iterator["Started"]:
    started = Started()
    yield started
    assert started.thread.stop(SECONDS)


class Started:
    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.steps: SimpleQueue[object] = SimpleQueue()
        self.failures: SimpleQueue[BaseException] = SimpleQueue()
        self.thread = EngineThread(self.engine, self.steps.put, self.failures.put)  # type: ignore[arg-type]  # scripted
        self.thread.start()

    def step_by(self, step: Callable[[], list[object]]) -> None:
        """Gives the engine work, which `step` does."""

        def give_work() -> None:
            self.engine.step, self.engine.work = step, 1  # type: ignore[method-assign]

        self.thread.post(give_work)


def test_an_idle_engine_steps_once_a_command_gives_it_work(started: Started) -> None:
    def give_work() -> None:
        started.engine.work = 3

    started.thread.post(give_work)
    reported = [started.steps.get(timeout=SECONDS)[0] for _ in range(3)]  # type: ignore[index]  # lists of one thread
    assert {thread.name for thread in reported} == {"engine"}


def test_an_idle_engine_keeps_nothing_of_its_last_step(started: Started) -> None:
    """A report has sequences, holds and hidden states on the device."""

    class Report:
        pass

    kept: list[weakref.ref[Report]] = []

    def step() -> list[object]:
        progress = Report()
        kept.append(weakref.ref(progress))
        started.engine.work, started.engine.steps = 0, 1
        return [progress]

    started.step_by(step)
    started.steps.get(timeout=SECONDS)
    wait_until(lambda: kept[0]() is None, "the report is gone")


def test_a_step_without_progress_is_reported_too(started: Started) -> None:
    """The step's sequences were all cancelled: their blocks are free now, which the worker's load must show."""

    def step() -> list[object]:
        started.engine.steps = 1
        return []

    started.step_by(step)
    assert started.steps.get(timeout=SECONDS) == []


def test_a_step_that_only_preempted_is_reported_and_tried_again(started: Started) -> None:
    """Room was made for an offer that may be gone: whoever waits for blocks asks again, and so does the thread."""
    attempts = 0

    def step() -> list[object]:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            started.engine.scheduler.preemptions += 1
            return []
        started.engine.work = 0
        started.engine.steps += 1
        return ["computed"]

    started.step_by(step)
    assert started.steps.get(timeout=SECONDS) == []
    assert started.steps.get(timeout=SECONDS) == ["computed"]


def test_an_engine_that_can_compute_nothing_reports_nothing() -> None:
    """The engine's sequences all wait for blocks. Whoever asks for blocks after each report would ask for ever."""
    engine, reports, stepped = ScriptedEngine(work=1), list[object](), threading.Event()

    def step() -> list[object]:
        stepped.set()
        return []

    engine.step = step  # type: ignore[method-assign]

    def ask_again(progress: object) -> None:
        reports.append(progress)
        thread.post(lambda: None)

    thread = EngineThread(engine, ask_again, lambda error: None)  # type: ignore[arg-type]  # scripted
    thread.start()
    thread.post(lambda: None)
    assert stepped.wait(SECONDS)
    assert thread.stop(SECONDS)
    assert len(reports) == 0


def test_a_pause_once_makes_no_step_a_slow_one(monkeypatch: pytest.MonkeyPatch, started: "Started") -> None:
    now, slow, durations = 0.0, list[float](), [0.1, 0.1, 9.0, 0.2, 0.1, 5.0]
    monkeypatch.setattr("kvrelay.worker.engine_thread.time.monotonic", lambda: now)
    over = threading.Event()

    def step() -> list[object]:
        nonlocal now
        slow.append(started.thread.slow_step)
        started.engine.steps += 1
        if durations:
            now += durations.pop(0)
        else:
            started.engine.work = 0
            over.set()
        return [None]

    started.step_by(step)
    assert over.wait(SECONDS)
    assert slow[1:] == pytest.approx([0.0, 0.1, 0.1, 0.2, 0.2, 5.0], rel=0.01)


def test_looks_at_requests_that_lack_blocks_are_no_steps(monkeypatch: pytest.MonkeyPatch, started: "Started") -> None:
    """Else a worker whose requests wait for long would forget how slow its steps are, and be taken for frozen."""
    monkeypatch.setattr("kvrelay.worker.engine_thread.SLOW_DECAY", 0.5)
    monkeypatch.setattr("kvrelay.worker.engine_thread.STALL_SECONDS", 1e-3)
    looks, over = list[float](), threading.Event()

    def step() -> list[object]:
        if started.engine.steps < 3:
            started.engine.steps += 1
            return [None]
        looks.append(started.thread.slow_step)
        if len(looks) == 5:
            started.engine.work = 0
            over.set()
        return []

    started.step_by(step)
    assert over.wait(SECONDS)
    assert looks[0] > 0
    assert looks == [looks[0]] * 5


async def test_a_call_returns_and_raises_to_its_caller_only(started: Started) -> None:
    def fail() -> None:
        raise KeyError("the caller's mistake")

    assert await started.thread.call(threading.current_thread) is not threading.current_thread()
    with pytest.raises(KeyError, match="the caller's mistake"):
        await started.thread.call(fail)
    assert await started.thread.call(lambda: 42) == 42
    assert started.failures.empty()


async def test_a_caller_may_give_up(started: Started) -> None:
    release = threading.Event()

    abandoned = asyncio.create_task(started.thread.call(lambda: release.wait(SECONDS)))
    await asyncio.sleep(0)
    abandoned.cancel()
    release.set()
    assert await started.thread.call(lambda: "next") == "next"


def test_a_failing_step_ends_the_thread_and_is_reported_once() -> None:
    failures: SimpleQueue[BaseException] = SimpleQueue()
    steps: SimpleQueue[list[Progress]] = SimpleQueue()
    engine = ScriptedEngine(work=1, error=MemoryError("no more"))
    thread = EngineThread(engine, steps.put, failures.put)  # type: ignore[arg-type]  # scripted
    thread.start()
    thread.post(lambda: None)
    assert isinstance(failures.get(timeout=SECONDS), MemoryError)
    assert thread.stop(SECONDS)
    assert failures.empty()
    assert steps.empty()
