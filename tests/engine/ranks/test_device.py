"""The collective of ranks on GPUs, with stand-ins for what only GPUs have."""

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrelay.engine.build import on_devices
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.degree import Degree
from kvrelay.engine.models.choice import check_ranks
from kvrelay.engine.ranks.collective import CollectiveError, Place
from kvrelay.engine.ranks.device import ONE_SHOT_BYTES, SWITCH, GpuCollective, OneShot
from kvrelay.models import resolve
from support.rank_threads import on_ranks, places, shared_places


class Sums:
    """Stands in for `OneShot`: sums by the group of threads, and then adds an error."""

    def __init__(self, group: Any, error: float = 0.0, meets: bool = True) -> None:
        self._group, self._error, self._meets = group, error, meets
        self.summed = 0

    def meet(self) -> None:
        if not self._meets:
            raise RuntimeError("no peer access")

    def takes(self, part: Tensor) -> bool:
        return part.dtype == torch.float32 and part.nbytes <= ONE_SHOT_BYTES

    def sum(self, part: Tensor) -> Tensor:
        self.summed += 1
        found: Tensor = self._group.sum(part)
        return found + self._error


def agreed(make: Callable[[Place], Sums]) -> set[bool]:
    """Answers of two ranks about sums by one kernel; NCCL's are those of another group of threads."""
    host, nccl = places(Degree(2)), places(Degree(2))

    def run(place: Place) -> bool:
        group = GpuCollective(place.group, nccl[place.rank].group, 30.0)
        return group.sum_at_once(partial(make, place), "cpu")

    return set(on_ranks(host, run))


def test_small_sums_are_one_kernels_where_all_ranks_can_and_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [place.group for place in places(Degree(2))]
    assert agreed(lambda place: Sums(groups[place.rank])) == {True}
    assert agreed(lambda place: Sums(groups[place.rank], error=float(place.rank))) == {False}, "wrong on one"

    def fails_on_one(place: Place) -> Sums:
        if place.rank:
            raise AttributeError("torch has no symmetric memory")
        return Sums(groups[0])

    assert agreed(fails_on_one) == {False}
    assert agreed(lambda place: Sums(groups[place.rank], meets=False)) == {False}
    monkeypatch.setenv(SWITCH, "0")
    assert agreed(lambda place: Sums(groups[place.rank])) == {False}


def test_parts_go_to_what_carries_them() -> None:
    taken: list[str] = []

    def noting(name: str) -> Any:
        each = {call: lambda part, name=name: taken.append(name) for call in ("sum", "gather")}
        return SimpleNamespace(place=0, size=2, **each)

    group = GpuCollective(noting("host"), noting("nccl"), 30.0)
    part = partial(SimpleNamespace, dtype=torch.bfloat16, is_cuda=True)
    small, large, odd = part(nbytes=2**14), part(nbytes=2 * ONE_SHOT_BYTES), part(nbytes=ONE_SHOT_BYTES - 2)
    group.sum(small)
    one_shot = OneShot.__new__(OneShot)
    one_shot._buffer = torch.empty(0, dtype=torch.bfloat16)
    one_shot.sum = lambda part: taken.append("one kernel") or part
    group._one_shot = one_shot
    for each in (small, large, odd, part(nbytes=2**14, dtype=torch.float16), torch.ones(4)):
        group.sum(each)
    group.gather(small)
    group.gather(torch.ones(4))
    assert taken == ["nccl", "one kernel", "nccl", "nccl", "nccl", "host", "nccl", "host"]


def waiting(timeout: float) -> tuple[list[Place], GpuCollective, Any]:
    """Places of two ranks that share memory, rank 0's group, and its stand-in for NCCL."""
    ranks = shared_places(2)
    nccl = SimpleNamespace(check=lambda: None, abort=lambda: calls.append("abort"), calls=(calls := list[str]()))
    return ranks, GpuCollective(ranks[0].group, nccl, timeout), nccl


def test_a_wait_ends_with_the_step() -> None:
    ended = threading.Event()
    threading.Timer(0.1, ended.set).start()
    _, group, nccl = waiting(30.0)
    group.wait(ended.is_set)
    assert not nccl.calls


def test_a_step_that_doesnt_end_aborts_the_ranks() -> None:
    ranks, group, nccl = waiting(0.2)
    with pytest.raises(CollectiveError, match=r"rank 0 of 2: a step doesn't end within 0\.2 s"):
        group.wait(lambda: False)
    assert nccl.calls == ["abort"]
    with pytest.raises(CollectiveError, match="aborted"):
        ranks[1].group.check()


def test_an_abort_on_any_rank_ends_the_wait_for_a_step() -> None:
    ranks, group, nccl = waiting(30.0)
    threading.Timer(0.1, ranks[1].group.abort).start()
    with pytest.raises(CollectiveError, match="aborted"):
        group.wait(lambda: False)
    assert nccl.calls == ["abort"]


def test_each_rank_needs_a_gpu_and_has_no_stages_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert on_devices(EngineConfig(tensor_parallel=2)).device == "cuda"
    with pytest.raises(ValueError, match=r"tensor_parallel is 4; allowed: .*4 ranks of a machine .* of the 2 that"):
        on_devices(EngineConfig(tensor_parallel=4))
    assert on_devices(EngineConfig(tensor_parallel=4, hosts=2)).device == "cuda"
    with pytest.raises(ValueError, match="pipeline_parallel is 2; allowed: 1 on a GPU"):
        check_ranks(resolve("pico"), on_devices(EngineConfig(pipeline_parallel=2)))
    with pytest.raises(ValueError, match="device is 'cuda'; allowed: cpu for 2 ranks of a model that transformers"):
        check_ranks(resolve("pico"), on_devices(EngineConfig(tensor_parallel=2, model_path="general")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert on_devices(EngineConfig(tensor_parallel=4)).device == "cpu"
