"""Links over NIXL (UCX: RDMA where there is such a network, else TCP or shared memory); the extra `kvrelay[nixl]`.

NIXL writes into the other process's registered memory, one-sided, and carries short notifications beside that. A link's
two-sided sends are made of both:

    receiver   "room" (frame n, where its buffer lies)  ->  sender
    sender     the bytes, written there; with them, "came" (frame n)  ->  receiver

What is known of NIXL, and kept to here: an agent makes progress only while it is asked something (its own progress
thread takes half a core or more while idle, so there is none), and the thread that waits asks; nothing of it ever
reports a frozen peer, and not always a dead one, so every wait has a deadline of its own; agents of one link each are
cheap (30 ms) and leave nothing behind, which a shared one, with the half-done transfers of lost peers in it, would.
"""

import importlib
import importlib.util
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from kvrelay.transfer.packing import Number, Raw, Rule, WireError, pack, unpack
from kvrelay.transfer.transports.base import Link, LinkError, Rendezvous

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.00005
MAX_CONTROL_BYTES = 2**31
_MAX_METADATA_BYTES = 4096
_BACKEND = "UCX"

_FRAME = Number(1, 2**48)
_NOTES: dict[str, tuple[Rule, ...]] = {
    "room": (_FRAME, Number(0, 2**64 - 1), Number(1, MAX_CONTROL_BYTES), Number(0, 2**16), Raw(0, _MAX_METADATA_BYTES)),
    "came": (_FRAME,),
    "hello": (),
    "bye": (),
}
"""Notifications: name and rules of their values. room: frame, address, bytes, device, and the buffer's registration
when it is first named."""


def nixl_missing() -> str | None:
    """Why this process can't make NIXL links; None if it can."""
    try:
        _api()
    except ImportError as error:
        return str(error)
    return None


@cache
def _api() -> Any:
    """The library's module.

    Raises:
        ImportError: it is not installed, or can't be loaded.
    """
    # Read when the library is loaded; by default it logs every agent that is made.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    # The first chooses among the builds for one CUDA each; one of those alone does where there is no GPU.
    for package in ("nixl", "nixl_cu13", "nixl_cu12"):
        if importlib.util.find_spec(package) is not None:
            return importlib.import_module(f"{package}._api")
    raise ImportError("not installed; the extra kvrelay[nixl] has it")


