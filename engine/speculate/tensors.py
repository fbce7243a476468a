"""The tensors of a proposer's checkpoint: one file of safetensors."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvrelay.engine.models.reading.checkpoint import refuse_pickled

SHOWN = 4


def find_file(folder: Path, name: str) -> Path:
    """The file of this name in the folder.

    Raises:
        ValueError: there is none, or a pickled one in its place.
    """
    path = folder / name
    if not path.is_file():
        refuse_pickled(folder, name)
        raise ValueError(f"{path}: no such file")
    return path


class Tensors:
    """Tensors of one file, each to be taken once."""

    def __init__(self, folder: Path, name: str, device: torch.device) -> None:
        """
        Args:
            name: of the file.
            device: where tensors go that are taken.

        Raises:
            ValueError: it isn't there, or can't be read as tensors; the text names the file.
        """
        self.path = find_file(folder, name)
        try:
            self._left = load_file(self.path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{self.path}: not readable as tensors: {str(error).splitlines()[0]}") from error
        self._device = device

    @property
    def left(self) -> list[str]:
        """Names of the tensors that weren't taken yet, in alphabetical order."""
        return sorted(self._left)

    def rename(self, old: str, new: str) -> None:
        """Renames tensors: names that begin with `old` begin with `new` instead."""
        self._left = {
            new + name[len(old) :] if name.startswith(old) else name: tensor for name, tensor in self._left.items()
        }

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor with this name.

        Raises:
            ValueError: it isn't there, has another shape, or a number that isn't finite; names file and tensor.
        """
        if name not in self._left:
            raise ValueError(f"{self.path}: tensor {name} {list(shape)} is missing")
        tensor = self._left.pop(name)
        if tensor.shape != shape:
            raise ValueError(f"{self.path}: tensor {name} has shape {list(tensor.shape)}; expected: {list(shape)}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{self.path}: tensor {name} has a number that is infinite or NaN")
        return tensor.to(self._device)

    def finish(self) -> None:
        """Raises ValueError, naming some, if tensors are left."""
        if self._left:
            names = ", ".join(self.left[:SHOWN]) + (f" and {len(self._left) - SHOWN} more" * (len(self._left) > SHOWN))
            raise ValueError(f"{self.path}: tensors that such a checkpoint doesn't have: {names}")
