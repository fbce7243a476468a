"""Product code without one line of its protection, to show that a test would notice."""

import importlib.util
import inspect
import sys
from types import FunctionType, ModuleType

import pytest


def mutant(module: ModuleType, line: str, instead: str) -> ModuleType:
    """A copy of `module` with `instead` in the place of `line`; the module itself stays unchanged.

    Raises:
        LookupError: `line` doesn't occur exactly once.
    """
    source = inspect.getsource(module)
    if source.count(line) != 1:
        raise LookupError(
            f"{line!r} is {source.count(line)} times in {module.__name__}; adapt the test to today's source"
        )
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
    weak = vars(getattr(mutant(sys.modules[kind.__module__], line, instead), kind.__name__))
    for name, method in weak.items():
        if isinstance(method, FunctionType | property):
            patch.setattr(kind, name, method)
