"""Links between the GPU buffers of two processes; `test_transfer_contract.py` tests the contract without a GPU."""

import time

import pytest
import torch

from kvrelay.transfer.transports.base import LinkError
from kvrelay.transfer.transports.nccl import OLDEST_SHARED_GPU, nccl_missing
from support.link_process import linked_process, pattern

SIZES = [1, 4097, 65536, 3 * 2**20 + 1, 16 * 2**20]
WAIT = 30.0


def missing_nccl() -> str | None:
    reason = nccl_missing()
    if reason is None and torch.cuda.nccl.version() < OLDEST_SHARED_GPU:
        return "this NCCL does not let two ranks share a GPU"
    return reason


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(missing_nccl() is not None, reason=str(missing_nccl()))]


def test_bytes_of_every_size_cross_between_processes() -> None:
    with linked_process("nccl", "idle", SIZES) as other:
        for size in SIZES:
            into = other.link.buffer(size)
            other.link.recv(into).wait(WAIT)
            assert torch.equal(into.cpu(), pattern(size))


def test_a_killed_peer_is_an_error_in_time() -> None:
    with linked_process("nccl", "idle", [4096]) as other:
        into = other.link.buffer(4096)
        other.link.recv(into).wait(WAIT)
        pending = other.link.recv(into)
        other.process.kill()
        killed = time.monotonic()
        with pytest.raises(LinkError):
            pending.wait(2)
        assert time.monotonic() - killed < 4
