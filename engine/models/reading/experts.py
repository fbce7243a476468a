"""Experts of the families that the fast path serves, as config.json describes them. No torch."""

from dataclasses import dataclass
from typing import Any

from kvrelay.engine.models.reading.fields import Fields
from kvrelay.kernels.routing import Routing, Scoring

MULTIPLE = 16
"""Divisor of the widths of experts and rows, as the native kernels need it."""


@dataclass(frozen=True, slots=True)
class ExpertsTraits:
    """Experts in the place of an MLP. Names are those of a layer's tensors in the checkpoint."""

    routing: Routing
    width: int
    """Numbers between the products of one expert."""
    module: str = "mlp"
    """Name of the module that has router and experts."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = ""
    """Name of the numbers that are added to scores to choose experts; empty without them."""
    dense_layers: int = 0
    """Number of the first layers, which have an MLP instead."""
    shared: int = 0
    """Width of an MLP that computes all rows, and is added to the experts; 0 for none."""
    held: range | None = None
    """Numbers of the experts that a rank holds, whole ones; None if it holds all, or a part of each."""
    spares: int = 0
    """Slots of a rank for copies of other ranks' experts, beside those that it holds."""
    router_name: str = "gate"
    joined: str = ""
    """Name of the tensors that have one product of all experts each, as gpt-oss has them; empty if each expert has
    tensors of its own. Gates and ups take turns there, and these products and the router have biases."""
    limit: float = 0.0
    """Limit of the clamped gate (`Epilogue.CLAMPED_GATE`); 0 if the gate is that of the model's activation."""
    alpha: float = 0.0
    """Factor of the clamped gate."""

    def in_layer(self, layer: int) -> bool:
        """Whether the layer of this number has experts."""
        return layer >= self.dense_layers

    @property
    def slots(self) -> int:
        """Experts for which there is room here."""
        return len(self.own) + self.spares

    @property
    def own(self) -> range:
        """Numbers of the experts whose weights are read here."""
        return range(self.routing.experts) if self.held is None else self.held

    def is_elsewhere(self, name: str) -> bool:
        """Whether a tensor of a layer, by its name behind that of the layer, is one of an expert on another rank."""
        head, _, tail = name.partition(f"{self.module}.experts.")
        return not self.joined and not head and tail != "" and int(tail.partition(".")[0]) not in self.own

    @property
    def router(self) -> str:
        """Name of the router."""
        return f"{self.module}.{self.router_name}"

    def joins(self, part: str, layer: int) -> bool:
        """Whether this projection of a layer (`checkpoint.projections`) is one tensor of all experts."""
        return bool(self.joined) and part in ("gate_up", "down") and self.in_layer(layer)

    def names(self, *parts: str) -> list[str]:
        """Names of these products of all experts, those of one expert after the other."""
        return [f"{self.module}.experts.{each}.{part}" for each in self.own for part in parts]


def qwen3_moe_experts(fields: Fields) -> ExpertsTraits:
    """Qwen3-MoE: the softmax of all experts' logits."""
    if fields.integer("decoder_sparse_step", default=1) != 1:
        fields.refuse("decoder_sparse_step", "1")
    if fields.get("mlp_only_layers"):
        fields.refuse("mlp_only_layers", "an empty list")
    normalized = fields.boolean("norm_topk_prob", False)
    routing = _routing(fields, ("num_local_experts", "num_experts"), normalized=normalized)
    return ExpertsTraits(routing, _width(fields, "moe_intermediate_size"))


def mixtral_experts(fields: Fields) -> ExpertsTraits:
    """Mixtral: the softmax, divided by the sum of the chosen experts'."""
    return _w123(fields, _routing(fields, ("num_local_experts",)))


def minimax_m2_experts(fields: Fields) -> ExpertsTraits:
    """MiniMax-M2: experts are chosen by their logits' sigmoid and a bias, without groups."""
    return _w123(fields, _routing(fields, ("num_local_experts",), scoring=Scoring.SIGMOID), "e_score_correction_bias")


def gpt_oss_experts(fields: Fields) -> ExpertsTraits:
    """gpt-oss: the softmax of the chosen experts' logits; a clamped gate; biases in all products."""
    return ExpertsTraits(
        _routing(fields, ("num_local_experts",), scoring=Scoring.SOFTMAX_CHOSEN, normalized=False),
        _width(fields, "intermediate_size"),
        router_name="router",
        joined="mlp.experts",
        limit=fields.number("swiglu_limit", default=7.0),
        alpha=fields.number("swiglu_alpha", default=1.702),
    )


def _w123(fields: Fields, routing: Routing, bias: str = "") -> ExpertsTraits:
    """Experts whose tensors have Mixtral's names."""
    name = "block_sparse_moe"
    width = _width(fields, "intermediate_size")
    return ExpertsTraits(routing, width, name, "w1", "w3", "w2", bias=f"{name}.{bias}" if bias else "")


def glm4_moe_experts(fields: Fields, layers: int) -> ExpertsTraits:
    """GLM-4.5 to 4.7: experts are chosen from groups, by their logits' sigmoid and a bias; the first layers have an
    MLP, the others one beside the experts."""
    groups = fields.integer("n_group", default=1)
    top_groups = fields.integer("topk_group", default=1)
    if top_groups > groups:
        fields.refuse("topk_group", f"1 to n_group ({groups})")
    routing = _routing(
        fields,
        ("n_routed_experts",),
        scoring=Scoring.SIGMOID,
        normalized=fields.boolean("norm_topk_prob", True),
        least=1e-20,
        scale=fields.number("routed_scaling_factor", default=1.0),
        groups=groups,
        top_groups=top_groups,
    )
    width = _width(fields, "moe_intermediate_size")
    dense_layers = min(layers, fields.integer("first_k_dense_replace", default=1, minimum=0))
    if dense_layers:
        _width(fields, "intermediate_size")
    return ExpertsTraits(
        routing,
        width,
        bias="mlp.gate.e_score_correction_bias",
        dense_layers=dense_layers,
        shared=width * fields.integer("n_shared_experts", default=1),
    )


def _routing(fields: Fields, experts: tuple[str, ...], **options: Any) -> Routing:
    """The routing of a config with the number of experts in one of these fields."""
    name = next((name for name in experts if fields.get(name) is not None), experts[0])
    count, top = fields.integer(name), fields.integer("num_experts_per_tok")
    if top > count:
        fields.refuse("num_experts_per_tok", f"1 to {name} ({count})")
    if count % options.get("groups", 1):
        fields.refuse("n_group", f"a divisor of {name} ({count})")
    return Routing(count, top, **options)


def _width(fields: Fields, name: str) -> int:
    """Width of an expert or of an MLP.

    Raises:
        ValueError: the native kernels don't take it; transformers' code does.
    """
    for each in (name, "hidden_size"):
        if fields.integer(each) % MULTIPLE:
            fields.refuse(each, f"a multiple of {MULTIPLE}, for experts on the fast path")
    return fields.integer(name)
