"""The NCCL transport without a GPU: its options, its watchdog, and when it is refused."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrelay.engine.kv.writes import Event
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER
from kvrelay.transfer.transports import nccl
from kvrelay.transfer.transports.base import LinkError
from kvrelay.transfer.transports.nccl import (
    MAX_CHANNELS,
    NcclLink,
    Watchdog,
    configure,
    environment,
    nccl_missing,
)

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
WAIT = 5.0


@no_gpu
def test_without_a_gpu_it_says_why_it_is_missing() -> None:
    assert nccl_missing() == "no CUDA device"


@pytest.mark.parametrize(("version", "offered"), [((2, 26, 1), False), ((2, 26, 2), True), ((2, 30, 3), True)])
def test_an_nccl_without_a_reliable_abort_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], offered: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    assert nccl_missing() == (None if offered else "NCCL is 2.26.1; allowed: 2.26.2 or newer")


def test_two_ranks_may_share_a_gpu_only_where_nccl_lets_them() -> None:
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in environment((2, 29, 9))
    assert environment((2, 30, 0))["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert environment((2, 30, 0))["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_communicators_are_non_blocking_and_capped() -> None:
    options = SimpleNamespace(config=SimpleNamespace(blocking=1, max_ctas=0))
    configure(options, 3.0)
    assert options.config.blocking == 0
    assert options.config.max_ctas == MAX_CHANNELS
    assert options._timeout.total_seconds() == 3.0


class GroupTwin:
    """A process group whose operations end once they are in `ended`; `abort` ends all, and may block. `failed` makes
    them completed without an event, as an error of NCCL does."""

    def __init__(self, call_seconds: float = 0.0, abort_blocks: bool = False) -> None:
        self.aborted = threading.Event()
        self.aborts = 0
        self.let_go = threading.Event()
        self.ended: set[str] = set()
        self.failed = False
        self.looks = 0
        self._call_seconds = call_seconds
        self._abort_blocks = abort_blocks

    def _begin(self, what: str) -> Any:
        # The first operation makes the communicator, which waits for the other rank until it is aborted.
        if self._call_seconds and self.aborted.wait(self._call_seconds):
            raise RuntimeError("the communicator was aborted")
        return SimpleNamespace(is_completed=lambda: self._looked_at(what), wait=lambda: None, what=what)

    def _looked_at(self, what: str) -> bool:
        self.looks += 1
        return self._over(what) or self.failed

    def _over(self, what: str) -> bool:
        return what in self.ended or self.aborted.is_set()

    def end_of(self, work: Any) -> Event:
        """The event behind an operation."""

        def synchronize() -> None:
            while not self._over(work.what) and not self.let_go.is_set():
                time.sleep(0.002)

        return SimpleNamespace(synchronize=synchronize)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        assert peer == RECEIVER
        return self._begin("send")

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._begin("recv")

    def abort(self) -> None:
        self.aborts += 1
        self.aborted.set()
        if self._abort_blocks:
            self.let_go.wait(WAIT)


def link_on(group: GroupTwin, timeout: float = 0.2) -> NcclLink:
    return NcclLink(group, SENDER, torch.device("cpu"), Watchdog(), timeout, group.end_of)


def test_a_wait_takes_no_processor_and_ends_with_its_operation_or_aborts_it_at_its_timeout() -> None:
    group = GroupTwin()
    link = link_on(group)
    pending, later = link.send(link.buffer(8)), link.recv(link.buffer(8))
    threading.Timer(0.5, group.ended.add, ("send",)).start()
    began, used = time.monotonic(), time.thread_time()
    pending.wait(WAIT)
    assert time.monotonic() - began >= 0.4
    assert time.thread_time() - used < 0.02
    assert group.looks <= 6, "a look each 0.1 s is for errors only"
    assert not group.aborted.is_set()
    with pytest.raises(LinkError, match=r"no end within 0\.1 s"):
        later.wait(0.1)
    assert group.aborted.wait(WAIT)


def test_an_error_of_nccl_ends_a_wait_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "LATE_SECONDS", 0.2)
    group = GroupTwin()
    link = link_on(group)
    pending = link.recv(link.buffer(8))
    group.failed = True
    began = time.monotonic()
    with pytest.raises(LinkError, match="has failed"):
        pending.wait(WAIT)
    assert time.monotonic() - began < WAIT / 2
    link.close()


def test_a_rank_that_never_comes_is_aborted_by_the_watchdog() -> None:
    group = GroupTwin(call_seconds=WAIT)
    started = time.monotonic()
    with pytest.raises(LinkError, match="aborted"):
        link_on(group, timeout=0.2).send(torch.zeros(8, dtype=torch.uint8))
    assert 0.15 < time.monotonic() - started < WAIT / 2


def test_abort_never_blocks_and_ends_a_wait_as_an_error() -> None:
    group = GroupTwin(abort_blocks=True)
    link = link_on(group)
    pending = link.recv(link.buffer(8))
    threading.Timer(0.05, link.abort).start()
    with pytest.raises(LinkError, match="closed"):
        pending.wait(WAIT)
    started = time.monotonic()
    link.abort()
    assert time.monotonic() - started < WAIT / 2
    with pytest.raises(LinkError, match="closed"):
        link.send(link.buffer(8))
    group.let_go.set()
    link.close()
    assert group.aborts == 1, "a communicator is aborted once"


def test_an_abort_that_blocks_delays_no_other_link() -> None:
    watchdog = Watchdog()
    stuck, other = GroupTwin(call_seconds=WAIT, abort_blocks=True), GroupTwin(call_seconds=WAIT)
    links = [NcclLink(group, SENDER, torch.device("cpu"), watchdog, 0.1, group.end_of) for group in (stuck, other)]
    for link in links:
        with pytest.raises(LinkError):
            link.send(torch.zeros(8, dtype=torch.uint8))
    assert other.aborts == 1
    stuck.let_go.set()
