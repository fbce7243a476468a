"""Checks of packages whose kernels compute a part of a model on GPUs."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

TYPES = (torch.float16, torch.bfloat16)
"""Types of the numbers that they take."""


class Unavailable(Exception):
    """A package can't compute what it is asked for; the text says why, as a sentence without a full stop."""


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
