"""Product code without one line of its protection, to show that a test would notice."""

import importlib.util
import inspect
import sys
from types import CellType, FunctionType, ModuleType
from typing import Any

import pytest


def mutant(module: ModuleType, line: str, instead: str) -> ModuleType:
    """A copy of `module` with `instead` in the place of `line`; the module itself stays unchanged.

    Raises:
        LookupError: `line` doesn't occur exactly once.
    """
    source = inspect.getsource(module)
    if source.count(line) != 1:
        raise LookupError(f"{line!r} is {source.count(line)} times in {module.__name__}; adapt it to today's source")
    spec = importlib.util.spec_from_loader(f"{module.__name__}__mutant", loader=None, origin=module.__file__)
    if spec is None:
        raise LookupError(module.__name__)
    copy = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name.
    sys.modules[copy.__name__] = copy
    try:
        exec(compile(source.replace(line, instead), str(module.__file__), "exec"), vars(copy))
    finally:
        del sys.modules[copy.__name__]
    return copy


def weaken(patch: pytest.MonkeyPatch, kind: type, line: str, instead: str) -> None:
    """Replaces `line` by `instead` in the methods of `kind`, until `patch` is undone."""
    module = sys.modules[kind.__module__]
    weak = vars(getattr(mutant(module, line, instead), kind.__name__))

    def moved(method: Any) -> Any:
        """The method with the globals of the real module, and with `kind` as the class that `super()` refers to."""
        if isinstance(method, property):
            return property(moved(method.fget))
        code = method.__code__
        cells = zip(code.co_freevars, method.__closure__ or (), strict=True)
        closure = tuple(CellType(kind) if name == "__class__" else cell for name, cell in cells)
        function = FunctionType(code, vars(module), method.__name__, method.__defaults__, closure)
        function.__kwdefaults__ = method.__kwdefaults__
        return function

    for name, method in weak.items():
        if isinstance(method, FunctionType | property):
            patch.setattr(kind, name, moved(method))
