"""The part of a model that a rank holds, by the tensor-parallel plan of its class, and the exchanges of the ranks.

The plan (`PreTrainedModel.tp_plan`) gives modules and parameters a style by name. It is read as data here; the ranks
themselves are kvrelay's own.

    style                       part of a rank                       exchange
    colwise                     outputs                              -
    packed_colwise              outputs of both packed halves        -
    rowwise                     inputs                               sum
    packed_rowwise              inputs of both packed halves         sum, of the module around it
    colwise_gather_output       outputs                              gather
    rowwise_split_input         inputs, cut off the whole ones       sum
    embedding_rowwise           a part of the vocabulary             sum
    embedding_colwise           columns                              gather
    moe_tp_experts              as the experts' own parameters say   sum
    moe_identity_expert         all, of a part of the input          the sum of the experts

All else is whole on each rank, which computes it for itself. With `experts` above 1, each rank has whole experts
in place of a part of each, by the class's plan for that (`PreTrainedModel.ep_plan`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvrelay.engine.degree import MAX_RANKS, Degree

COLUMNS = frozenset({"colwise", "packed_colwise", "colwise_gather_output", "colwise_rep"})
ROWS = frozenset({"rowwise", "packed_rowwise", "rowwise_split_input", "rowwise_rep"})
PACKED = frozenset({"packed_colwise", "packed_rowwise"})
WHOLE = frozenset({"replicated_with_grad_allreduce", "mla_kv_a_proj", "replicate", "local_params"})
"""Styles that change nothing here: they are for training, or for transformers' own distributed tensors."""
Exchange = Literal["sum", "split", "gather", "vocabulary", "experts", "share"]
EXCHANGES: Mapping[str, Exchange] = {
    "rowwise": "sum",
    "all_reduce": "sum",
    "rowwise_split_input": "split",
    "rowwise_rep": "split",
    "colwise_gather_output": "gather",
    "colwise_rep": "gather",
    "embedding_colwise": "gather",
    "embedding_rowwise": "vocabulary",
    "moe_tp_experts": "experts",
    "moe_identity_expert": "share",
}
"""The ranks' exchange at a module, by its style: `sum` its outputs; `split` its input before that; `gather` its
outputs; look up a part of the `vocabulary`; sum the outputs of their parts of `experts`; or `share` out an input."""
UNSUITED = frozenset({"DogeForCausalLM"})
"""Classes whose plan doesn't suit their code: with it, they fail or compute something else."""
KNOWN = COLUMNS | ROWS | WHOLE | EXCHANGES.keys()
WHOLE_EXPERTS, DISPATCH = "grouped_gemm", "ep_dispatch_experts"
"""Styles of `ep_plan`: of experts' parameters, and of their module."""
KEYS = ("k_proj", "v_proj")
"""Names of the layers that compute KV heads, and nothing else."""
FUSED_KEYS = ("qkv_proj", "query_key_value")
"""Names of the layers that compute queries, keys and values."""
QUERIES = ("q_proj", "q_b_proj", "kv_b_proj", "o_proj")


