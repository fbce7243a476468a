"""The tensors of a proposer's checkpoint: one file, of safetensors or pickled. Of the latter only tensors are read."""

from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

SHOWN = 4


def find_file(folder: Path, files: tuple[str, ...]) -> Path:
    """The first of these files that is in the folder.

    Raises:
        ValueError: none is.
    """
    path = next((folder / name for name in files if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"{folder}: has none of the files {', '.join(files)}")
    return path


class Tensors:
    """Tensors of one file, each to be taken once."""

    def __init__(self, folder: Path, files: tuple[str, ...], device: torch.device) -> None:
        """
        Args:
            files: the first of these that is in the folder is read.
            device: where tensors go that are taken.

        Raises:
            ValueError: none is there, or it can't be read as tensors by name; the text names the file.
        """
        self.path = find_file(folder, files)
        try:
            if self.path.suffix == ".safetensors":
                found = load_file(self.path)
            else:
                # Refuses to unpickle anything but tensors and plain containers, so no code of the file runs.
                found = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except (SafetensorError, UnpicklingError, RuntimeError, EOFError, OSError) as error:
            raise ValueError(f"{self.path}: not readable as tensors: {str(error).splitlines()[0]}") from error
        if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
            raise ValueError(f"{self.path}: holds a {type(found).__name__}; allowed: tensors by name")
        self._device = device
        self._left: dict[str, Tensor] = {str(name): tensor for name, tensor in found.items()}

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
            ValueError: it isn't there, or has another shape; names the tensor and the shape expected.
        """
        if name not in self._left:
            raise ValueError(f"{self.path}: tensor {name} {list(shape)} is missing")
        tensor = self._left.pop(name)
        if tensor.shape != shape:
            raise ValueError(f"{self.path}: tensor {name} has shape {list(tensor.shape)}; expected: {list(shape)}")
        return tensor.to(self._device)

    def finish(self) -> None:
        """Raises ValueError, naming some, if tensors are left."""
        if self._left:
            names = ", ".join(self.left[:SHOWN]) + (f" and {len(self._left) - SHOWN} more" * (len(self._left) > SHOWN))
            raise ValueError(f"{self.path}: tensors that such a checkpoint doesn't have: {names}")
