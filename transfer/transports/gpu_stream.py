"""The streams on which a link's thread works on a GPU."""

import threading
from contextlib import AbstractContextManager, nullcontext

import torch

HIGHEST = -1
"""Priority of a stream whose programs start before those of the engine's steps, which have 0."""

_second = threading.local()


def take_link_stream() -> None:
    """Gives the calling thread a stream of its own for all that it launches, in a process that uses a GPU.

    On the default stream, copies of frames would queue behind every program of a step that hasn't started yet.
    """
    if torch.cuda.is_initialized():
        torch.cuda.set_stream(torch.cuda.Stream(priority=HIGHEST))


def beside() -> AbstractContextManager[object]:
    """In its context, the calling thread launches on a second stream, the same each time: what waits there for a step
    doesn't hold up what the thread launches otherwise. Changes nothing in a process that uses no GPU.
    """
    if not torch.cuda.is_initialized():
        return nullcontext()
    if not hasattr(_second, "stream"):
        _second.stream = torch.cuda.Stream(priority=HIGHEST)
    return torch.cuda.stream(_second.stream)
