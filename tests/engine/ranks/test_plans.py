"""Step plans that cross from rank 0 to the other ranks."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.engine.plan import PromptPart, SlotCopy, StepPlan
from kvrelay.engine.ranks.plans import SHAPED_BY_LEADER, PlanReader, PlanWriter
from kvrelay.engine.request import SamplingParams
from kvrelay.engine.shaping import Shaping

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7]),
    top_k=st.integers(0, 3),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=st.frozensets(st.integers(0, 9), max_size=3),
    logit_bias=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([-1.0, 2.5])), max_size=2).map(tuple),
    bad_words=st.lists(st.tuples(st.integers(0, 9)), max_size=2).map(tuple),
    logprobs=st.none() | st.integers(0, 3),
)
TOKENS = st.integers(0, 2**31 - 1)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    rows = draw(st.integers(1, 4))
    lengths = np.array(draw(st.lists(st.integers(1, 5), min_size=rows, max_size=rows)), np.int32)

    def numbers(count: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
        return np.array(draw(st.lists(TOKENS, min_size=count, max_size=count)), np.int32)

    width = draw(st.integers(0, 3))
    shaped = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    return StepPlan(
        step=draw(st.integers(0, 2**40)),
        handles=tuple(range(rows)),
        tokens=numbers(int(lengths.sum())),
        starts=numbers(rows),
        lengths=lengths,
        block_tables=numbers(rows * width).reshape(rows, width),
        sample=np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows))),
        sampling=tuple(draw(st.lists(PARAMS, min_size=rows, max_size=rows))),
        generated=numbers(rows),
        feeds=draw(st.none() | st.just(np.full(rows, -1, np.int32))),
        shapings=tuple(Shaping(SamplingParams(), (1,), (), None) if each else None for each in shaped)
        if any(shaped)
        else None,
        drafts=draw(st.none() | st.just(np.zeros(rows, np.bool_))),
        prompt_parts=draw(st.sampled_from([(), (PromptPart(0, 0, numbers(2), 1, 3),)])),
        side_tables=draw(st.sampled_from([(), (numbers(rows)[:, None],)])),
        copies=draw(st.sampled_from([(), (SlotCopy(1, 2, 3, True),)])),
    )


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        return all(same(getattr(one, each.name), getattr(other, each.name)) for each in dataclasses.fields(one))
    return one == other


@given(st.lists(plans(), min_size=1, max_size=4))
def test_other_ranks_read_what_rank_0_has_planned(steps: list[StepPlan]) -> None:
    writer, reader = PlanWriter(), PlanReader()
    for plan in steps:
        read = reader.read(writer.write(plan))
        shapings = None
        if plan.shapings is not None:
            shapings = tuple(None if each is None else SHAPED_BY_LEADER for each in plan.shapings)
        assert same(dataclasses.replace(plan, shapings=shapings), read)
