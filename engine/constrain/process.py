"""The processes that run llguidance, which `lanes.py` starts as a script: nothing of kvrelay is imported here.

    worker --- control socket ---> template    has read the tokenizer; forks a lane for each socket that it is given
        \\----- lane's socket ----> lane        compiles and follows constraints, one job after the other

llguidance may end its process (a chain of 4,000 rules overflows the stack), hold the interpreter's lock for a second,
or compute for half a minute. Here it ends and holds only a lane, and the kernel ends a lane whose job takes more CPU
time than it may. A lane can be lost at any moment: a job that names a matcher which a lane doesn't have is told so, and
comes again with the constraint and all tokens.

Messages, both ways: a header of two uint32 (lengths), a JSON object, and bytes.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Message = dict[str, Any]
HEADER = struct.Struct("<II")
MEMORY_BEYOND = 512 * 2**20
"""Bytes that one job may take beyond what a lane keeps."""
WHITE_SPACE = r"( |\n {0,16})?"
"""White space that is allowed between the parts of JSON: none, one space, or a new line with an indentation. Without
this limit a model could go on with white space for ever."""
PR_SET_PDEATHSIG = 1


def send(connection: socket.socket, message: Message, body: bytes = b"") -> None:
    """Raises OSError if the other end is gone."""
    head = json.dumps(message).encode()
    connection.sendall(HEADER.pack(len(head), len(body)) + head + body)


def receive(connection: socket.socket) -> tuple[Message, bytes]:
    """Raises EOFError if the other end is gone, and OSError."""
    head, body = HEADER.unpack(_read(connection, HEADER.size))
    return json.loads(_read(connection, head)), _read(connection, body)


def _read(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        parts.append(part := connection.recv(min(count, 2**20)))
        if not part:
            raise EOFError
        count -= len(part)
    return b"".join(parts)


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
        """Does a job within `job["limit"]` seconds of CPU time; the kernel ends the process after them."""
        for matcher in job["drop"]:
            self._drop(matcher)
        # Nothing handles SIGPROF, so it ends the process in the middle of native code.
        signal.setitimer(signal.ITIMER_PROF, job["limit"])
        began = time.process_time()
        answer, mask = self._compile(job) if job["op"] == "compile" else self._follow(job)
        answer["seconds"] = time.process_time() - began - answer.setdefault("made", 0.0)
        signal.setitimer(signal.ITIMER_PROF, 0)
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
        with suppress(AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)


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
            texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(text)]
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


def serve(connection: socket.socket, tokenizer: "LLTokenizer", options: Message) -> None:
    """Runs a lane until the worker closes its socket."""
    os.nice(options["nice"])
    if sys.platform == "linux":
        import resource

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        most = psutil.Process().memory_info().data + options["most_bytes"] + MEMORY_BEYOND
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        # Where memory is short, a lane is lost rather than the worker.
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("800")
    lane = Lane(tokenizer, options["words"], options["limits"], options["most_bytes"])
    send(connection, {"pid": os.getpid()})
    with suppress(EOFError, OSError):
        while True:
            job, _ = receive(connection)
            try:
                answer, mask = lane.run(job)
            except ValueError as error:
                signal.setitimer(signal.ITIMER_PROF, 0)
                answer, mask = {"error": str(error), "seconds": 0.0, "made": 0.0, "bytes": 0, "held": 0}, b""
            send(connection, answer, mask)


def main(control: socket.socket, options: Message) -> None:
    """The template: reads the tokenizer, says whether it could, and forks lanes until the worker closes its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # lanes that end leave nothing behind
    from llguidance import LLTokenizer

    try:
        with open(options["tokenizer"]) as file:
            tokenizer = LLTokenizer(file.read(), n_vocab=options["vocab_size"], eos_token=options["eos_token_ids"])
    except (OSError, ValueError) as error:
        send(control, {"error": str(error)})
        return
    send(control, {"error": ""})
    gc.freeze()
    with suppress(OSError):
        while True:
            asked, descriptors, _, _ = socket.recv_fds(control, 2**16, 1)
            if not asked:
                return
            connection = socket.socket(fileno=descriptors[0])
            if os.fork() == 0:
                control.close()
                serve(connection, tokenizer, json.loads(asked))
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
