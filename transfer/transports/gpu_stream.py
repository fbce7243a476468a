"""The stream on which a link's thread works on a GPU."""

import torch

HIGHEST = -1
"""Priority of a stream whose programs start before those of the engine's steps, which have 0."""


def take_link_stream() -> None:
    """Gives the calling thread a stream of its own for all that it launches, in a process that uses a GPU.

    On the default stream, copies of frames would queue behind every program of a step that hasn't started yet.
    """
    if torch.cuda.is_initialized():
        torch.cuda.set_stream(torch.cuda.Stream(priority=HIGHEST))
