"""Choice of transport: a pair uses the best that both have; without one, the error says what each has and why."""

import gc
import os
from typing import Any, ClassVar

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from kvrelay.transfer.config import TransferConfig
from kvrelay.transfer.protocol.ports import RECEIVER, SENDER, NoTransportError
from kvrelay.transfer.transports import registry
from kvrelay.transfer.transports.base import LinkError
from kvrelay.transfer.transports.nccl import scope_of
from kvrelay.transfer.transports.registry import available_transports, choose, entries
from kvrelay.transfer.transports.shm import SharedMemoryTransport, shm_missing
from support.fake_transport import FakeTransport
from support.link_process import beside, joined, meetings

HOST = "127.0.0.1"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


GPU, OTHER_GPU = "nccl@GPU-1", "nccl@GPU-2"


@pytest.mark.parametrize(
    ("wanted", "here", "there", "chosen"),
    [
        ("auto", ["nccl", "gloo"], ["nccl", "gloo"], "nccl"),
        ("auto", ["nccl", "gloo"], ["gloo"], "gloo"),
        ("gloo", ["nccl", "gloo"], ["nccl", "gloo"], "gloo"),
        ("auto", ["shm@a", "gloo"], ["shm@a", "gloo"], "shm"),
        ("auto", ["shm@a", "gloo"], ["shm@b", "gloo"], "gloo"),
        # Two workers on one GPU use nccl only where both can share it.
        ("auto", [GPU, "shm@m", "tcp"], [GPU, "shm@m", "tcp"], "shm"),
        ("auto", [GPU, "tcp"], [OTHER_GPU, "tcp"], "nccl"),
        ("auto", [GPU, "tcp"], [GPU, "tcp"], "tcp"),
        ("auto", [GPU + "+", "tcp"], [GPU + "+", "tcp"], "nccl"),
        ("auto", [GPU + "+", "tcp"], [GPU, "tcp"], "tcp"),
        ("auto", [GPU, "tcp"], [GPU + "+", "tcp"], "tcp"),
    ],
    ids=str,
)
def test_the_best_transport_that_both_can_do_is_chosen(
    wanted: str, here: list[str], there: list[str], chosen: str
) -> None:
    assert choose(wanted, here, there) == chosen


@pytest.mark.parametrize(
    ("wanted", "here", "there", "reason"),
    [
        ("nccl", ["gloo"], ["gloo"], r"transfer\.transport = nccl.*this worker can do gloo, the other gloo"),
        ("auto", ["nccl"], ["gloo"], "this worker can do nccl, the other gloo"),
        ("auto", ["gloo"], [], "the other none"),
        ("auto", ["shm@a"], ["shm@b"], "shm not between these two: they don't share a machine"),
    ],
)
def test_without_a_common_transport_the_error_names_those_of_both(
    wanted: str, here: list[str], there: list[str], reason: str
) -> None:
    with pytest.raises(NoTransportError, match=reason):
        choose(wanted, here, there)


@no_gpu
def test_the_error_says_why_this_worker_lacks_a_transport() -> None:
    with pytest.raises(NoTransportError, match="nccl not here: no CUDA device"):
        choose("auto", ["gloo"], ["nccl"])


@no_gpu
def test_a_configured_transport_that_is_missing_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"transfer\.transport is 'nccl'.*no CUDA device; allowed: auto, .*gloo"):
        available_transports(HOST, wanted="nccl")


def test_a_transport_that_was_removed_is_refused_with_what_to_write() -> None:
    with pytest.raises(ValidationError, match="Input should be auto, nccl or shm; cuda_ipc was removed"):
        TypeAdapter(TransferConfig).validate_python({"transport": "cuda_ipc"})


def test_a_pool_in_host_memory_is_offered_no_transport_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._MISSING, "nccl", lambda: None)
    assert "nccl" not in available_transports(HOST)
    with pytest.raises(ValueError, match="the KV pool is not on a GPU"):
        available_transports(HOST, wanted="nccl")


