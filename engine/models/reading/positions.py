"""Rotary positions of a model, as config.json describes them. No torch.

A head's numbers are rotated in pairs. Kernels know one arrangement: number i and number i + D/2 of a head are a pair,
and each pair has a frequency. Other arrangements become this one when query and key weights are read (`head_order`): a
permutation of a head's numbers changes no product of a query with a key.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from kvrelay.engine.models.reading.fields import Fields

RopeKind = Literal["none", "default", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Frequencies `theta ** (-2i / n)` of the first n numbers of a head, scaled as `kind` says; none turns nothing."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    """Factor by which the context became longer, for linear, llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    """Positions that the model was first trained on, for llama3, yarn and longrope."""
    share: float = 1.0
    """Share of a head's numbers that are rotated."""
    attention_factor: float = 1.0
    """Factor of the rotated numbers of queries and keys, for yarn and longrope."""
    fast_turns: float = 32.0
    """Least number of turns within the original context that yarn leaves as they are."""
    slow_turns: float = 1.0
    """Largest number of turns within the original context that yarn stretches by `factor`."""
    truncate: bool = True
    """Whether yarn rounds the bounds between them to whole frequencies."""
    factors: tuple[float, ...] = ()
    """Divisors of the frequencies, for longrope."""
    long_factors: tuple[float, ...] = ()
    """Divisors of the frequencies for contexts longer than `original_max_positions`, for longrope."""

    def width(self, head_dim: int) -> int:
        """Numbers of a head that are rotated."""
        return int(head_dim * self.share)

    def stretched(self) -> "RopeConfig":
        """longrope's rotations for contexts longer than `original_max_positions`."""
        return replace(self, factors=self.long_factors)


NO_ROPE = RopeConfig(1.0, "none")


def head_order(rope: RopeConfig, head_dim: int, interleaved: bool) -> list[int] | None:
    """Where the numbers of a head are in the checkpoint, in the order of the kernels; None if it is the same.

    Args:
        interleaved: whether numbers 2i and 2i + 1 are a pair in the checkpoint; else i and i + n/2, of n rotated ones.
    """
    width = rope.width(head_dim)
    if width == head_dim and not interleaved:
        return None
    places, rest = list(range(width)), list(range(width, head_dim))
    first, second = (places[::2], places[1::2]) if interleaved else (places[: width // 2], places[width // 2 :])
    middle = len(rest) // 2
    return first + rest[:middle] + second + rest[middle:]


_ROPE_FIELDS: dict[RopeKind, frozenset[str]] = {
    "default": frozenset({"rope_theta", "rope_type", "type"}),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"attention_factor", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim", "truncate"}
        | {"original_max_position_embeddings"}
    ),
    "longrope": frozenset(
        {"attention_factor", "factor", "long_factor", "original_max_position_embeddings", "short_factor"}
    ),
}
"""The fields that each kind reads. Each reads those of the default kind too."""
_OTHER_ROPE_FIELDS = frozenset({"mrope_section", "partial_rotary_factor"})
"""Fields that transformers reads for kinds that aren't served, or for some families."""
ROPE_KINDS: Mapping[str, RopeKind] = {kind: kind for kind in get_args(RopeKind) if kind != "none"}
"""Kinds by their names in config.json."""


def read_rope(
    fields: Fields, head_dim: int, partial: bool = False, kinds: Mapping[str, RopeKind] = ROPE_KINDS
) -> RopeConfig:
    """Rotary positions, as transformers 5 reads them (`RotaryEmbeddingConfigMixin` in `modeling_rope_utils.py`).

    `rope_scaling`, which older versions write, wins over `rope_parameters` unless it is empty. `rope_theta` inside of
    it wins over the one beside it. `original_max_position_embeddings` beside it wins over the one inside, and
    `max_position_embeddings` stands in for both. A field that the kind doesn't read is ignored if transformers reads it
    for another kind, and refused if it doesn't.

    Args:
        partial: whether models of this family can rotate a part of each head only.
        kinds: allowed ones, by their names in config.json.
    """
    scaling = fields.fields("rope_scaling")
    if scaling is None or not scaling.names:
        scaling = fields.fields("rope_parameters") or Fields("config.json: rope_parameters", {})
    return read_scaling(fields, scaling, head_dim, partial, kinds)


def read_scaling(
    fields: Fields,
    scaling: Fields,
    head_dim: int,
    partial: bool = False,
    kinds: Mapping[str, RopeKind] = ROPE_KINDS,
) -> RopeConfig:
    """As `read_rope`, from the object `scaling` of config.json."""
    theta = scaling.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    name = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = kinds[scaling.choice(name, tuple(kinds), default="default")]
    for unknown in sorted(scaling.names - _OTHER_ROPE_FIELDS.union(*_ROPE_FIELDS.values())):
        scaling.refuse(unknown, ", ".join(sorted(_ROPE_FIELDS["default"] | _ROPE_FIELDS[kind])))
    rope = RopeConfig(theta, kind, share=_share(fields, scaling, head_dim, partial, kind))
    if kind in ("default", "dynamic"):
        # Dynamic scaling begins behind `max_position_embeddings`, and no context is that long.
        if kind == "dynamic":
            scaling.number("factor")
        return replace(rope, kind="default")
    if kind == "linear":
        return replace(rope, factor=scaling.number("factor"))
    beside = fields.get("original_max_position_embeddings") is not None
    positions = fields.integer("max_position_embeddings")
    original = (fields if beside else scaling).integer("original_max_position_embeddings", default=positions, minimum=2)
    rope = replace(rope, original_max_positions=original)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        if high <= low:
            scaling.refuse("high_freq_factor", f"a number above low_freq_factor ({low})")
        return replace(rope, factor=scaling.number("factor"), low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn" and theta == 1:
        (scaling if scaling.get("rope_theta") is not None else fields).refuse("rope_theta", "another number than 1")
    if kind == "yarn" and "factor" not in scaling.names:
        scaling.refuse("factor", "a number above 0, or null")
    factor = scaling.number("factor", default=positions / original)
    if kind == "yarn":
        return replace(
            rope,
            factor=factor,
            attention_factor=scaling.number("attention_factor", default=_yarn_attention(scaling, factor)),
            fast_turns=scaling.number("beta_fast", default=32.0),
            slow_turns=scaling.number("beta_slow", default=1.0),
            truncate=scaling.boolean("truncate", True),
        )
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        rope,
        attention_factor=scaling.number("attention_factor", default=attention),
        factors=scaling.numbers("short_factor", rope.width(head_dim) // 2),
        long_factors=scaling.numbers("long_factor", rope.width(head_dim) // 2),
    )


def _share(fields: Fields, scaling: Fields, head_dim: int, partial: bool, kind: RopeKind) -> float:
    """The share of a head's numbers that are rotated."""
    source = scaling if scaling.get("partial_rotary_factor") is not None else fields
    share = source.number("partial_rotary_factor", default=1.0)
    if not partial:
        # transformers ignores it in these families for the default kind, and fails for others.
        if share != 1 and kind != "default":
            source.refuse("partial_rotary_factor", "1.0")
        return 1.0
    width = int(head_dim * share)
    if not 0 < width <= head_dim or width % 2:
        source.refuse("partial_rotary_factor", ", ".join(str(n / head_dim) for n in range(2, head_dim + 1, 2)))
    return share


def _yarn_attention(scaling: Fields, factor: float) -> float:
    """The factor of queries and keys that yarn has without `attention_factor`."""

    def scale(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0

    both = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if all(both):
        return scale(scaling.number("mscale")) / scale(scaling.number("mscale_all_dim"))
    return scale(1.0)
