"""Processes of one thread, forked from a template that has read what all of them need. A fork begins in some
milliseconds, and may be lost at any moment: by a library that ends its process, or by the limits that the kernel keeps.

    owner --- control socket ---> template    forks a process for each message with a socket
        \\---- fork's socket ----> fork        does one job after the other: a message in, a message out

Messages, both ways: a header of two uint32 (lengths), a JSON object, and bytes.
"""

import ctypes
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import psutil

Message = dict[str, Any]
Work = Callable[[Message, bytes], tuple[Message, bytes]]
"""Does a job: takes its message and bytes, and returns the answer's message and bytes."""
HEADER = struct.Struct("<II")
START_SECONDS = 120.0
"""Longest time, in seconds, for a template to read what it needs."""
FORK_SECONDS = 10.0
"""Longest time, in seconds, for a fork to begin."""
READ_BYTES = 2**20
ASKED_BYTES = 2**16
"""Size limit in bytes of what `Template.fork` asks for."""
PR_SET_PDEATHSIG = 1


class TemplateError(Exception):
    """The program of a template can't begin; the text is its own."""


class Fork(NamedTuple):
    """A process that a template is to fork."""

    nice: int
    """Niceness, added to the template's."""
    more_bytes: int
    """Memory in bytes that it may take beyond the template's."""
    work: Work
    """Does a job within `message["limit"]` seconds of CPU time, after which the kernel ends the fork."""


def packed(message: Message, body: bytes = b"") -> bytes:
    """A message up to its body."""
    head = json.dumps(message).encode()
    return HEADER.pack(len(head), len(body)) + head


def send(connection: socket.socket, message: Message, body: bytes = b"") -> None:
    """Raises OSError if the other end is gone."""
    connection.sendall(packed(message, body))
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[Message, bytes]:
    """Raises EOFError if the other end is gone, and OSError."""
    head, body = HEADER.unpack(_read(connection, HEADER.size))
    return json.loads(_read(connection, head)), _read(connection, body)


def _read(connection: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    left = memoryview(data)
    while left:
        got = connection.recv_into(left[:READ_BYTES])
        if not got:
            raise EOFError
        left = left[got:]
    return bytes(data)


class Template:
    """The owner's end of a template. Thread-safe; its methods block."""

    def __init__(self, module: str, options: Message) -> None:
        """Starts nothing yet.

        Args:
            module: the program, run as `python -m MODULE DESCRIPTOR OPTIONS`, which calls `serve`.
            options: for the program, as JSON.
        """
        self._module, self._options = module, json.dumps(options)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def start(self) -> None:
        """Starts the template if it doesn't run.

        Raises:
            TemplateError: its program refuses to begin.
            OSError, EOFError: there is no process.
        """
        with self._lock:
            self._started()

    def fork(self, asked: Message | None = None) -> socket.socket:
        """A new fork's socket. Starts the template if it doesn't run.

        Args:
            asked: for the program, which makes the fork by it.

        Raises:
            as `start`.
        """
        asking = json.dumps(asked or {}).encode()
        with self._lock:
            try:
                return self._forked(asking)
            except (OSError, EOFError):
                self._end()  # it may have been killed at any moment
                return self._forked(asking)

    def end(self) -> None:
        """Ends the template, and its forks with it; the next fork starts it again."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """Ends the template, and its forks with it, for good."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # whoever waits for it has the lock
        self.end()

    def _forked(self, asking: bytes) -> socket.socket:
        control = self._started()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(control, [asking], [theirs.fileno()])
            ours.settimeout(FORK_SECONDS)
            receive(ours)
        except (OSError, EOFError):
            ours.close()
            raise
        return ours

    def _started(self) -> socket.socket:
        if self._closed:
            raise EOFError
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._end()
        self._control, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            # What comes from clients is computed there: it gets no secrets, and what it writes goes nowhere.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, str(number), self._options],
                env={name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")},
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._control.settimeout(START_SECONDS)
        try:
            answer, _ = receive(self._control)
        except (OSError, EOFError):
            self._end()
            raise
        if "refused" in answer:
            self._end()
            raise TemplateError(answer["refused"])
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


def refuse(control: socket.socket, why: str) -> None:
    """Tells the owner why the program can't begin, in place of `serve`."""
    send(control, {"refused": why})


def serve(control: socket.socket, begin: Callable[[Message], Fork]) -> None:
    """The template's main loop, once it has read what it needs: forks until the owner closes its end.

    Args:
        begin: the fork that `Template.fork` asked for; called in it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave nothing behind
    gc.collect()
    gc.freeze()
    with suppress(OSError):
        send(control, {})
        while True:
            asked, descriptors, _, _ = socket.recv_fds(control, ASKED_BYTES, 1)
            if not asked:
                return
            connection = socket.socket(fileno=descriptors[0])
            if os.fork() == 0:
                try:
                    control.close()
                    fork = begin(json.loads(asked))
                    _confine(fork)
                    _do_all(connection, fork.work)
                finally:
                    os._exit(0)
            connection.close()


def _do_all(connection: socket.socket, work: Work) -> None:
    send(connection, {})
    while True:
        message, body = receive(connection)
        # Nothing handles SIGPROF, so it ends the process in the middle of native code.
        signal.setitimer(signal.ITIMER_PROF, message["limit"])
        answer, data = work(message, body)
        end_limit()
        send(connection, answer, data)


def end_limit() -> None:
    """Lifts the limit of CPU time for the rest of the present job."""
    signal.setitimer(signal.ITIMER_PROF, 0)


def _confine(fork: Fork) -> None:
    os.nice(fork.nice)
    if sys.platform != "linux":
        return
    import resource

    end_with_parent()
    most = psutil.Process().memory_info().data + fork.more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    # Where memory is short, a fork is lost rather than its owner.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("800")


def end_with_parent() -> None:
    """Has the kernel kill this process when the thread that has started it ends. On Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def control_of(arguments: Sequence[str]) -> tuple[socket.socket, Message]:
    """The control socket and the options of a program that `Template` has started."""
    return socket.socket(fileno=int(arguments[0])), json.loads(arguments[1])
