"""Leaves out rows that nobody reads, behind the last layer's attention or state.

A chunk of a prompt yields one token, behind its last row, or none. Behind the last attention and the last state of a
step, each row is computed by itself. So products, MLPs and experts compute only the wanted rows there; the results of
other rows are zeros.

    layer 0 .. n - 2        layer n - 1
    all tokens              norm, queries, keys, values, attention | output, norm, MLP or experts, last norm, head
                            all tokens                             | wanted ones
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from kvrelay.engine.models.general.step import UnfitError

_current: ContextVar["Narrowing | None"] = ContextVar("narrowing", default=None)


class Narrowing:
    """Rows that the steps of one model may leave out. All its steps have equally many attentions and states."""

    def __init__(self) -> None:
        self._most = 0
        """Largest number of attentions and states of a step so far."""
        self._count = self._tokens = 0
        self._wanted: Tensor | None = None
        self._narrowed = False

    @contextmanager
    def running(self, tokens: int, wanted: Tensor | None) -> Iterator[None]:
        """Within it, a step of so many tokens is computed.

        Args:
            wanted: int64 [N] rows whose results are read; None for all. If there are none, the first row is computed,
                since kernels and the model's own code expect one.
        """
        self._count, self._tokens, self._narrowed = 0, tokens, False
        if wanted is not None and not len(wanted):
            wanted = wanted.new_zeros(1)
        self._wanted = None if wanted is None or len(wanted) == tokens else wanted
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
        self._most = max(self._most, self._count)

    def mix(self) -> None:
        """Notes an attention or a state.

        Raises:
            UnfitError: tokens that it may read were left out.
        """
        self._count += 1
        if self._narrowed:
            raise UnfitError(f"a step attends, or goes on with states, more than {self._most} times, as others did")

    def rows(self, tokens: int) -> Tensor | None:
        """The tokens to compute, of an input of so many; None for all."""
        if self._wanted is None or tokens != self._tokens or not 0 < self._most == self._count:
            return None
        self._narrowed = True
        return self._wanted


def mix() -> None:
    """Notes an attention or a state of the running step; see `Narrowing.mix`."""
    narrowing = _current.get()
    if narrowing is not None:
        narrowing.mix()


def rows_of(tokens: int) -> Tensor | None:
    """As `Narrowing.rows`, of the running step."""
    narrowing = _current.get()
    return None if narrowing is None else narrowing.rows(tokens)


def narrowed(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`run(x)` for x [1, T, width], whose rows it computes one by one: zeros where nobody reads them."""
    rows = rows_of(x.shape[1]) if x.dim() == 3 and len(x) == 1 else None
    if rows is None:
        return run(x)
    found = run(x[:, rows])
    return found.new_zeros((1, x.shape[1], found.shape[2])).index_copy_(1, rows, found)
