"""Links over NIXL (UCX: RDMA where the network has it, else TCP or shared memory); the extra `kvrelay[nixl]`.

NIXL writes one-sided into the other process's registered memory, and also carries short notifications. A two-sided send
consists of both:

    receiver   "target": frame n, where its buffer is              ->  sender
    sender     writes the bytes there; with them "came": frame n  ->  receiver

- An agent makes progress only inside calls. Its own progress thread would take half a core or more while idle, so it is
  off, and the thread that waits for a transfer polls.
- NIXL never reports a frozen peer, and not always a dead one, so every wait has a deadline of its own.
- Each link has an agent of its own: it takes 30 ms to make and leaves nothing behind. A shared agent would keep the
  unfinished transfers of lost peers.
"""

import importlib
import importlib.util
import logging
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from kvrelay.engine.kv.pool import wait_for_stream
from kvrelay.transfer.config import Encrypt
from kvrelay.transfer.protocol.packing import Number, Raw, Rule, WireError, pack, unpack_named
from kvrelay.transfer.transports.base import Lender, Link, LinkError, Pending, Rendezvous, link_errors, poll
from kvrelay.transfer.transports.link_key import LinkKey

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.00005
_MAX_FRAME_BYTES = 2**31
_MAX_METADATA_BYTES = 4096
_BACKEND = "UCX"

_TARGET = "target"
"""Name of the notification that says where the receiver wants a frame; in Python such a place is a target."""
_FRAME = Number(1, 2**48)
_NOTIFICATIONS: dict[str, tuple[Rule, ...]] = {
    _TARGET: (_FRAME, Number(0, 2**64 - 1), Number(1, _MAX_FRAME_BYTES), Number(0, 2**16), Raw(0, _MAX_METADATA_BYTES)),
    "came": (_FRAME,),
    "hello": (),
    "bye": (),
}
"""Rules of the values of each notification, by name. A target: frame, address, bytes, device, and the registration of
the buffer when the receiver first names it."""


def nixl_missing() -> str | None:
    """Why this process can't open NIXL links; None if it can."""
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
    # "nixl" chooses among the builds, one per CUDA version; without a GPU, a single build is enough.
    for package in ("nixl", "nixl_cu13", "nixl_cu12"):
        if importlib.util.find_spec(package) is not None:
            return importlib.import_module(f"{package}._api")
    raise ImportError("not installed; the extra kvrelay[nixl] has it")


class NixlTransport:
    """Opens NIXL links between buffers on `device`; see `nixl_missing`."""

    name = "nixl"
    scope = ""

    def __init__(self, device: str, encrypt: Encrypt = "none") -> None:
        self._device = torch.device(device)
        self._encrypt = encrypt

    def connect(self, rendezvous: Rendezvous, rank: int, timeout: float) -> Link:
        """See `Transport.connect`. The ends exchange the addresses of their agents."""
        # The library's errors have no class in common.
        with link_errors("nixl", Exception):
            mac_key = LinkKey.agree(rendezvous, rank).derive(b"frames") if self._encrypt == "integrity" else None
            config = _api().nixl_agent_config(enable_prog_thread=False, backends=[_BACKEND])
            agent = _api().nixl_agent(uuid.uuid4().hex, config)
            metadata = agent.get_agent_metadata()
            if len(metadata) > _MAX_METADATA_BYTES:
                raise LinkError(f"nixl: an agent's address has {len(metadata)} bytes; allowed: {_MAX_METADATA_BYTES}")
            rendezvous.set(f"agent {rank}", metadata)
            peer = _text(agent.add_remote_agent(rendezvous.get(f"agent {1 - rank}")))
            link = NixlLink(agent, peer, self._device, mac_key)
            try:
                link.greet(timeout)
            except BaseException:
                link.close()
                raise
            return link


@dataclass(eq=False, slots=True)
class NixlSend:
    """A send in progress."""

    number: int
    """Number of the frame."""
    parts: Sequence[torch.Tensor]
    handle: Any = None
    """Handle of the write, which begins when the receiver has named the frame's target."""
    done: bool = False


