"""The worker's end of the processes that run the grammar library (`process.py`).

    lane      jobs                                     limits of a job
    compile   constraints, the shortest text first     CPU time
    fast      masks, the cheapest matcher first        work that takes some 10 ms, CPU time
    slow      masks whose limits were exceeded there,  CPU time
              and those of costly constraints

A thread for each lane gives it one job after the other. A lane that is lost is begun again, and what it had is made
again as it is needed.
"""

import heapq
import itertools
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from kvrelay.engine.constrain.grammar import ConstraintError
from kvrelay.machine.forks import FORK_SECONDS, Message, Template, TemplateError, receive, send

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 5.0
"""Limit in seconds of a request's wait for its constraint, once the tokenizer has been read (several seconds for 128k
tokens), and of the CPU time that its compilation may take."""
PROGRAM = "kvrelay.engine.constrain.process"
QUEUE_SECONDS = 20.0
"""Longest time in seconds that a mask waits for others."""
BUSY = 20.0
"""Factor by which a lane's answer may be later than its job's CPU time allows; then the lane is given up."""
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 10_000,
    "max_items_in_row": 500,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
}
"""Limits of the work in the fast lane, as `llguidance.LLParserLimits` has them: about 10 ms for a mask."""
WIDE_LIMITS = LIMITS | {
    "step_lexer_fuel": 10**9,
    "step_max_items": 10**9,
    "max_items_in_row": 10**6,
    "max_lexer_states": 10**6,
}
"""Limits of the work in the other lanes: a constraint that was compiled doesn't fail by size later; its time and memory
are limited instead."""


class Job(Protocol):
    """Next work of a lane for one matcher."""

    @property
    def used(self) -> float:
        """CPU seconds used so far; jobs with the least go first."""
        ...

    def message(self, *, whole: bool) -> tuple[Message, float]:
        """The message that gives the lane this job, and the CPU seconds that the job may take.

        Args:
            whole: the lane knows nothing of it.
        """
        ...

    def answered(self, answer: Message, body: bytes) -> None:
        """Takes the lane's answer."""
        ...

    def failed(self, why: str, *, timed_out: bool = False) -> None:
        """Ends the job without an answer: it took all of its CPU time, or `why` has the reason."""
        ...


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Facts about the model that the processes need."""

    tokenizer: str
    """Path of the model's `tokenizer.json`."""
    vocab_size: int
    eos_token_ids: list[int]
    most_bytes: int
    """Bytes of the compiled constraints and their matchers, in each lane."""

    @property
    def words(self) -> int:
        """Size of a mask, in uint32."""
        return -(-self.vocab_size // 32)


def unusable(error: TemplateError) -> ConstraintError:
    """The error of requests where the processes can't read the tokenizer."""
    return ConstraintError(f"constraints can't be obeyed by this model: tokenizer.json: {error}")


class Lane:
    """One process's jobs, and the thread that gives them to it. All lanes have one lock."""

    def __init__(self, name: str, template: Template, limits: dict[str, Any], nice: int, lock: threading.Lock) -> None:
        self.name = name
        self.held_bytes = 0
        """Memory in bytes of the process's constraints and matchers after its last job."""
        self.dropped: deque[int] = deque()
        """Matchers that the process should drop."""
        self._template, self._limits, self._nice = template, limits, nice
        self._work = threading.Condition(lock)
        self._jobs: list[tuple[float, int, float, Callable[[], Job | None]]] = []
        self._numbers = itertools.count()
        self._connection: socket.socket | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], Job | None], used: float) -> None:
        """Adds a job; the caller has the lock. `job` returns None if nobody waits for it any more."""
        heapq.heappush(self._jobs, (used, next(self._numbers), time.monotonic(), job))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"lane {self.name}", daemon=True)
            self._thread.start()
        self._work.notify()

    def close(self) -> None:
        """Ends the thread; the template ends the process."""
        with self._work:
            self._closed = True
            self._jobs.clear()
            self._work.notify()
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            job, waited = taken
            if waited > QUEUE_SECONDS:
                job.failed(f"the worker's other constraints take all of its time: no turn within {QUEUE_SECONDS:g} s")
            else:
                try:
                    self._do(job)
                except Exception as error:  # a defect fails this job, and not those behind it
                    logger.exception("a job of the lane %s failed", self.name)
                    job.failed(f"a defect, {type(error).__name__}")
            del job, taken

    def _take(self) -> tuple[Job, float] | None:
        """The next job, and how long it has waited; None if the lane is closed."""
        with self._work:
            while not self._closed:
                if not self._jobs:
                    self._work.wait()
                    continue
                _, _, since, find = heapq.heappop(self._jobs)
                if (job := find()) is not None:
                    return job, time.monotonic() - since
            return None

    def _do(self, job: Job) -> None:
        whole = last = False
        while True:
            message, limit = job.message(whole=whole)
            began = time.monotonic()
            try:
                answer, body = self._ask(message | {"limit": limit}, limit)
            except ConstraintError as error:
                job.failed(str(error))
                return
            except (OSError, EOFError):
                self._hang_up()
                timed_out = time.monotonic() - began > 0.9 * limit
                if self._closed or timed_out or last:
                    job.failed("its library ended; make it less deeply nested", timed_out=timed_out)
                    return
                # Perhaps it isn't this job that ended it.
                whole = last = True
                continue
            if not answer.get("unknown"):
                self.held_bytes = answer["held"]
                job.answered(answer, body)
                return
            whole = True

    def _ask(self, message: Message, limit: float) -> tuple[Message, bytes]:
        connection = self._connection
        if connection is None:
            self.dropped.clear()
            asked = {"limits": self._limits, "nice": self._nice}
            try:
                connection = self._connection = self._template.fork(asked)
            except TemplateError as error:
                raise unusable(error) from None
        connection.settimeout(FORK_SECONDS + BUSY * limit)
        drop = [self.dropped.popleft() for _ in range(len(self.dropped))]
        send(connection, message | {"drop": drop})
        return receive(connection)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection, self.held_bytes = None, 0


class Lanes:
    """All lanes of a worker."""

    def __init__(self, options: ProcessOptions) -> None:
        """Starts nothing yet."""
        self.lock = threading.Lock()
        self.ready = threading.Condition(self.lock)
        """Condition that is notified when a mask has come."""
        self.template = Template(PROGRAM, asdict(options) | {"words": options.words})
        self.compile = Lane("compile", self.template, WIDE_LIMITS, 5, self.lock)
        self.fast = Lane("fast", self.template, LIMITS, 0, self.lock)
        self.slow = Lane("slow", self.template, WIDE_LIMITS, 10, self.lock)

    def close(self) -> None:
        """Ends threads and processes."""
        for lane in (self.compile, self.fast, self.slow):
            lane.close()
        self.template.close()
