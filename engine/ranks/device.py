"""The collective of ranks that compute on GPUs of one machine: NCCL, and for small sums one kernel.

In a decode step a sum takes longer to begin than to move its few numbers. `OneShot` leaves the parts in memory that all
of these GPUs can read, and one kernel of torch's adds them up. Parts of a prompt are larger, and NCCL's.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from kvrelay.engine.ranks.collective import Collective, CollectiveError, Place, Ring, all_agree
from kvrelay.engine.ranks.meet import MEET_SECONDS
from kvrelay.engine.ranks.process_group import NcclCollective
from kvrelay.machine.numa import cpus_near, pin

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

ONE_SHOT_BYTES = 256 * 1024
"""Size of the largest part that one kernel sums. It reads all parts on each GPU, which takes longer above that."""
ONE_SHOT_DTYPES = (torch.float32, torch.bfloat16)
"""Types of parts that one kernel can sum."""
ALIGNMENT = 16
"""Divisor of the bytes of parts that one kernel sums."""
SWITCH = "KVRELAY_ONE_SHOT_SUMS"
"""Environment variable that leaves all sums to NCCL if it is 0."""
PAUSE_SECONDS = 2e-5
"""Seconds between two looks at whether a step has ended."""
GROUP = "kvrelay ranks"
"""Name of the ranks' group among those of torch in this process."""

ONE_SHOT_ENVIRONMENT = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
"""Each rank sees its own GPU only, as device 0, so torch takes them for the same one."""


