"""Compiles constraints with llguidance (https://github.com/guidance-ai/llguidance), an optional dependency, and follows
completions, in processes of their own (`lanes.py`).

    push       the engine's thread: a job takes the token and computes the next mask while the engine's step runs
    mask       that thread, when the step's logits are there: waits for a moment, then the row comes again later
    budget     CPU time of a request's masks; a request that exceeds it ends
"""

import asyncio
import importlib.util
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.constrain.grammar import (
    STEP_WAIT_SECONDS,
    Constraint,
    ConstraintError,
    MaskNotReadyError,
)
from kvrelay.engine.constrain.lanes import COMPILE_SECONDS, Lane, Lanes, ProcessOptions, unusable
from kvrelay.machine.forks import Message, TemplateError

MAX_GRAMMARS = 64
"""Constraints whose outcome is kept. Their compiled forms are bounded by bytes, in the lanes."""
SLOW_COMPILE_SECONDS = 0.05
"""A constraint that took longer to compile is compiled in the slow lane only."""
TOKEN_SECONDS = 0.005
"""Seconds of CPU time that each token of a completion adds to the budget of its masks."""
LEAST_SECONDS = 0.05
"""Smallest CPU time for a job, in seconds."""
DISTRUST = 32
"""Number of tokens after a late mask for which a row is planned only once its mask is there."""
COSTLY_SECONDS, COSTLY_TOKEN_SECONDS = 0.01, 0.0005
"""CPU seconds of the masks of one completion, and for each of its masks, beyond which its constraint is costly. Usual
masks take less than a tenth of that."""
MAX_MESSAGE_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class ConstraintLimits:
    """Limits of the constraints of a worker."""

    seconds: float = 2.0
    """Seconds of CPU time for the masks of one request, beside TOKEN_SECONDS a token."""
    most_bytes: int = 256 * 2**20
    """Bytes of all compiled constraints and of the matchers that follow them."""


DEFAULT_LIMITS = ConstraintLimits()


class ConstraintCompiler:
    """The compiled constraints of one model. `compile` belongs to an event loop."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: ConstraintLimits = DEFAULT_LIMITS,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """Reads nothing yet.

        Args:
            folder: has the model's `tokenizer.json`.
            vocab_size: of the model, which may have more ids than the tokenizer.
            eos_token_ids: one of these ends a text that may end.
            on_ready: called on another thread when a mask is there whose row was left out of a step.
        """
        self._limits = limits
        tokenizer = str(folder / "tokenizer.json")
        # The fast and the slow lane share the memory.
        self.lanes = Lanes(ProcessOptions(tokenizer, vocab_size, list(eos_token_ids), limits.most_bytes // 2))
        self._following = _Following(self.lanes, limits, on_ready or (lambda: None))
        self._grammars: OrderedDict[Constraint, asyncio.Future[LlGrammar]] = OrderedDict()
        self._starting: asyncio.Future[None] | None = None

    async def compile(self, constraint: Constraint) -> "LlGrammar":
        """The compiled form of `constraint`, from the cache if it is there.

        Raises:
            ConstraintError: it is malformed, uses what isn't supported, or is too large; or the library isn't there.
        """
        loop = asyncio.get_running_loop()
        starting = self._starting
        if starting is None or starting.done():
            starting = self._starting = loop.run_in_executor(None, self._start)
            starting.add_done_callback(_retrieve)
        # A shared future: a request that is cancelled must not cancel it. Another request may have begun the next one
        # before this one goes on.
        await asyncio.wait((starting,))
        starting.result()
        future = self._grammars.get(constraint)
        if future is None:
            future = loop.create_future()
            # After a time-out, nobody waits for it.
            future.add_done_callback(_retrieve)
            job = _Compilation(constraint, self, loop, future)
            with self.lanes.lock:
                self.lanes.compile.submit(lambda: job, job.used)
            self._grammars[constraint] = future
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(constraint)
        done, _ = await asyncio.wait((future,), timeout=COMPILE_SECONDS)
        if not done:
            raise ConstraintError(f"the constraint takes more than {COMPILE_SECONDS:g} s to compile; make it simpler")
        return future.result()

    def close(self) -> None:
        """Ends threads and processes."""
        self.lanes.close()

    def _start(self) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise ConstraintError("a constraint needs llguidance on the workers: pip install 'kvrelay[structured]'")
        try:
            self.lanes.template.start()
        except TemplateError as error:
            raise unusable(error) from None
        except (OSError, EOFError) as error:
            raise ConstraintError(f"the process that compiles constraints can't be started: {error!r}") from error

    def compiled(self, constraint: Constraint, answer: Message) -> "LlGrammar":
        """The compiled constraint that a lane's answer describes. Raises ConstraintError."""
        if answer["error"]:
            raise ConstraintError(_message(f"the {constraint.kind} can't be compiled", answer["error"]))
        most = self._limits.most_bytes // 2
        if answer["bytes"] > most:
            text = f"the {constraint.kind} takes {answer['bytes']} bytes when it is compiled; allowed: {most}"
            raise ConstraintError(f"{text}, half of engine.constraint_bytes")
        return LlGrammar(constraint, self._following, costly=answer["seconds"] > SLOW_COMPILE_SECONDS)

    def forget(self, constraint: Constraint, future: "asyncio.Future[LlGrammar]") -> None:
        """Forgets a constraint's outcome, which may be another one the next time."""
        if self._grammars.get(constraint) is future:
            del self._grammars[constraint]


