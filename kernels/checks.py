"""Checks of what is handed to a kernel: a wrong pointer there is memory corruption, not an error."""

from torch import Tensor


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raises ValueError unless `tensor` is contiguous, of this shape, and of the type and device of `like`."""
    if tensor.dtype != like.dtype:
        raise ValueError(f"{name} is {tensor.dtype}; allowed: {like.dtype}")
    check_placed(name, tensor, shape, like)


def check_placed(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raises ValueError unless `tensor` is contiguous, of this shape, and on the device of `like`."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}; allowed: {list(shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; allowed: contiguous")
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; allowed: {like.device}")