class OneShot:
    """Sums of small parts of one type, on the current stream; also in captured graphs."""

    def __init__(self, nccl: NcclCollective, store: "Store", dtype: torch.dtype, device: torch.device) -> None:
        """Takes memory that other GPUs may read. No rank waits for another one.

        Raises:
            RuntimeError, ValueError, AttributeError, ImportError: it can't be had.
        """
        from torch._C._distributed_c10d import ProcessGroup, _register_process_group, _SymmetricMemory

        if dtype not in ONE_SHOT_DTYPES:
            raise ValueError(f"parts are {dtype}; allowed: {', '.join(map(str, ONE_SHOT_DTYPES))}")
        for name, value in ONE_SHOT_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        group: Any = ProcessGroup(store, nccl.place, nccl.size)
        kind = ProcessGroup.BackendType.NCCL
        group._set_default_backend(kind)
        group._register_backend(torch.device(device.type), kind, nccl.backend)
        group._set_group_name(GROUP)
        _register_process_group(GROUP, group)  # type: ignore[arg-type]  # a text, by its newest stubs a NewType of it
        _SymmetricMemory.set_group_info(GROUP, nccl.place, nccl.size, PrefixStore("memory", store))
        self._buffer = _SymmetricMemory.empty_strided_p2p((ONE_SHOT_BYTES // dtype.itemsize,), (1,), dtype, device)

    def meet(self) -> None:
        """Opens the other ranks' memory. All ranks call it.

        Raises:
            RuntimeError: it can't be opened.
        """
        from torch._C._distributed_c10d import _SymmetricMemory

        self._memory = _SymmetricMemory.rendezvous(self._buffer, GROUP)

    def takes(self, part: Tensor) -> bool:
        """Whether the kernel sums such parts."""
        return part.dtype == self._buffer.dtype and part.nbytes <= ONE_SHOT_BYTES and part.nbytes % ALIGNMENT == 0

    def sum(self, part: Tensor) -> Tensor:
        """See `Collective.sum`, for a part that it `takes`."""
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(self._buffer, part.view(-1), "sum", GROUP, part.view(-1))
        return part


class GpuCollective:
    """Implements `Collective` for parts on this process's GPU, and for those on the host.

    Results of the former are ready for what the calling thread's stream does next. Nothing watches the device but
    `wait`, which is to be called for each step.
    """

    def __init__(self, host: Collective, nccl: NcclCollective, timeout: float) -> None:
        """
        Args:
            host: of the same ranks, for parts on the host.
            timeout: seconds that a step may take.
        """
        self.place, self.size = host.place, host.size
        self._host, self._nccl, self._timeout = host, nccl, timeout
        self._one_shot: OneShot | None = None

    def sum(self, part: Tensor) -> Tensor:
        """See `Collective.sum`."""
        if not part.is_cuda:
            return self._host.sum(part)
        if self._one_shot is not None and self._one_shot.takes(part):
            return self._one_shot.sum(part)
        return self._nccl.sum(part)

    def gather(self, part: Tensor) -> Tensor:
        """See `Collective.gather`."""
        return (self._nccl if part.is_cuda else self._host).gather(part)

    def exchange(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int] | None = None, most: int = 0
    ) -> tuple[Tensor, list[int]]:
        """See `Collective.exchange`: rows on the host."""
        return (self._nccl if rows.is_cuda else self._host).exchange(rows, sent, received, most)

    def ring(self, to: int, source: int, message_bytes: int, depth: int) -> Ring:
        """See `Collective.ring`: for messages on the host."""
        return self._host.ring(to, source, message_bytes, depth)

    def sum_at_once(self, make: Callable[[], OneShot], device: torch.device | str) -> bool:
        """Uses one kernel for the sums of small parts, if all ranks can and its results equal NCCL's. All ranks call
        it.

        Args:
            make: makes this rank's `OneShot`.

        Returns:
            Whether it does.

        Raises:
            CollectiveError: a rank is lost.
        """
        one_shot: OneShot | None = None
        why = f"{SWITCH} is 0"
        if os.environ.get(SWITCH) != "0":
            try:
                one_shot = make()
            except (RuntimeError, ValueError, AttributeError, ImportError) as error:
                why = str(error)
        if all_agree(self._host, one_shot is not None) and one_shot is not None:
            why = self._try(one_shot, device)
            if all_agree(self._host, not why):
                self._one_shot = one_shot
        if self._one_shot is None:
            logger.info("sums of ranks are NCCL's: %s", why or "another rank can't do without")
        return self._one_shot is not None

    def _try(self, one_shot: OneShot, device: torch.device | str) -> str:
        """Reason why the sums of `OneShot` can't be used; empty if they can."""
        try:
            one_shot.meet()
        except RuntimeError as error:
            return str(error)
        # Whole numbers, whose sums no order rounds.
        part = (torch.arange(ALIGNMENT * 8, device=device) % 7 + self.place).to(torch.float32)
        part = part.to(next(dtype for dtype in ONE_SHOT_DTYPES if one_shot.takes(part.to(dtype))))
        expected = self._nccl.sum(part.clone())
        # All cases run, also after a wrong result, because the other ranks run as many.
        found = [one_shot.sum(part.clone()) for _ in range(3)]
        return "" if all(torch.equal(each, expected) for each in found) else "it sums wrongly"

    def wait(self, ended: Callable[[], bool]) -> None:
        """Waits for the device's work, such as a step's event.

        Args:
            ended: whether it has ended.

        Raises:
            CollectiveError: a rank is lost, or the work doesn't end in time.
        """
        limit = time.monotonic() + self._timeout
        try:
            while not ended():
                self._nccl.check()
                self._host.check()
                if time.monotonic() > limit:
                    raise CollectiveError(
                        f"rank {self.place} of {self.size}: a step doesn't end within {self._timeout:g} s"
                    )
                time.sleep(PAUSE_SECONDS)
            self._nccl.check()
        except CollectiveError:
            self.abort()
            raise

    def check(self) -> None:
        """See `Collective.check`."""
        self._nccl.check()
        self._host.check()

    def abort(self) -> None:
        """See `Collective.abort`."""
        self._host.abort()
        self._nccl.abort()


def on_gpus(place: Place, device: torch.device, dtype: torch.dtype) -> Place:
    """A rank whose group also carries tensors of its GPU. All ranks of the group call this.

    The rank's threads then run on the CPUs of the GPU's NUMA node.

    Args:
        place: of the rank; its group carries those of the host.
        device: its GPU.
        dtype: of the model, and so of the parts of its sums.

    Raises:
        CollectiveError: a rank is lost.
    """
    properties = torch.cuda.get_device_properties(device)
    names = "pci_domain_id", "pci_bus_id", "pci_device_id"
    address = [getattr(properties, name) for name in names]  # torch's stubs don't know them
    pin(cpus_near("{:04x}:{:02x}:{:02x}.0".format(*address)))
    host, store = place.group, place.store
    if store is None:
        raise ValueError("the rank has met no others; allowed: a place of `meet`")
    nccl = NcclCollective(PrefixStore("nccl", store), host.place, host.size, MEET_SECONDS)
    group = GpuCollective(host, nccl, MEET_SECONDS)
    if place.one_machine:
        group.sum_at_once(partial(OneShot, nccl, PrefixStore("one shot", store), dtype, device), device)
    return replace(place, group=group, all=group if place.all is host else place.all)
