"""Step plans as bytes: rank 0 plans, and sends each plan to the other ranks before it runs the step itself.

A plan is one msgpack list; its arrays are their bytes. Sampling parameters are sent once and then named by a number,
because most rows of a step have those that they had in the step before. What shapes a row's logits stays with rank 0,
which chooses the tokens of such rows; the others only learn which rows these are.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import msgpack  # type: ignore[import-untyped]  # it ships no types
import numpy as np
from numpy.typing import NDArray

from kvrelay.engine.plan import PromptPart, SlotCopy, StepPlan
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.shaping import Shaping

MAX_KNOWN = 4096
"""Sampling parameters that both ends remember. When there are more, both forget all of them."""
INT32 = np.dtype(np.int32)
BOOL = np.dtype(np.bool_)
SHAPED_BY_LEADER = Shaping(SamplingParams(), (), (), None)
"""Shaping of a row, at ranks other than 0, which are told its token."""
_FIELDS = [field.name for field in fields(SamplingParams) if field.name != "constraint"]
_STOPS = _FIELDS.index("stop_token_ids")


class PlanWriter:
    """Rank 0's writing end."""

    def __init__(self) -> None:
        self._known: dict[SamplingParams, int] = {}

    def write(self, plan: StepPlan) -> bytes:
        """The plan's bytes. Each plan is to be written once, and read by every other rank, in this order."""
        forget = len(self._known) > MAX_KNOWN
        if forget:
            self._known.clear()
        fresh: list[list[Any]] = []
        numbers = []
        for params in plan.sampling:
            number = self._known.get(params)
            if number is None:
                number = self._known[params] = len(self._known)
                fresh.append(_plain(params))
            numbers.append(number)
        shaped = None if plan.shapings is None else [shaping is not None for shaping in plan.shapings]
        packed: bytes = msgpack.packb(
            [
                forget,
                fresh,
                numbers,
                plan.step,
                plan.handles,
                _bytes(plan.tokens),
                _bytes(plan.starts),
                _bytes(plan.lengths),
                [_bytes(table) for table in (plan.block_tables, *plan.side_tables)],
                _bytes(plan.sample),
                _bytes(plan.generated),
                None if plan.feeds is None else _bytes(plan.feeds),
                shaped,
                None if plan.drafts is None else _bytes(plan.drafts),
                [(part.row, part.begin, _bytes(part.targets), part.top, part.first) for part in plan.prompt_parts],
                [tuple(copy) for copy in plan.copies],
            ]
        )
        return packed


class PlanReader:
    """The reading end of a rank other than 0."""

    def __init__(self) -> None:
        self._known: list[SamplingParams] = []

    def read(self, data: bytes) -> StepPlan:
        """The plan of these bytes, of `PlanWriter.write`."""
        (
            forget,
            fresh,
            numbers,
            step,
            handles,
            tokens,
            starts,
            lengths,
            tables,
            sample,
            generated,
            feeds,
            shaped,
            drafts,
            parts,
            copies,
        ) = msgpack.unpackb(data, use_list=False)
        if forget:
            self._known.clear()
        self._known.extend(map(_params, fresh))
        rows = len(handles)
        block_tables, *side_tables = (_array(table, INT32).reshape(rows, -1) for table in tables)
        return StepPlan(
            step=step,
            handles=handles,
            tokens=_array(tokens, INT32),
            starts=_array(starts, INT32),
            lengths=_array(lengths, INT32),
            block_tables=block_tables,
            sample=_array(sample, BOOL),
            sampling=tuple([self._known[number] for number in numbers]),
            generated=_array(generated, INT32),
            feeds=None if feeds is None else _array(feeds, INT32),
            shapings=None if shaped is None else tuple([SHAPED_BY_LEADER if each else None for each in shaped]),
            drafts=None if drafts is None else _array(drafts, BOOL),
            prompt_parts=tuple(
                PromptPart(row, begin, _array(targets, INT32), top, first) for row, begin, targets, top, first in parts
            ),
            side_tables=tuple(side_tables),
            copies=tuple(SlotCopy(*copy) for copy in copies),
        )


def _bytes(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _array(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.frombuffer(data, dtype)


def _plain(params: SamplingParams) -> list[Any]:
    values = [getattr(params, name) for name in _FIELDS]
    values[_STOPS] = sorted(params.stop_token_ids)
    return values


def _params(values: Sequence[Any]) -> SamplingParams:
    named = dict(zip(_FIELDS, values, strict=True))
    return replace(SamplingParams(), **{**named, "stop_token_ids": frozenset(named["stop_token_ids"])})
