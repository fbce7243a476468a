"""Links between the GPU buffers of two processes; `test_transfer_contract.py` tests the contract without a GPU."""

import time

import pytest
import torch

from kvrelay.transfer.transports.base import LinkError
from kvrelay.transfer.transports.cuda_ipc import cuda_ipc_missing
from kvrelay.transfer.transports.nccl import OLDEST_SHARED_GPU, nccl_missing
from support.link_process import linked_process, pattern

SIZES = [1, 4097, 65536, 3 * 2**20 + 1, 16 * 2**20]
WAIT = 30.0


def missing_nccl() -> str | None:
    reason = nccl_missing()
    if reason is None and torch.cuda.nccl.version() < OLDEST_SHARED_GPU:
        return "this NCCL does not let two ranks share a GPU"
    return reason


pytestmark = pytest.mark.gpu
NAMES = [
    pytest.param("cuda_ipc", marks=pytest.mark.skipif(cuda_ipc_missing() is not None, reason=str(cuda_ipc_missing()))),
    pytest.param("nccl", marks=pytest.mark.skipif(missing_nccl() is not None, reason=str(missing_nccl()))),
]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_every_size_cross_between_processes(name: str) -> None:
    with linked_process(name, "idle", SIZES) as other:
        for size in SIZES:
            into = other.link.buffer(size)
            other.link.recv(into).wait(WAIT)
            assert torch.equal(into.cpu(), pattern(size))


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_peer_is_an_error_in_time(name: str) -> None:
    with linked_process(name, "idle", [4096]) as other:
        into = other.link.buffer(4096)
        other.link.recv(into).wait(WAIT)
        pending = other.link.recv(into)
        other.process.kill()
        killed = time.monotonic()
        with pytest.raises(LinkError):
            pending.wait(2)
        assert time.monotonic() - killed < 4