class NixlTransport:
    """Makes NIXL links, between buffers on `device`."""

    name = "nixl"
    scope = ""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """
        Raises:
            ValueError: NIXL isn't there.
        """
        missing = nixl_missing()
        if missing is not None:
            raise ValueError(f"transfer.transport is 'nixl', which this worker can't do: {missing}")
        self._device = torch.device(device)

    def connect(self, meeting: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`. The ends give each other their agents' addresses."""
        link: NixlLink | None = None
        try:
            api = _api()
            agent = api.nixl_agent(
                uuid.uuid4().hex, api.nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            )
            metadata = agent.get_agent_metadata()
            if len(metadata) > _MAX_METADATA_BYTES:
                raise LinkError(
                    f"nixl: an agent's address takes {len(metadata)} bytes; {_MAX_METADATA_BYTES} can be told"
                )
            meeting.set(f"agent {rank}", metadata)
            peer = _text(agent.add_remote_agent(meeting.get(f"agent {1 - rank}")))
            link = NixlLink(agent, peer, self._device)
            # The first word opens the connection. Both ends wait for it: neither makes progress while it does not ask.
            link.greet(timeout)
        except Exception as error:
            if link is not None:
                link.close()
            if isinstance(error, LinkError):
                raise
            # The library's errors are of classes of its own, without a common one.
            raise LinkError(f"nixl: {type(error).__name__}: {error}") from error
        return link


class NixlLink:
    """One end of a NIXL link. All but `abort` is called by one thread, which the agent relies on."""

    stream = None

    def __init__(self, agent: Any, peer: str, device: torch.device) -> None:
        self._agent = agent
        self._peer = peer
        self._device = device
        self._registered: dict[int, tuple[torch.Tensor, Any]] = {}
        """By address: buffers, and what NIXL knows them by."""
        self._named: set[int] = set()
        """Addresses of buffers that the other end knows."""
        self._rooms: dict[int, tuple[int, int, int]] = {}
        """By frame, where the other end wants it: address, bytes, device."""
        self._sending: deque[NixlSend] = deque()
        """In order; the first ones may be on their way."""
        self._came: set[int] = set()
        """Frames that are here. Notifications of two writes may change places on the way."""
        self._sent = self._received = 0
        self._greeted = False
        self._ended = ""

    def greet(self, timeout: float) -> None:
        """Opens the connection, and returns when the other end has; neither gets on while it does not ask."""
        self._tell("hello")
        self.wait_for(lambda: self._greeted, timeout)

    def buffer(self, nbytes: int) -> torch.Tensor:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._registered[tensor.data_ptr()] = tensor, self._call("register_memory", tensor)
        return tensor

    def send(self, data: torch.Tensor) -> "NixlSend":
        if data.untyped_storage().data_ptr() not in self._registered:
            raise LinkError("nixl: only what lies in a buffer of this link can be sent")
        if self._device.type == "cuda":
            # The network card reads what lies there, not what this thread has only begun to write.
            torch.cuda.current_stream(self._device).synchronize()
        self._sent += 1
        pending = NixlSend(self, self._sent, data)
        self._sending.append(pending)
        self._poll()
        return pending

    def recv(self, into: torch.Tensor) -> "NixlReceive":
        address = into.untyped_storage().data_ptr()
        if address not in self._registered:
            raise LinkError("nixl: only a buffer of this link can be received into")
        metadata = b""
        if address not in self._named:
            metadata = self._call("get_partial_agent_metadata", self._registered[address][1], False, [_BACKEND])
            self._named.add(address)
        self._received += 1
        self._tell("room", self._received, into.data_ptr(), into.numel(), max(0, into.get_device()), metadata)
        return NixlReceive(self, self._received)

    def abort(self) -> None:
        """The link's thread sees it at its next poll, and tells the other end when it closes."""
        self._ended = self._ended or "the link is closed"

    def close(self) -> None:
        self.abort()
        agent, self._agent = self._agent, None
        if agent is None:
            return
        steps: list[Callable[[], object]] = [lambda: agent.send_notif(self._peer, pack(["bye"]))]
        steps += [send.release for send in self._sending]
        steps += [partial(agent.deregister_memory, registration) for _, registration in self._registered.values()]
        steps += [lambda: agent.remove_remote_agent(self._peer)]
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001  # the library's errors have no class in common
                logger.debug("nixl: closing a link", extra={"reason": f"{type(error).__name__}: {error}"})
        self._sending.clear()
        self._registered.clear()

    def wait_for(self, condition: Callable[[], bool], timeout: float) -> None:
        """Polls until `condition()` is true.

        Raises:
            LinkError: the link has ended, or it took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        self._poll()
        while not condition():
            if time.monotonic() > deadline:
                raise LinkError(f"nixl: no end within {timeout} s")
            time.sleep(POLL_SECONDS)
            self._poll()

    def has_come(self, number: int) -> bool:
        """Whether frame `number` has been received."""
        return number in self._came

    def _call(self, what: str, *arguments: Any) -> Any:
        if self._ended or self._agent is None:
            raise LinkError(f"nixl: {self._ended}")
        try:
            return getattr(self._agent, what)(*arguments)
        except Exception as error:
            raise LinkError(f"nixl: {what}: {type(error).__name__}: {error}") from error

    def _tell(self, *note: object) -> None:
        self._call("send_notif", self._peer, pack(list(note)))

    def _poll(self) -> None:
        """Takes in what has come, and gets on with what is to be sent."""
        for note in self._call("get_new_notifs").get(self._peer, ()):
            self._take(*_read(note))
        for send in self._sending:
            if send.handle is None:
                room = self._rooms.pop(send.number, None)
                if room is None:
                    break
                self._write(send, *room)
            elif not send.done:
                state = self._call("check_xfer_state", send.handle)
                if state == "ERR":
                    raise LinkError("nixl: a write failed; the other end is gone, or can't be reached")
                send.done = state == "DONE"
        while self._sending and self._sending[0].done:
            self._sending.popleft().release()

    def _write(self, send: "NixlSend", address: int, nbytes: int, device: int) -> None:
        """Begins to write a frame to where it is wanted."""
        if nbytes != send.data.numel():
            raise LinkError(f"nixl: frame {send.number} has {send.data.numel()} bytes; {nbytes} were expected")
        kind = "DRAM" if self._device.type == "cpu" else "VRAM"
        here = self._call("get_xfer_descs", [(send.data.data_ptr(), nbytes, max(0, send.data.get_device()))], kind)
        there = self._call("get_xfer_descs", [(address, nbytes, device)], kind)
        note = pack(["came", send.number])
        send.handle = self._call("initialize_xfer", "WRITE", here, there, self._peer, note, [_BACKEND])
        if self._call("transfer", send.handle) == "ERR":
            raise LinkError("nixl: a write failed; the other end is gone, or can't be reached")

    def _take(self, name: str, values: tuple[Any, ...]) -> None:
        match name:
            case "hello":
                self._greeted = True
            case "room":
                number, address, nbytes, device, metadata = values
                if metadata and _text(self._call("add_remote_agent", metadata)) != self._peer:
                    raise LinkError("nixl: a buffer of another agent was named")
                self._rooms[number] = address, nbytes, device
            case "came":
                if values[0] in self._came or values[0] > self._received:
                    raise LinkError(f"nixl: frame {values[0]} came; {self._received} were asked for, one by one")
                self._came.add(values[0])
            case "bye":
                raise LinkError("nixl: the other end has closed")


class NixlSend:
    """A send that was begun."""

    def __init__(self, link: NixlLink, number: int, data: torch.Tensor) -> None:
        self._link = link
        self.number = number
        self.data = data
        self.handle: Any = None
        """Of the write, once there is room for it."""
        self.done = False

    def wait(self, timeout: float) -> None:
        self._link.wait_for(lambda: self.done, timeout)

    def release(self) -> None:
        """Frees what NIXL has of it; ends the write where it is still under way."""
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.release()


class NixlReceive:
    """A receive that was begun."""

    def __init__(self, link: NixlLink, number: int) -> None:
        self._link = link
        self._number = number

    def wait(self, timeout: float) -> None:
        self._link.wait_for(lambda: self._link.has_come(self._number), timeout)


def _text(name: str | bytes) -> str:
    """An agent's name; the library gives it in either form."""
    return name.decode() if isinstance(name, bytes) else name


def _read(note: bytes) -> tuple[str, tuple[Any, ...]]:
    """The name and the values of a notification.

    Raises:
        LinkError: it is not as `_NOTES` says.
    """
    try:
        items = unpack(note, 8)
        rules = _NOTES.get(items[0]) if type(items) is list and items and type(items[0]) is str else None
        if type(items) is not list or rules is None or len(items) != 1 + len(rules):
            raise WireError(f"a notification of {len(note)} bytes; allowed: {', '.join(_NOTES)} with their values")
        return items[0], tuple(rule.check(items[0], value) for rule, value in zip(rules, items[1:], strict=True))
    except WireError as error:
        raise LinkError(f"nixl: {error}") from error
