"""Attention by other packages: the checks that all of them need."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from kvrelay.engine.attention.prefill import Shapes, Unavailable

TYPES = (torch.float16, torch.bfloat16)


def imported(module: str, name: str, package: str) -> Any:
    """The object that a module of the package has by this name.

    Raises:
        Unavailable: the module can't be imported, or lacks it; the text names the package.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise Unavailable(f"{package} has no {name} ({error})") from error
    except Exception as error:  # FlashInfer raises RuntimeError if its own parts are of different versions
        raise Unavailable(f"{package} can't be imported ({error})") from error


def check_parameters(function: Callable[..., Any], needed: set[str], package: str, version: str) -> None:
    """Checks that a function of a package has the parameters that are given to it.

    Args:
        version: that has them.

    Raises:
        Unavailable: it hasn't; the text names package and parameters.
    """
    missing = needed - set(inspect.signature(function).parameters)
    if missing:
        raise Unavailable(f"{package} has no {', '.join(sorted(missing))} in {function.__name__}; {version} has")


def check_shapes(shapes: Shapes, package: str, dims: range | tuple[int, ...]) -> None:
    """Checks that a package takes numbers of 16 bits in heads of these sizes.

    Raises:
        Unavailable: it doesn't.
    """
    if shapes.dtype not in TYPES or shapes.layout.scaled or shapes.layout.head_dim not in dims:
        raise Unavailable(f"{package} doesn't take {shapes}")
