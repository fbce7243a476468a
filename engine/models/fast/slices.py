"""The part of a checkpoint that one rank holds.

    tensor                 rows                          columns
    embedding, head        a part of the vocabulary      all
    qkv                    the rank's heads              all
    output                 all                           those of its query heads
    gate_up                a part of the MLP's width     all
    down                   all                           the same part
    router                 all                           all

With whole experts on each rank, all of an expert's rows and columns are on one of them.

So each rank computes whole heads and columns of the MLP by itself, and what the ranks have behind `output` and `down`
is added up (Shoeybi et al., arXiv:1909.08053). The first rank of a stage has the biases of these two. The first of
several pipeline stages has embedding, last norm and head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvrelay.engine.config import Quantization
from kvrelay.engine.models.reading.checkpoint import EMBEDDING, Checkpoint, projections
from kvrelay.engine.models.reading.config import ModelConfig
from kvrelay.engine.models.reading.stored import HEAD
from kvrelay.engine.ranks.collective import ALONE, Place
from kvrelay.engine.ranks.spans import Span, even_span, whole

NORM = "model.norm"
SUMMED = ("output", "down", "shared_down")
"""Projections whose inputs are divided."""


class Part(NamedTuple):
    """Some rows of a tensor, or of the tensors of a layer, in the checkpoint."""

    name: str
    rows: Span


@dataclass(frozen=True, slots=True)
class Slices:
    """The part of a checkpoint that one rank reads."""

    config: ModelConfig
    """Config of the whole model."""
    place: Place
    own: ModelConfig
    """Config of the rank's part."""
    queries: Span
    """Outputs of the rank's query heads, among those of all."""
    heads: Span
    """These heads."""
    keys: Span
    """Outputs of its key heads, and so of its value heads."""
    inner: Span
    """Columns of the MLP's width."""
    expert: Span
    """Columns of an expert's width."""
    shared: Span
    """Columns of the width of an MLP beside the experts."""
    vocabulary: Span
    """Tokens whose embeddings and logits it has."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        place: Place = ALONE,
        quantization: Quantization = "none",
        *,
        whole_experts: bool = False,
        spares: int = 0,
    ) -> "Slices":
        """The slices of a model.

        Args:
            config: of the whole model, for which `check_degree` has passed.
            quantization: the option.
            whole_experts: whether a rank has whole experts, and not a part of each.
            spares: experts that it has room for beside these.
        """
        own, dim = config.for_rank(place, quantization, whole=whole_experts, spares=spares), config.head_dim
        number, keys = place.rank % place.degree.tensor, place.degree.kv_heads(place.rank, config.kv_heads)
        experts = config.traits.experts

        def inner(width: int, whole_width: bool = False) -> Span:
            return whole(width) if whole_width else even_span(width, place, config.width_unit(width, quantization))

        queries = range(number * own.heads, (number + 1) * own.heads)
        return cls(
            config=config,
            place=place,
            own=own,
            queries=_heads(queries, config.heads, dim),
            heads=_heads(queries, config.heads, 1),
            keys=_heads(keys, config.kv_heads, dim),
            inner=inner(config.intermediate_size),
            expert=inner(0 if experts is None else experts.width, whole_experts),
            shared=inner(0 if experts is None else experts.shared),
            vocabulary=even_span(config.vocab_size, place),
        )

    @property
    def has_vocabulary(self) -> bool:
        """Whether the rank has embedding, last norm and head: those of the first pipeline stage do."""
        return self.place.stage == 0

    def outputs(self, part: str, layer: int) -> list[Part]:
        """The rows of a layer's projection (`checkpoint.projections`), by tensor, in the order of joined outputs."""
        outputs = projections(self.config, layer)[part].outputs
        experts = self.own.traits.experts
        if (
            part in ("gate_up", "down")
            and experts is not None
            and experts.held is not None
            and self._has_experts(layer)
        ):
            found = [Part(name, whole(count)) for name, count in outputs.items() if not experts.is_elsewhere(name)]
            # Whatever the spare slots begin with: nothing asks for it.
            return found + found[: experts.spares * len(found) // len(experts.held)]
        if part in (*SUMMED, "router") or self.place.degree.tensor == 1:
            return [Part(name, whole(count)) for name, count in outputs.items()]
        if part != "qkv" and self._has_experts(layer):
            own = self.shared if part == "shared_gate_up" else self.expert
            return [Part(name, own) for name in outputs]
        spans = [self.queries, self.keys, self.keys] if part == "qkv" else [self.inner, self.inner]
        if len(outputs) == len(spans):
            return [Part(name, span) for name, span in zip(outputs, spans, strict=True)]
        # One tensor in the checkpoint, or an MLP without a gate.
        (name, count), pieces, offset = next(iter(outputs.items())), list[Part](), 0
        for span in spans:
            if offset < count:
                pieces.append(Part(name, span.within(offset, count)))
            offset += span.of
        return pieces

    def inputs(self, part: str, layer: int) -> Span:
        """The columns of a layer's projection."""
        if part in SUMMED and self.place.degree.tensor > 1:
            if part == "down" and self._has_experts(layer):
                return self.expert
            return {"output": self.queries, "down": self.inner, "shared_down": self.shared}[part]
        return whole(projections(self.config, layer)[part].inputs)

    def _has_experts(self, layer: int) -> bool:
        experts = self.config.traits.experts
        return experts is not None and experts.in_layer(layer)

    def reads(self, name: str) -> bool:
        """Whether the rank has a part of this tensor."""
        if name.startswith("model.layers."):
            first, experts = self.own.first_layer, self.own.traits.experts
            layer, _, own = name.removeprefix("model.layers.").partition(".")
            has = experts is None or not experts.is_elsewhere(own)
            return has and first <= int(layer) < first + self.own.layers
        return self.has_vocabulary

    @property
    def head(self) -> Part:
        """The layer that the head is made of."""
        return Part(EMBEDDING if self.config.tie_embeddings else HEAD, self.vocabulary)


def _heads(heads: range, of: int, dim: int) -> Span:
    """The numbers of some heads."""
    return Span(heads.start * dim, heads.stop * dim, len(heads) * dim, of * dim)


def share_hashes(checkpoint: Checkpoint, place: Place) -> None:
    """Has each rank hash a part of the checkpoint's tensors, so that no rank must read all of them.

    Raises:
        CollectiveError: a rank of the group is lost.
    """
    group, names = place.all, sorted(checkpoint.tensors)
    if group.size == 1:
        return
    sizes = torch.tensor([checkpoint.tensors[name].end - checkpoint.tensors[name].begin for name in names])
    owners = ((sizes.cumsum(0) - 1).clamp(min=0) * group.size // max(1, int(sizes.sum()))).tolist()
    hashes = torch.zeros(len(names), 16, dtype=torch.uint8)
    for index, (name, owner) in enumerate(zip(names, owners, strict=True)):
        if owner == group.place:
            hashes[index] = torch.frombuffer(bytearray.fromhex(checkpoint.hash_of(name)), dtype=torch.uint8)
    # As numbers that every collective carries.
    found = group.gather(hashes.view(torch.int32)).view(torch.uint8)
    for index, (name, owner) in enumerate(zip(names, owners, strict=True)):
        checkpoint.learn(name, bytes(found[owner, index].tolist()).hex())
