"""Compiles constraints with llguidance (https://github.com/guidance-ai/llguidance), an optional dependency.

    thread "compile"   the tokenizer, with the first constraint; then grammars, with limits on size and work; cached
    thread "mask"      a token is taken, the mask of the next one computed     while the engine's step runs

A grammar's lexer grows as it is used; requests with the same constraint share it.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.constrain.grammar import Constraint, ConstraintError, Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

COMPILE_SECONDS = 5.0
"""How long a request waits for its constraint, once the tokenizer has been read: several seconds for 128k tokens."""
MAX_GRAMMARS = 64
"""Compiled constraints that are kept."""
THREADS = 2
"""For compilation, and as many for masks."""
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
}
"""Of one grammar, as `llguidance.LLParserLimits` has them: about 20 ms of work before the first mask and for each one,
and 40 MB of memory."""
WHITE_SPACE = r"( |\n {0,16})?"
"""Between the parts of JSON: none, one space, or a new line with an indentation. A model could go on with more for
ever."""
MAX_MESSAGE_CHARACTERS = 300


class ConstraintCompiler:
    """The compiled constraints of one model. `compile` belongs to an event loop."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Reads nothing yet.

        Args:
            folder: has the model's `tokenizer.json`.
            vocab_size: of the model, which may have more ids than the tokenizer.
            eos_token_ids: one of these ends a text that may end.
        """
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compilers = ThreadPoolExecutor(THREADS, thread_name_prefix="compile")
        self._masks = ThreadPoolExecutor(THREADS, thread_name_prefix="mask")
        self._grammars: OrderedDict[Constraint, asyncio.Future[Grammar]] = OrderedDict()
        self._tokenizer: asyncio.Future[LLTokenizer] | None = None

    async def compile(self, constraint: Constraint) -> Grammar:
        """The compiled form of `constraint`, from the cache if it is there.

        Raises:
            ConstraintError: it is malformed, uses what isn't supported, or is too large; or the library isn't there.
        """
        if self._tokenizer is None:
            self._tokenizer = self._begin(self._read_tokenizer)
        # A shared future: a request that is cancelled must not cancel it.
        await asyncio.wait((self._tokenizer,))
        future = self._grammars.get(constraint)
        if future is None:
            future = self._begin(partial(self._compile, self._tokenizer.result(), constraint))
            self._grammars[constraint] = future
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(constraint)
        done, _ = await asyncio.wait((future,), timeout=COMPILE_SECONDS)
        if not done:
            raise ConstraintError(f"the constraint takes more than {COMPILE_SECONDS:g} s to compile; make it simpler")
        return future.result()

    def close(self) -> None:
        """Ends the threads once they have nothing left to do."""
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)

    def _begin(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        future = asyncio.get_running_loop().run_in_executor(self._compilers, work)
        # Whoever waits gets the exception; after a time-out that is nobody.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        return future

    def _read_tokenizer(self) -> "LLTokenizer":
        try:
            from llguidance import LLTokenizer
        except ImportError:
            message = "a constraint needs llguidance on the workers: pip install 'kvrelay[structured]'"
            raise ConstraintError(message) from None
        path = self._folder / "tokenizer.json"
        try:
            return LLTokenizer(path.read_text(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except (OSError, ValueError) as error:
            raise ConstraintError(f"constraints can't be obeyed by this model: {path.name}: {error}") from error

    def _compile(self, tokenizer: "LLTokenizer", constraint: Constraint) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, **LIMITS)
        try:
            matcher = LLMatcher(tokenizer, _grammar_text(constraint), limits=limits, log_level=0)
        except ValueError as error:
            raise ConstraintError(_message(f"the {constraint.kind} can't be compiled", str(error))) from None
        # The first mask shows whether the grammar is too large to be followed at all.
        mask = matcher.deep_copy()
        mask.compute_bitmask()
        for one in (matcher, mask):
            if one.is_error():
                raise ConstraintError(_message(f"the {constraint.kind} can't be compiled", one.get_error()))
        return LlGrammar(matcher, -(-self._vocab_size // 32), self._masks)


class LlGrammar:
    """Implements `Grammar`."""

    def __init__(self, matcher: "LLMatcher", words: int, threads: ThreadPoolExecutor) -> None:
        """
        Args:
            matcher: at the beginning; copies of it follow the requests.
            words: of a mask.
            threads: that compute masks.
        """
        self._matcher = matcher
        self._words = words
        self._threads = threads

    def matcher(self, tokens: Sequence[int]) -> "LlMatcher":
        """See `Grammar.matcher`."""
        return LlMatcher(self._matcher.deep_copy(), self._words, self._threads, list(tokens))


class LlMatcher:
    """Implements `Matcher`. At most one thread at a time works with the library's matcher."""

    def __init__(self, matcher: "LLMatcher", words: int, threads: ThreadPoolExecutor, tokens: list[int]) -> None:
        self._matcher = matcher
        self._words = words
        self._threads = threads
        self._tokens = tokens
        """Those that `_mask` takes first."""
        self._mask = self._begin(tokens)

    def push(self, token: int) -> None:
        """See `Matcher.push`. After a step that kept guesses several come, and nobody reads the masks between them."""
        if self._mask.cancel():
            self._tokens = [*self._tokens, token]
        else:
            wait([self._mask])
            self._tokens = [token]
        self._mask = self._begin(self._tokens)

    def mask(self) -> NDArray[np.int32]:
        """See `Matcher.mask`."""
        return self._mask.result()

    def after(self, token: int) -> "LlMatcher | None":
        """See `Matcher.after`."""
        try:
            allowed = int(self.mask()[token // 32]) >> token % 32 & 1
        except ConstraintError:
            return None
        # Once its mask is there, no thread works with the library's matcher.
        return LlMatcher(self._matcher.deep_copy(), self._words, self._threads, [token]) if allowed else None

    def _begin(self, tokens: list[int]) -> "Future[NDArray[np.int32]]":
        return self._threads.submit(self._next, tokens)

    def _next(self, tokens: list[int]) -> NDArray[np.int32]:
        if tokens and not self._matcher.consume_tokens(tokens):
            raise ConstraintError(_message("the completion so far doesn't obey the constraint", self._error))
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]
        if self._matcher.is_error():
            raise ConstraintError(_message("the constraint became too costly to follow", self._error))
        return mask

    @property
    def _error(self) -> str:
        return self._matcher.get_error()


def _grammar_text(constraint: Constraint) -> str:
    """The library's form of a constraint. Raises ValueError."""
    from llguidance import LLMatcher

    json_options: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE}
    match constraint.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(constraint.text, overrides=json_options)
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=json_options)
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "choice":
            texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(constraint.text)]
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
        case "grammar":
            return LLMatcher.grammar_from_lark(constraint.text)


def _message(what: str, why: str) -> str:
    """The first paragraph of the library's text: what follows it may be its whole state."""
    why = " ".join(why.partition("\n<state>")[0].split())
    return f"{what}: {why[:MAX_MESSAGE_CHARACTERS]}"
