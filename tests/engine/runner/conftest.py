"""Tests of the GPU's runner interpret its kernels on CPU tensors, unless there is a GPU."""

from collections.abc import Iterator

import pytest
import torch

from kvrelay.kernels.triton import sample


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Has torch multiply on one thread: on several, the bits of a row depend on the rows beside it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Makes blocks of logits small: the interpreter's time goes by the lanes of a block as well."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(sample, "SLICE", 512)
        yield
