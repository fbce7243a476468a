"""The NCCL transport where there is no GPU: it imports, it is not offered, and asking for it is a clear mistake."""

import pytest
import torch

from kvrelay.transfer.nccl import NcclTransport, nccl_is_available
from kvrelay.transfer.transports import available_transports

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@no_gpu
def test_without_a_gpu_it_is_not_offered() -> None:
    assert not nccl_is_available()
    assert list(available_transports("127.0.0.1")) == ["gloo"]
    assert list(available_transports("127.0.0.1", gpu=True)) == ["gloo"]


@no_gpu
def test_asking_for_it_without_a_gpu_names_the_option() -> None:
    with pytest.raises(ValueError, match=r"transfer\.transport is 'nccl'.*no GPU"):
        available_transports("127.0.0.1", wanted="nccl")
    with pytest.raises(ValueError, match="no GPU"):
        NcclTransport()


def test_a_host_that_cannot_be_bound_is_named() -> None:
    with pytest.raises(OSError, match=r"host 203\.0\.113\.1"):
        available_transports("203.0.113.1")