def test_a_missing_transport_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._MISSING, "shm", lambda: "not today")
    assert "shm" not in available_transports(HOST)
    with pytest.raises(ValueError, match="can't do: not today"):
        available_transports(HOST, wanted="shm")


@no_gpu
def test_to_look_for_transports_leaves_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code of other threads may read it meanwhile, which ends the process if it changes."""
    monkeypatch.delenv("NIXL_LOG_LEVEL", raising=False)
    before = dict(os.environ)
    available_transports(HOST)
    assert os.environ == before


def test_only_the_wanted_one_is_offered() -> None:
    assert list(available_transports(HOST, wanted="gloo")) == ["gloo"]


def test_ranks_of_several_machines_share_no_memory() -> None:
    assert "shm" not in available_transports(HOST, hosts=2)
    with pytest.raises(ValueError, match=r"on several machines \(engine\.hosts\).*allowed: auto, tcp"):
        available_transports(HOST, "shm", hosts=2)


@pytest.mark.skipif(shm_missing() is not None, reason=f"shm: {shm_missing()}")
def test_workers_of_one_machine_use_its_memory() -> None:
    offered = entries(available_transports(HOST))
    assert choose("auto", offered, offered) == "shm"
    assert choose("auto", offered, [entry for entry in offered if not entry.startswith("shm")]) != "shm"


def test_an_entry_names_the_scope_only_where_there_is_one() -> None:
    assert entries({"fake": FakeTransport(), "shm": SharedMemoryTransport(scope="a1")}) == [
        "fake",
        "shm@a1",
    ]


def test_a_host_that_cannot_be_bound_is_named() -> None:
    with pytest.raises(OSError, match=r"host 203\.0\.113\.1"):
        available_transports("203.0.113.1")


def test_ends_of_different_scopes_refuse_each_other_when_dialled() -> None:
    """Both ends name their scopes, whatever the membership says."""
    here, there = (SharedMemoryTransport(scope=scope) for scope in ("machine-a", "machine-b"))
    meeting = meetings(5.0)

    def receive() -> None:
        with pytest.raises(LinkError, match="this is machine-b, the sender's machine-a"):
            there.connect(meeting[RECEIVER], RECEIVER, 5.0)

    other = beside(receive)
    with pytest.raises(LinkError, match=r"refused.*machine-b"):
        here.connect(meeting[SENDER], SENDER, 5.0)
    other()


def test_nccl_on_one_gpu_is_refused_with_what_it_needs() -> None:
    with pytest.raises(NoTransportError, match=r"both are on GPU-1, which NCCL shares from 2\.30 on, with NCCL_MULTI"):
        choose("nccl", [GPU], [GPU])
    assert scope_of("GPU-1", (2, 29, 9), "1") == scope_of("GPU-1", (2, 30, 0), "0") == "GPU-1"
    assert scope_of("GPU-1", (2, 30, 0), "1") == "GPU-1+"


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("name", ["tcp", "gloo", "shm"])
def test_a_pool_on_a_gpu_gets_pinned_buffers(name: str, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of both ends are pinned; those of a pool in host memory are not."""
    empty, pinned = torch.empty, list[int]()

    def recorded(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.extend(shape if pin_memory else ())
        return empty(*shape, **options)

    class Runtime:
        registered: ClassVar[dict[int, int]] = {}

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # CUDA's name
            self.registered[address] = nbytes
            pinned.append(nbytes)
            return 0

        def cudaHostUnregister(self, address: int) -> int:  # CUDA's name
            del self.registered[address]
            return 0

    monkeypatch.setattr(torch, "empty", recorded)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    transport, found = available_transports(HOST, name, gpu)[name], []
    use = lambda link: found.append(link.buffer(4096))  # noqa: E731  # an argument
    joined([transport, transport], use, use)
    assert pinned == ([4096, 4096] if gpu else [])
    found.clear()
    gc.collect()
    assert not Runtime.registered, "memory is unmapped after CUDA has let go of it"