class _Compilation:
    """Implements `Job`."""

    def __init__(
        self,
        constraint: Constraint,
        compiler: ConstraintCompiler,
        loop: asyncio.AbstractEventLoop,
        future: "asyncio.Future[LlGrammar]",
    ) -> None:
        self.used: float = float(len(constraint.text))
        self._constraint = constraint
        self._compiler = compiler
        self._loop = loop
        self._future = future

    def message(self, *, whole: bool) -> tuple[Message, float]:
        """See `Job.message`."""
        return {"op": "compile", "kind": self._constraint.kind, "text": self._constraint.text}, COMPILE_SECONDS

    def answered(self, answer: Message, body: bytes) -> None:
        """See `Job.answered`."""
        try:
            grammar = self._compiler.compiled(self._constraint, answer)
        except ConstraintError as error:
            self._post(self._future.set_exception, error)
        else:
            self._post(self._future.set_result, grammar)

    def failed(self, why: str, *, timed_out: bool = False) -> None:
        """See `Job.failed`."""
        why = f"it takes more than {COMPILE_SECONDS:g} s; make it simpler" if timed_out else why
        error = ConstraintError(f"the {self._constraint.kind} can't be compiled: {why}")
        self._post(self._future.set_exception, error)
        if not timed_out:
            self._post(self._compiler.forget, self._constraint, self._future)

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)


class _Following:
    """State that all matchers of a worker share."""

    def __init__(self, lanes: Lanes, limits: ConstraintLimits, on_ready: Callable[[], None]) -> None:
        self.lanes = lanes
        self.limits = limits
        self.on_ready = on_ready
        self.numbers = itertools.count()


class LlGrammar:
    """Implements `Grammar`. Its compiled form is in the lanes."""

    def __init__(self, constraint: Constraint, following: _Following, *, costly: bool) -> None:
        self.constraint = constraint
        self.following = following
        self.costly = costly
        """Whether its masks take much CPU time. They are made in the slow lane, beside all else of the machine, and no
        step waits for one."""

    def matcher(self, tokens: Sequence[int]) -> "LlMatcher":
        """See `Grammar.matcher`."""
        return LlMatcher(self, tokens)


