"""States and rows in parts of a few numbers, so that a thread holds no whole operand of a product in registers."""

import triton
import triton.language as tl


@triton.jit
def _places(place, first, size, dim, column):
    """Addresses [PART, DIM] of a state's rows from `first` on, and which of them are the state's."""
    return place + first[:, None] * dim + column[None], (first < size)[:, None] & (column < dim)[None]


@triton.jit
def load_state(place, start, size, dim, column, SIZE: tl.constexpr, PART: tl.constexpr):
    """A state [size, dim] as a tuple of SIZE // PART tensors [PART, DIM]; zeros if no token is before the row's.

    Args:
        place: address of the state's first number.
        start: address of the number of tokens before.
        column: columns [DIM] that the program computes.
    """
    s = ()
    for part in tl.static_range(SIZE // PART):
        number = part * PART + tl.arange(0, PART)
        begun = tl.load(start) + 0 * number > 0  # a vector, which Triton's interpreter can widen
        places, held = _places(place, number, size, dim, column)
        s += (tl.load(places, mask=held & begun[:, None], other=0.0),)  # type: ignore[assignment]
    return s


@triton.jit
def store_state(place, s, size, dim, column, SIZE: tl.constexpr, PART: tl.constexpr):
    """Writes a state in the form of `load_state`."""
    for part in tl.static_range(SIZE // PART):
        places, held = _places(place, part * PART + tl.arange(0, PART), size, dim, column)
        tl.store(places, s[part], mask=held)


@triton.jit
def load_rows(rows, at, there, stride, first, size, PART: tl.constexpr):
    """Numbers [CHUNK, PART] from `first` on of the rows `at`; zeros where a row isn't `there`, or has no more."""
    number = first + tl.arange(0, PART)
    return tl.load(rows + at[:, None] * stride + number[None], mask=there[:, None] & (number < size)[None], other=0.0)


@triton.jit
def next_state(
    s, rows, at, there, stride, size, later, last, SIZE: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr
):
    """The state behind a chunk: exp(last) s + rows' later, in the parts of `load_state`.

    Args:
        s: the state before the chunk.
        rows, at, there, stride, size: see `load_rows`.
        later: [CHUNK, DIM] what each token adds, decayed to the chunk's end.
        last: logarithm of the decay over the chunk.
    """
    new = ()
    for part in tl.static_range(SIZE // PART):
        own = load_rows(rows, at, there, stride, part * PART, size, PART).to(tl.float32)
        new += (tl.dot(tl.trans(own), later, s[part] * tl.exp(last), input_precision=PRECISION),)  # type: ignore[assignment]
    return new