class Cut(NamedTuple):
    """A part of a tensor, along one dimension."""

    dim: int
    ranges: tuple[range, ...]
    """The spans that are taken, in order."""

    def of(self, tensor: Tensor) -> Tensor:
        """The part, which may share the tensor's memory."""
        parts = [tensor.narrow(self.dim, each.start, len(each)) for each in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclass(frozen=True, slots=True)
class Division:
    """The part of a model that one rank has."""

    cuts: Mapping[str, Mapping[str, tuple[Cut, ...]]]
    """Cuts of the parameters of each module."""
    exchanges: Mapping[str, Exchange]
    """The ranks' exchange at each module."""
    groups: Mapping[str, int]
    """Query heads for each KV head, in modules of attention where that is another number than the whole model's."""
    experts: Mapping[str, range]
    """The rank's experts, in modules where it has whole ones."""


class Heads(NamedTuple):
    """Heads of a module of attention."""

    queries: int
    keys: int
    """KV heads that its plan divides; 0 if it divides none."""


def divided_keys(model: PreTrainedModel) -> bool:
    """Whether the plan divides the KV heads, where there are several: if not, each rank computes all of them."""
    styles = {name.rpartition(".")[2]: style for name, style in (model.tp_plan or {}).items()}
    return any(styles.get(name) in ("colwise", "packed_colwise") for name in (*KEYS, *FUSED_KEYS))


def allowed_degrees(model: PreTrainedModel) -> list[int]:
    """The numbers of ranks that a model, which may be on the device `meta`, can be divided over."""
    if not _plans_layers(model) or set(model.tp_plan.values()) - KNOWN or type(model).__name__ in UNSUITED:
        return [1]
    heads = set(_heads(model).values())
    widths = [min(_widths(model), default=MAX_RANKS), MAX_RANKS]
    return [degree for degree in range(1, min(widths) + 1) if all(_suits(each, degree) for each in heads)]


def check(model: PreTrainedModel, degree: Degree, experts: int) -> None:
    """Checks that a model can be divided like that.

    Args:
        experts: parts that whole experts are divided into, a divisor of the ranks.

    Raises:
        ValueError: it can't; the text names the option and what is allowed.
    """
    kind, wanted = type(model).__name__, degree.tensor
    if degree.pipeline > 1:
        raise ValueError(f"pipeline_parallel is {degree.pipeline}; allowed for a model that transformers' code runs: 1")
    if wanted > 1 and not _plans_layers(model):
        reason = f"{kind} has no tensor-parallel plan for its layers"
        raise ValueError(f"tensor_parallel is {wanted}; allowed: 1, because {reason}")
    if wanted > 1 and (unknown := sorted(set(model.tp_plan.values()) - KNOWN)):
        raise ValueError(
            f"tensor_parallel is {wanted}; allowed: 1, because the plan of {kind} has styles that aren't known:"
            f" {', '.join(unknown)}"
        )
    if wanted > 1 and kind in UNSUITED:
        raise ValueError(f"tensor_parallel is {wanted}; allowed: 1, because the plan of {kind} doesn't suit its code")
    allowed = allowed_degrees(model)
    if wanted not in allowed:
        heads = sorted(set(_heads(model).values()))
        counts = " and ".join(f"{each.queries} query heads and {each.keys or 'undivided'} KV heads" for each in heads)
        raise ValueError(
            f"tensor_parallel is {wanted}; allowed: {', '.join(map(str, allowed))}, for {counts or 'its layers'}"
        )
    _check_experts(model, wanted, experts)


def _plans_layers(model: PreTrainedModel) -> bool:
    """Whether the plan divides more than the head, which alone would leave the model whole on each rank."""
    return any(".*." in name for name in model.tp_plan or {})


def _check_experts(model: PreTrainedModel, ranks: int, experts: int) -> None:
    if experts == 1:
        return
    counts = {parameter.shape[0] for _, _, parameter in _expert_parameters(model)}
    allowed = [number for number in range(1, ranks + 1) if ranks % number == 0 and all(c % number == 0 for c in counts)]
    if not counts:
        raise ValueError(
            f"expert_parallel is {experts}; allowed: 1, because {type(model).__name__} has no plan for whole experts"
        )
    if experts not in allowed:
        numbers = " and ".join(map(str, sorted(counts)))
        raise ValueError(
            f"expert_parallel is {experts}; allowed: {', '.join(map(str, allowed))}, for tensor_parallel {ranks} and"
            f" {numbers} experts"
        )


def divide(model: PreTrainedModel, degree: Degree, rank: int, experts: int = 1) -> Division:
    """The part of a model that a rank has; the model may be on the device `meta`.

    Raises:
        ValueError: as `check`.
    """
    check(model, degree, experts)
    whole = {name: parameter.shape[0] for name, _, parameter in _expert_parameters(model)} if experts > 1 else {}
    exchanges: dict[str, Exchange] = {}
    cuts: dict[str, dict[str, tuple[Cut, ...]]] = {}
    heads = _heads(model)
    for name, module in model.named_modules():
        style = _style(model.tp_plan, name)
        if style is not None and style in EXCHANGES:
            exchanges[name] = EXCHANGES[style]
        if _style(model.ep_plan or {}, name) == DISPATCH and experts > 1:
            exchanges[name] = "experts"
        for own, parameter in module.named_parameters(recurse=False):
            path = f"{name}.{own}"
            found: list[Cut] = []
            if path in whole:
                of = whole[path] // experts
                number = rank * experts // degree.tensor
                found.append(Cut(0, (range(number * of, (number + 1) * of),)))
            ranks = degree.tensor // experts if path in whole else degree.tensor
            cut = _cut(_style_of_weight(model, module, name, own), parameter, ranks, rank % ranks)
            last, parent = name.rpartition(".")[2], name.rpartition(".")[0]
            keys = heads[parent].keys if last in KEYS and style == "colwise" else 0
            if cut is not None and keys:
                held, dim = degree.kv_heads(rank, keys), parameter.shape[0] // keys
                cut = Cut(-parameter.dim(), (range(held.start * dim, held.stop * dim),))
            if cut is not None and ranks > 1:
                found.append(cut)
            if found:
                cuts.setdefault(name, {})[own] = tuple(found)
    groups = {
        name: each.queries // degree.tensor // len(degree.kv_heads(rank, each.keys))
        for name, each in heads.items()
        if each.keys and each.keys % degree.tensor
    }
    own_experts = {
        name: next(iter(cuts[name].values()))[0].ranges[0] for name in {name.rpartition(".")[0] for name in whole}
    }
    _keep_ties(model, cuts, exchanges)
    return Division(cuts, exchanges, groups, own_experts)


def _cut(style: str | None, parameter: Tensor, ranks: int, number: int) -> Cut | None:
    """The part of a parameter that has this style; None if it is whole."""
    if style in COLUMNS:
        dim = -1 if parameter.dim() == 1 else -2
    elif style in ROWS and parameter.dim() > 1:
        dim = -1
    elif style == "embedding_rowwise":
        dim = 0
    elif style == "embedding_colwise":
        dim = -1
    else:
        return None
    size = parameter.shape[dim]
    pieces = 2 if style in PACKED and parameter.dim() > 1 else 1
    each = size // pieces
    part = part_of(each, ranks, number)
    return Cut(dim, tuple(range(piece * each + part.start, piece * each + part.stop) for piece in range(pieces)))


def part_of(size: int, ranks: int, number: int) -> range:
    """The numbers of one of `ranks` parts, which are as equal as possible."""
    return range(size * number // ranks, size * (number + 1) // ranks)


def _style(plan: Mapping[str, str], name: str) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _style_of_weight(model: PreTrainedModel, module: nn.Module, name: str, own: str) -> str | None:
    """Style of a parameter `own` of the module with this name."""
    style = _style(model.tp_plan, f"{name}.{own}") or _style(model.tp_plan, name)
    # Some plans forget that gates and ups are one tensor.
    packed = style == "colwise" and own == "gate_up_proj" and getattr(module, "is_concatenated", False)
    return "packed_colwise" if packed else style


def _expert_parameters(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Path, module and parameter of all that has a row for each expert, where there is a plan for whole experts."""
    plan = model.ep_plan or {}
    for name, module in model.named_modules():
        if _style(plan, name) == DISPATCH:
            for own, parameter in module.named_parameters(recurse=False):
                if _style(plan, f"{name}.{own}") == WHOLE_EXPERTS:
                    yield f"{name}.{own}", module, parameter


def _heads(model: PreTrainedModel) -> dict[str, Heads]:
    """Heads of each module of attention that the plan divides."""
    found: dict[str, Heads] = {}
    text = model.config.get_text_config(decoder=True)
    for name, module in model.named_modules():
        own = dict(module.named_children())
        styles = {child: _style(model.tp_plan, f"{name}.{child}") for child in own}
        divided = [child for child in (*QUERIES, *KEYS, *FUSED_KEYS) if styles.get(child) in ("colwise", "rowwise")]
        if not divided:
            continue
        config = getattr(module, "config", text)
        queries = next(
            (
                count
                for count in (
                    getattr(module, "num_heads", None),
                    getattr(module, "num_attention_heads", None),
                    getattr(config, "num_attention_heads", None),
                )
                if isinstance(count, int)
            ),
            0,
        )
        keys, layer, dim = 0, own.get("k_proj"), getattr(module, "head_dim", None)
        if isinstance(layer, nn.Linear) and isinstance(dim, int) and styles["k_proj"] == "colwise":
            keys = layer.out_features // dim
        elif any(styles.get(child) == "colwise" for child in FUSED_KEYS):
            keys = getattr(config, "num_key_value_heads", None) or queries
        found[name] = Heads(queries, keys)
    return found


def _suits(heads: Heads, degree: int) -> bool:
    keys = not heads.keys or heads.keys % degree == 0 or degree % heads.keys == 0
    return heads.queries % degree == 0 and keys


def _widths(model: PreTrainedModel) -> Iterator[int]:
    """Sizes of all dimensions that are cut."""
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            cut = _cut(_style_of_weight(model, module, name, own), parameter, 1, 0)
            if cut is not None and name.rpartition(".")[2] not in KEYS:
                yield len(cut.ranges[0])


def _keep_ties(
    model: PreTrainedModel, cuts: dict[str, dict[str, tuple[Cut, ...]]], exchanges: dict[str, Exchange]
) -> None:
    """Leaves parameters whole that are tied to others which are cut in another way."""
    tied: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for own, parameter in module.named_parameters(recurse=False):
            tied.setdefault(id(parameter), []).append((name, own))
    for places in tied.values():
        if len({cuts.get(name, {}).get(own) for name, own in places}) > 1:
            for name, own in places:
                cuts.get(name, {}).pop(own, None)
                exchanges.pop(name, None)