class LlMatcher:
    """Implements `Matcher`, and `Job`. A lane has the library's matcher."""

    def __init__(self, grammar: LlGrammar, tokens: Sequence[int], parent: "LlMatcher | None" = None) -> None:
        """
        Args:
            parent: has taken all of `tokens` but the last, and its mask is there.
        """
        self.used: float = 0.0 if parent is None else parent.used
        """Seconds of CPU time that its masks took."""
        self.made: int = 0 if parent is None else parent.made
        """Number of these masks."""
        self._grammar = grammar
        self._constraint = grammar.constraint
        self._following = following = grammar.following
        lanes = following.lanes
        self._lane: Lane = lanes.slow if grammar.costly else lanes.fast
        self._tokens = list(tokens)
        self.number = next(following.numbers)
        self._parent = -1 if parent is None else parent.number
        self._known = 0 if parent is None else len(tokens) - 1
        """Tokens that the lane's matcher has followed."""
        self._sent = 0
        """Tokens that the lane's matcher will have taken when its job is done."""
        self._seen: list[Lane] = []
        """Lanes that may have this matcher."""
        self._queued = False
        self._mask: NDArray[np.int32] | None = None
        self._error: ConstraintError | None = None
        self.trusted_from: int = 0 if parent is None else parent.trusted_from
        self._awaited = False
        weakref.finalize(self, _drop, self.number, self._seen).atexit = False
        with following.lanes.lock:
            self._submit()

    def push(self, token: int) -> None:
        """See `Matcher.push`. After a step that kept guesses several come, and nobody reads the masks between them."""
        with self._following.lanes.lock:
            self._tokens.append(token)
            self._mask = None
            self._submit()

    def ready(self, *, surely: bool = False) -> bool:
        """See `Matcher.ready`."""
        with self._following.lanes.lock:
            if self._done or (self._trusted and not surely):
                return True
            if self._trusted and self._wait(STEP_WAIT_SECONDS):
                return True
            self._awaited = True
            return False

    def mask(self, seconds: float = STEP_WAIT_SECONDS) -> NDArray[np.int32]:
        """See `Matcher.mask`."""
        with self._following.lanes.lock:
            if not self._wait(seconds):
                raise MaskNotReadyError
            if self._error is not None:
                raise self._error
            if self._mask is None:
                raise RuntimeError(f"matcher {self.number} is done without a mask")
            return self._mask

    def after(self, token: int) -> "LlMatcher | None":
        """See `Matcher.after`."""
        with self._following.lanes.lock:
            if not self._done and not (self._trusted and self._wait(STEP_WAIT_SECONDS)):
                return None
            if self._mask is None or not int(self._mask[token // 32]) >> token % 32 & 1:
                return None
        return LlMatcher(self._grammar, [*self._tokens, token], self)

    # As a job. On the lane's thread.

    def message(self, *, whole: bool) -> tuple[Message, float]:
        """See `Job.message`."""
        with self._following.lanes.lock:
            known = 0 if whole else self._known
            self._sent = len(self._tokens)
            limit = max(LEAST_SECONDS, self._allowed - self.used)
            message: Message = {
                "op": "follow",
                "matcher": self.number,
                "parent": -1 if whole else self._parent,
                "at": known,
                "tokens": self._tokens[known:],
            }
            if self._lane not in self._seen:
                self._seen.append(self._lane)
        if known == 0:
            message |= {"kind": self._constraint.kind, "text": self._constraint.text}
            limit += COMPILE_SECONDS
        return message, limit

    def answered(self, answer: Message, body: bytes) -> None:
        """See `Job.answered`."""
        lanes = self._following.lanes
        with lanes.lock:
            self._queued = False
            again = self._known > 0 and self._parent < 0
            self.used += answer["seconds"] + (answer["made"] if again else 0.0)
            self.made += 1
            self._known, self._parent = self._sent, -1
            self._grammar.costly |= self.used > COSTLY_SECONDS + COSTLY_TOKEN_SECONDS * self.made
            if self._lane is lanes.fast and (answer["error"] or self._grammar.costly):
                lanes.fast.dropped.append(self.number)
                self._lane, self._known = lanes.slow, 0
                if answer["error"]:
                    # The work may only have been too much for this lane.
                    self._submit()
                    return
            if answer["error"]:
                what = "the completion so far doesn't obey the constraint"
                what = what if answer["disobeys"] else "the constraint became too costly to follow"
                self._error = ConstraintError(_message(what, answer["error"]))
            elif self.used > self._allowed:
                self._error = self._exceeded
            elif self._sent < len(self._tokens):
                self._submit()
                return
            else:
                self._mask = np.frombuffer(body, np.int32)
            self._finish()

    def failed(self, why: str, *, timed_out: bool = False) -> None:
        """See `Job.failed`."""
        with self._following.lanes.lock:
            self._queued = False
            self._error = self._exceeded if timed_out else ConstraintError(f"the constraint can't be followed: {why}")
            self._finish()

    @property
    def _allowed(self) -> float:
        """Seconds of CPU time that its masks may take."""
        return self._following.limits.seconds + TOKEN_SECONDS * len(self._tokens)

    @property
    def _exceeded(self) -> ConstraintError:
        seconds = self._following.limits.seconds
        return ConstraintError(
            f"following the constraint takes more CPU time than {len(self._tokens)} tokens may have; allowed:"
            f" {seconds:g} s (engine.constraint_seconds) and {1000 * TOKEN_SECONDS:g} ms a token; make it simpler"
        )

    @property
    def _done(self) -> bool:
        return self._mask is not None or self._error is not None

    @property
    def _trusted(self) -> bool:
        """Whether its masks come in time."""
        return not self._grammar.costly and len(self._tokens) >= self.trusted_from

    def _wait(self, seconds: float) -> bool:
        """Whether the mask is there within `seconds`. With the lock."""
        if self._done or self._following.lanes.ready.wait_for(lambda: self._done, seconds):
            return True
        self.trusted_from = len(self._tokens) + DISTRUST
        return False

    def _submit(self) -> None:
        """With the lock."""
        if not self._queued and self._error is None:
            self._queued = True
            self._lane.submit(weakref.ref(self), self.used)

    def _finish(self) -> None:
        """With the lock."""
        self._following.lanes.ready.notify_all()
        if self._awaited:
            self._awaited = False
            self._following.on_ready()


def _drop(number: int, seen: list[Lane]) -> None:
    """Tells the lanes that a matcher is gone."""
    for lane in seen:
        lane.dropped.append(number)


def _retrieve(future: "asyncio.Future[None] | asyncio.Future[LlGrammar]") -> None:
    """Takes the future's exception, so that nothing is logged where nobody waits for it."""
    if not future.cancelled():
        future.exception()


def _message(what: str, why: str) -> str:
    """The first paragraph of the library's text: what follows it may be its whole state."""
    why = " ".join(why.partition("\n<state>")[0].split())
    return f"{what}: {why[:MAX_MESSAGE_CHARACTERS]}"
