"""The first way of running a model whose logits agree with those of transformers' own forward pass."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from transformers import PreTrainedModel

from kvrelay.engine.kv.layout import CacheLayout
from kvrelay.engine.models.general import check
from kvrelay.engine.models.general.flat import FlatWay
from kvrelay.engine.models.general.gather import AgainWay, GatherWay
from kvrelay.engine.models.general.native import Call
from kvrelay.engine.models.general.places import Placing
from kvrelay.engine.models.general.step import UnfitError, Way
from kvrelay.engine.models.general.store import Store, scratch_pools
from kvrelay.engine.ranks.collective import NO_GROUP, Collective, CollectiveError, all_agree
from kvrelay.kernels.cpu.program import Team

logger = logging.getLogger(__name__)

MakeWay = Callable[[PreTrainedModel, Store, Team | None], Way]
Kept = Literal["cache", "cache and tokens", "tokens"]
PlaceWay = Callable[[Kept], Placing]
"""Makes the layout of a model's cache and its places in the pools."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The way that a model runs in."""

    name: str
    placing: Placing
    make: Callable[[Store], Way]
    """Makes the way, over the pools that serve."""
    difference: tuple[float, float]
    """See `check.difference`."""
    refused: tuple[tuple[str, str], ...]
    """Faster ways, each with the reason why the model can't be run in it."""

    @property
    def layout(self) -> CacheLayout:
        return self.placing.layout


def choose(
    model: PreTrainedModel,
    prompts: check.Prompts,
    place: PlaceWay,
    team: Team | None,
    dtype: torch.dtype,
    group: Collective = NO_GROUP,
) -> Choice:
    """The first way that agrees, on all ranks that share the model's layers, each of which calls this.

    Args:
        prompts: with the logits of transformers' own code.
        team: threads of the native kernels; None without those.

    Raises:
        ValueError: none does; the text says why for each.
        CollectiveError: a rank is lost.
    """
    refused: list[tuple[str, str]] = []
    for name, make, kept in WAYS:
        try:
            placing = place(kept)
            blocks = check.blocks_of(prompts, placing.layout.block_size)
            pools = scratch_pools(placing.layout, blocks, check.slots_of(prompts), model.device)
            way = make(model, Store(placing, pools), team)
            found = check.difference(way, prompts, placing)
            # KV in 8 bits is rounded more than any sum.
            rounded = any(track.scaled for _, track in placing.layout.tracks)
            exactness = torch.bfloat16 if rounded else dtype
            if not all_agree(group, check.agrees(found, exactness)):
                raise UnfitError(f"its logits differ by {found[0]:.2g} of the largest, {found[1]:.2g} of their spread")
            serving = _serving(model, make, team)
            kernels = _of_kernels(way, prompts, placing) if isinstance(way, FlatWay) else None
            agreed = all_agree(group, kernels is not None and check.agrees(kernels, exactness))
            if agreed and kernels is not None and isinstance(way, FlatWay):
                found, serving = kernels, _native(model, dict(way.calls), team)
            elif kernels is not None:
                logger.warning("the attention kernels' logits differ by %g, so torch attends", kernels[0])
            return Choice(name, placing, serving, found, tuple(refused))
        except CollectiveError:
            raise
        except Exception as error:  # noqa: BLE001  # the model's code fails in whatever way, and on all ranks in the same
            reason = str(error) if isinstance(error, UnfitError) else f"{type(error).__name__}: {error}"
            refused.append((name, reason.splitlines()[0][:200]))
            logger.info("%s doesn't run as %s: %s", type(model).__name__, name, reason)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
    raise ValueError(f"{type(model).__name__} can't be served ({reasons})")


def _of_kernels(way: FlatWay, prompts: check.Prompts, placing: Placing) -> tuple[float, float] | None:
    """The difference with the attention kernels, which the way uses from now on; None if there are none, or they fail.

    Raises:
        CollectiveError: a rank is lost.
    """
    try:
        return check.difference(way, prompts, placing) if way.use_kernels() else None
    except CollectiveError:
        raise
    except Exception as error:  # noqa: BLE001  # a compiler or a driver fails in whatever way; torch attends without them
        logger.warning("the attention kernels fail, so torch attends: %s: %s", type(error).__name__, str(error)[:200])
        return None


def _serving(model: PreTrainedModel, make: MakeWay, team: Team | None) -> Callable[[Store], Way]:
    return lambda store: make(model, store, team)


def _native(model: PreTrainedModel, calls: Mapping[int, Call], team: Team | None) -> Callable[[Store], Way]:
    def make(store: Store) -> Way:
        way = FlatWay(model, store, team)
        way.calls.update(calls)
        way.use_kernels()
        return way

    return make


WAYS: tuple[tuple[str, MakeWay, Kept], ...] = (
    ("flat", FlatWay, "cache"),
    ("gather", GatherWay, "cache"),
    ("gather, whole prompts", partial(GatherWay, whole=True), "cache and tokens"),
    ("gather, row by row", partial(GatherWay, single=True), "cache"),
    ("again", AgainWay, "tokens"),
)
"""Name and class of each way, and what it keeps of a sequence; fastest first."""