class NixlLink:
    """One end of a NIXL link. One thread makes all calls but `abort`, as the agent requires."""

    stream = None
    most_runs = 1024
    """Largest number of runs in one send; a run of 64 KiB or more is a write of its own on the network anyway."""

    def __init__(self, agent: Any, peer: str, device: torch.device, mac_key: bytes | None) -> None:
        self.mac_key = mac_key
        self._agent = agent
        self._peer = peer
        self._device = device
        self._registered: dict[int, tuple[torch.Tensor, Any]] = {}
        """Buffers and their registrations with NIXL, by address."""
        self._named: set[int] = set()
        """Addresses of the buffers that the other end knows."""
        self._targets: dict[int, tuple[int, int, int]] = {}
        """Places where the receiver wants frames (address, bytes, device), by frame."""
        self._sending: deque[NixlSend] = deque()
        """Sends in order; the writes of the first ones may be in progress."""
        self._came: set[int] = set()
        """Frames that have arrived, without the first `_all_came`. The notifications of two writes may overtake each
        other."""
        self._all_came = 0
        """Number of frames of which each has arrived, from the first one on."""
        self._sent = self._received = 0
        self._lendable: bool | None = None
        """Whether the lent memory is registered; None before it was tried."""
        self._greeted = self._closed = self._other_closed = False

    def greet(self, timeout: float) -> None:
        """Opens the connection with a first notification; both ends wait, because each makes progress only in calls."""
        self._notify("hello")
        self._wait(lambda: self._greeted, timeout)

    def buffer(self, nbytes: int) -> torch.Tensor:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._registered[tensor.data_ptr()] = tensor, self._call("register_memory", tensor)
        return tensor

    @property
    def lender(self) -> Lender | None:
        return self

    def lend(self, memory: torch.Tensor) -> bool:
        """See `Lender.lend`; one tensor for a link."""
        if self._lendable is None:
            try:
                self._registered[memory.data_ptr()] = memory, self._call("register_memory", memory)
                self._lendable = True
            except LinkError as error:
                logger.warning("frames are copied before they are sent", extra={"reason": str(error)})
                self._lendable = False
        return self._lendable

    def send(self, data: torch.Tensor) -> Pending:
        return self.send_runs([data])

    def send_runs(self, parts: Sequence[torch.Tensor]) -> Pending:
        """See `Lender.send_runs`."""
        if any(part.untyped_storage().data_ptr() not in self._registered for part in parts):
            raise LinkError("nixl: only a buffer of this link, or lent memory, can be sent from")
        if self._device.type == "cuda":
            # The network card reads GPU memory without regard to the work that this thread has enqueued.
            wait_for_stream(self._device)
        self._sent += 1
        send = NixlSend(self._sent, parts)
        self._sending.append(send)
        self._progress()
        return Pending(partial(self._wait, lambda: send.done))

    def recv(self, into: torch.Tensor) -> Pending:
        address = into.untyped_storage().data_ptr()
        if address not in self._registered:
            raise LinkError("nixl: only a buffer of this link can be received into")
        metadata = b""
        if address not in self._named:
            metadata = self._call("get_partial_agent_metadata", self._registered[address][1], False, [_BACKEND])
            self._named.add(address)
        self._received += 1
        number = self._received
        self._notify(_TARGET, number, into.data_ptr(), into.numel(), max(0, into.get_device()), metadata)
        return Pending(partial(self._wait, lambda: self._has_come(number)))

    def _has_come(self, number: int) -> bool:
        """Whether a frame has arrived."""
        return number <= self._all_came or number in self._came

    def abort(self) -> None:
        """Ends the link: its thread notices at its next poll, and tells the other end when it closes the link."""
        self._closed = True

    def close(self) -> None:
        self.abort()
        agent, self._agent = self._agent, None
        if agent is None:
            return
        steps: list[Callable[[], object]] = [partial(agent.send_notif, self._peer, pack(["bye"]))]
        # Releasing the handle of an unfinished write ends the write.
        steps += [send.handle.release for send in self._sending if send.handle is not None]
        steps += [partial(agent.deregister_memory, registration) for _, registration in self._registered.values()]
        steps += [partial(agent.remove_remote_agent, self._peer)]
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001  # the library's errors have no class in common
                logger.debug("nixl: closing a link", extra={"reason": f"{type(error).__name__}: {error}"})
        self._sending.clear()
        self._registered.clear()

    def _wait(self, done: Callable[[], bool], timeout: float) -> None:
        """Makes progress until `done()` is true.

        Raises:
            LinkError: the link has ended, or it took longer than `timeout` seconds.
        """

        def progressed() -> bool:
            self._progress()
            if done():
                return True
            if self._other_closed:
                raise LinkError("nixl: the other end has closed")
            return False

        if not poll(progressed, timeout, POLL_SECONDS):
            raise LinkError(f"nixl: no end within {timeout} s")

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._closed:
            raise LinkError("nixl: the link is closed")
        with link_errors(f"nixl: {method}", Exception):
            return getattr(self._agent, method)(*arguments)

    def _notify(self, *notification: object) -> None:
        self._call("send_notif", self._peer, pack(list(notification)))

    def _progress(self) -> None:
        """Takes the notifications that have arrived, and begins and finishes writes."""
        for notification in self._call("get_new_notifs").get(self._peer, ()):
            with link_errors("nixl", WireError):
                self._take(*unpack_named(notification, _NOTIFICATIONS))
        for send in self._sending:
            if send.handle is None:
                target = self._targets.pop(send.number, None)
                if target is None:
                    break
                self._write(send, *target)
            elif not send.done:
                send.done = self._checked(self._call("check_xfer_state", send.handle)) == "DONE"
        while self._sending and self._sending[0].done:
            self._sending.popleft().handle.release()

    def _write(self, send: NixlSend, address: int, nbytes: int, device: int) -> None:
        """Begins to write a frame to its target."""
        size = sum(part.numel() for part in send.parts)
        if nbytes != size:
            raise LinkError(f"nixl: frame {send.number} has {size} bytes; {nbytes} were expected")
        kind = "DRAM" if self._device.type == "cpu" else "VRAM"
        sources, targets = [], []
        for part in send.parts:
            sources.append((part.data_ptr(), part.numel(), max(0, part.get_device())))
            targets.append((address, part.numel(), device))
            address += part.numel()
        here, there = (self._call("get_xfer_descs", places, kind) for places in (sources, targets))
        notification = pack(["came", send.number])
        send.handle = self._call("initialize_xfer", "WRITE", here, there, self._peer, notification, [_BACKEND])
        self._checked(self._call("transfer", send.handle))

    def _checked(self, state: str) -> str:
        """The state of a write, unless it has failed."""
        if state == "ERR":
            raise LinkError("nixl: a write failed; the other end is gone, or can't be reached")
        return state

    def _take(self, name: str, values: tuple[Any, ...]) -> None:
        match name:
            case "hello":
                self._greeted = True
            case "came":
                if self._has_come(values[0]) or values[0] > self._received:
                    raise WireError(f"frame {values[0]} came twice or unrequested; {self._received} were requested")
                self._came.add(values[0])
                while self._all_came + 1 in self._came:
                    self._all_came += 1
                    self._came.remove(self._all_came)
            case "bye":
                # Everything that it sent before has arrived, too.
                self._other_closed = True
            case _:
                number, address, nbytes, device, metadata = values
                if metadata and _text(self._call("add_remote_agent", metadata)) != self._peer:
                    raise WireError("the target is a buffer of another agent")
                self._targets[number] = address, nbytes, device


def _text(name: str | bytes) -> str:
    """An agent's name, which the library returns in either form."""
    return name.decode() if isinstance(name, bytes) else name
