"""The processes that run llguidance, which `lanes.py` starts. Nothing here imports torch.

python -m kvrelay.engine.constrain.process DESCRIPTOR OPTIONS     as `machine/forks.py` says

The template has read the tokenizer; each fork is a lane, which compiles and follows constraints, one job after the
other.

llguidance may end its process (a chain of 4,000 rules overflows the stack), hold the interpreter's lock for a second,
or compute for half a minute. Here it ends and holds only a lane, and the kernel ends a lane whose job takes more CPU
time than it may. A lane can be lost at any moment: a job that names a matcher which a lane doesn't have is told so, and
comes again with the constraint and all tokens.
"""

import ctypes
import gc
import json
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil

from kvrelay.machine.forks import Fork, Message, control_of, end_limit, refuse, serve
from kvrelay.machine.memory import return_free_memory

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MEMORY_BEYOND = 512 * 2**20
"""Bytes that one job may take beyond what a lane keeps."""
WHITE_SPACE = r"( |\n {0,16})?"
"""White space that is allowed between the parts of JSON: none, one space, or a new line with an indentation. Without
this limit a model could go on with white space for ever."""


class Entry:
    """A compiled constraint in a lane."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self.matcher = matcher
        """Matcher at the beginning of a completion. Copies of it follow the requests, and share its lexer, which grows
        as it is used."""
        self.size = 0
        """Size in bytes, with the matchers that follow the constraint."""
        self.followers: dict[int, Follower] = {}


class Follower:
    """A matcher in a lane."""

    def __init__(self, entry: Entry, matcher: "LLMatcher", count: int) -> None:
        self.entry = entry
        self.matcher = matcher
        self.count = count
        """Tokens that the matcher has taken."""


class Lane:
    """State of a lane, and its jobs."""

    def __init__(self, tokenizer: "LLTokenizer", words: int, limits: Message, most_bytes: int) -> None:
        """
        Args:
            words: uint32 of a mask.
            limits: as `llguidance.LLParserLimits` has them.
            most_bytes: of all constraints and matchers.
        """
        from llguidance import LLParserLimits

        self._tokenizer = tokenizer
        self._mask_bytes = 4 * words
        self._limits = LLParserLimits(verbose_errors=False, **limits)
        self._most_bytes = most_bytes
        self._used_bytes = memory_meter()
        self._entries: dict[tuple[str, str], Entry] = {}
        """Compiled constraints; the one used last comes last."""
        self._followers: dict[int, Follower] = {}

    def run(self, job: Message) -> tuple[Message, bytes]:
        """Does a job, and drops the matchers that nobody needs any more."""
        for matcher in job["drop"]:
            self._drop(matcher)
        began = time.process_time()
        answer, mask = self._compile(job) if job["op"] == "compile" else self._follow(job)
        answer["seconds"] = time.process_time() - began - answer.setdefault("made", 0.0)
        end_limit()
        self._make_room()
        answer["held"] = sum([entry.size for entry in self._entries.values()])
        return answer, mask

    def _compile(self, job: Message) -> tuple[Message, bytes]:
        """Tries a constraint, and its first mask; keeps nothing."""
        before = self._used_bytes()
        matcher = self._new(job["kind"], job["text"])
        if not matcher.is_error():
            matcher.compute_bitmask()
        return {"error": matcher.get_error(), "bytes": self._used_bytes() - before}, b""

    def _follow(self, job: Message) -> tuple[Message, bytes]:
        """Takes tokens, and computes the mask of the next one."""
        follower = self._followers.get(job["matcher"])
        if follower is not None and follower.count != job["at"]:
            self._drop(job["matcher"])
            follower = None
        began = time.process_time()
        if follower is None and (follower := self._begin(job)) is None:
            return {"unknown": True}, b""
        made = time.process_time() - began
        before, entry, matcher = self._used_bytes(), follower.entry, follower.matcher
        mask = b""
        if not job["tokens"] or matcher.consume_tokens(job["tokens"]):
            follower.count += len(job["tokens"])
            mask = bytes(matcher.compute_bitmask())[: self._mask_bytes]
        entry.size += self._used_bytes() - before
        error = matcher.get_error() if matcher.is_error() else ""
        return {"error": error, "disobeys": bool(error) and not mask, "made": made}, mask

    def _begin(self, job: Message) -> Follower | None:
        """The matcher that a job names: a copy of another one that has taken as many tokens, or from the beginning."""
        before = self._used_bytes()
        parent = self._followers.get(job["parent"])
        if parent is not None and parent.count == job["at"]:
            entry, count = parent.entry, parent.count
            matcher = parent.matcher.deep_copy()
        elif "text" in job:
            key = job["kind"], job["text"]
            found = self._entries.pop(key, None)
            entry = Entry(self._new(*key)) if found is None else found
            self._entries[key] = entry
            matcher, count = entry.matcher.deep_copy(), 0
        else:
            return None
        follower = self._followers[job["matcher"]] = entry.followers[job["matcher"]] = Follower(entry, matcher, count)
        entry.size += self._used_bytes() - before
        return follower

    def _new(self, kind: str, text: str) -> "LLMatcher":
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, grammar_text(kind, text), limits=self._limits, log_level=0)

    def _drop(self, number: int) -> None:
        follower = self._followers.pop(number, None)
        if follower is not None:
            before, entry = self._used_bytes(), follower.entry
            del entry.followers[number], follower
            entry.size += self._used_bytes() - before

    def _make_room(self) -> None:
        """Forgets constraints until the others fit: first those that nobody follows, then the largest. A matcher of a
        constraint that was forgotten is made again from its tokens when its next one comes.
        """
        sizes = {key: entry.size for key, entry in self._entries.items()}
        total = sum(sizes.values())
        if total <= self._most_bytes:
            return
        idle = [key for key, entry in self._entries.items() if not entry.followers]
        largest = sorted(self._entries.keys() - set(idle), key=sizes.__getitem__, reverse=True)
        for key in idle + largest:
            for number in list(self._entries[key].followers):
                del self._followers[number]
            del self._entries[key]
            total -= sizes[key]
            if total <= self._most_bytes:
                break
        gc.collect()
        return_free_memory()


def grammar_text(kind: str, text: str) -> str:
    """The library's form of a constraint. Raises ValueError."""
    from llguidance import LLMatcher

    json_options: Any = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE}
    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(text, overrides=json_options)
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=json_options)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            # Of all characters, the library's lexer takes this one only as an escape.
            texts = [json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f") for text in json.loads(text)]
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
        case _:
            return LLMatcher.grammar_from_lark(text)


def memory_meter() -> Callable[[], int]:
    """A function that says how many bytes this process has allocated: by GNU's C library in 3 microseconds, else from
    the pages that it has."""

    class Info(ctypes.Structure):
        _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]

    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        process = psutil.Process()
        return lambda: process.memory_info().rss
    mallinfo.restype = Info

    def used() -> int:
        info = mallinfo()
        return int(info.field7 + info.field4)  # in use, and mapped one by one

    return used


def main(control: socket.socket, options: Message) -> None:
    """The template: reads the tokenizer, says whether it could, and forks lanes."""
    from llguidance import LLTokenizer

    try:
        with open(options["tokenizer"]) as file:
            tokenizer = LLTokenizer(file.read(), n_vocab=options["vocab_size"], eos_token=options["eos_token_ids"])
    except (OSError, ValueError) as error:
        refuse(control, str(error))
        return

    def begin(asked: Message) -> Fork:
        lane = Lane(tokenizer, options["words"], asked["limits"], options["most_bytes"])

        def work(job: Message, _: bytes) -> tuple[Message, bytes]:
            try:
                return lane.run(job)
            except ValueError as error:
                return {"error": str(error), "seconds": 0.0, "made": 0.0, "bytes": 0, "held": 0}, b""

        return Fork(asked["nice"], options["most_bytes"] + MEMORY_BEYOND, work)

    serve(control, begin)


if __name__ == "__main__":
    main(*control_of(sys.argv[1:]))
