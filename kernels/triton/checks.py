"""Checks of a kernel's arguments, because inside a kernel a wrong pointer corrupts memory instead of raising an
error.
"""

import torch
from torch import Tensor


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor, *dtypes: torch.dtype) -> None:
    """Checks that `tensor` is contiguous, of this shape, on the device of `like`, and of one of `dtypes`.

    Args:
        name: of the argument, for the error.
        dtypes: the type of `like` unless given.

    Raises:
        ValueError: it isn't; the text has the value and what is allowed.
    """
    dtypes = dtypes or (like.dtype,)
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}; allowed: {list(shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; allowed: contiguous")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; allowed: {like.device}")
