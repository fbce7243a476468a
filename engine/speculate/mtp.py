"""Guesses by the layer for multi-token prediction that a served checkpoint brings along (DeepSeek-V3, GLM-4.5,
Qwen3-Next).

At position i the layer takes e, the embedding of token i + 1, and g, the normed last hidden state of position i, or
behind the last one that is known, its own result before, h, which Qwen3-Next norms:

    x = W [norm(e), norm(g)];  h = block(x);  logits of token i + 2 = the model's head on norm(h)

The block is one more layer of the model, so transformers' own code runs it, in the flat way over KV of its own. What an
EAGLE-3 layer does with contexts and guesses, this one does too (`eagle.py`).

A block of Qwen3-Next has full attention: no states but the served model's own, which the runner rolls back.

Source: DeepSeek-V3, arXiv:2412.19437, section 2.2.
"""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvrelay.engine.attention.base import Attention, AttentionInputs, HeadNorm, Rotation
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv.layout import Order
from kvrelay.engine.kv.pool import TORCH_DTYPES, KVPool
from kvrelay.engine.models.fast.parts import Parts
from kvrelay.engine.models.general.check import agrees, apart
from kvrelay.engine.models.general.experts import on_cpu, swap_experts
from kvrelay.engine.models.general.flat import FlatWay
from kvrelay.engine.models.general.fused import fuse
from kvrelay.engine.models.general.linears import swap, watching
from kvrelay.engine.models.general.norms import swap_norms
from kvrelay.engine.models.general.observe import observe
from kvrelay.engine.models.general.places import arrange
from kvrelay.engine.models.general.reading import GeneralConfig, read_general_config
from kvrelay.engine.models.general.step import Step, UnfitError
from kvrelay.engine.models.general.store import Store, scratch_pools
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.quant.schemes import LAYERS, dequantizing, quantizing
from kvrelay.engine.runner.general import GeneralRunner
from kvrelay.engine.sampling.sampler import guessing
from kvrelay.engine.speculate.eagle import EagleProposer
from kvrelay.kernels.cpu import ops
from kvrelay.kernels.cpu.packed import packer
from kvrelay.kernels.reference import linear

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """Names of the layer's parts in checkpoints of one kind, and the kind's peculiarities."""

    token_norm: str
    feature_norm: str
    join: str
    last_norm: str
    block: str
    """Beginning of the names of the block's tensors."""
    own: str
    """Beginning of all of these names; empty for those of the layer behind the model's last one."""
    normed: bool
    """Whether the layer takes its own result before normed."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all parts but the block."""
        return self.token_norm, self.feature_norm, self.join, self.last_norm


LAST = Published("enorm", "hnorm", "eh_proj", "shared_head.norm", "", "", normed=False)
APART = Published(
    "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", block="layers.0.", own="mtp.", normed=True
)
APART_TYPES = ("qwen3_next",)
"""Types of models whose layer is named as APART says."""
SHARED = ("shared_head.head.", "embed_tokens.")
"""Beginnings of the names of tensors that the model has, too."""
KINDS = ("layer_types", "mlp_layer_types", "indexer_types")
"""Fields that list the kinds of layers; the layer's kind is full attention, or that of the last one."""


class Given(nn.Module):
    """Embeddings that were computed before."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._hidden, self._dtype = hidden, dtype
        self.value: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T, hidden] for tokens [B, T]."""
        if self.value is not None:
            return self.value
        return torch.ones(*tokens.shape, self._hidden, dtype=self._dtype, device=tokens.device)


class Plans:
    """Implements `Attention` as far as plans go: the flat way attends by itself."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._step: Step | None = None

    def plan(self, inputs: AttentionInputs) -> None:
        """See `Attention.plan`."""
        table = inputs.block_tables.cpu().numpy().astype(np.int64)
        tokens = np.zeros(int(inputs.lengths.sum()), np.int64)
        self._step = Step(tokens, inputs.starts, inputs.lengths, (table,) * self._groups)

    @property
    def step(self) -> Step:
        """The step of the latest plan."""
        if self._step is None:
            raise RuntimeError("no step is planned")
        return self._step

    def run(self, layer: int, qkv: Tensor, rotation: Rotation, norm: HeadNorm | None) -> Tensor:
        """Is never called."""
        raise NotImplementedError


class MtpModel:
    """The layer, ready to run; an `EagleProposer` guesses by it."""

    def __init__(
        self,
        served: PreTrainedModel,
        way: FlatWay,
        given: Given,
        norms: Sequence[nn.Module],
        join: Tensor,
        *,
        normed: bool,
    ) -> None:
        """
        Args:
            served: the served model.
            way: runs the block, and yields its results in the place of logits.
            given: the block's embeddings.
            norms: of embeddings, of features, and of results.
            join: W, [hidden, 2 hidden].
            normed: see `Published.normed`.
        """
        self._normed = normed
        self.layers, self.heads = (int(served.config.get_text_config(decoder=True).num_hidden_layers),), 1
        self.states_width = join.shape[0]
        self._way, self._given = way, given
        self._token_norm, self._feature_norm, self._last_norm = norms
        self._embedding: Any = served.get_input_embeddings()
        self._head: Any = served.get_output_embeddings()
        self._dtype = join.dtype
        self._join = linear(join, None)

    def fuse(self, states: Tensor) -> Tensor:
        """[T, hidden] the features of states [T, 1, hidden] of the served model."""
        return states[:, 0].to(self._dtype)

    def forward(self, features: Tensor, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """[T, hidden] of the tokens behind those that the features [T, hidden] are of; see `EagleModel.forward`."""
        if not isinstance(attention, Plans):
            raise TypeError(f"attention is {type(attention).__name__}; allowed: Plans")
        both = self._token_norm(self._embedding(tokens)), self._feature_norm(features.to(self._dtype))
        self._given.value = self._join(torch.cat(both, -1))[None]
        step = attention.step
        hidden = self._way.run(step, np.arange(len(step.tokens)))
        return self._last_norm(hidden.to(self._dtype)) if self._normed else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab], of rows of `forward`'s result."""
        own = hidden.to(self._dtype)
        logits: Tensor = self._head(own if self._normed else self._last_norm(own))
        return logits.float()


def served_by(runner: GeneralRunner) -> FlatWay:
    """The way that the served model runs in.

    Raises:
        ValueError: its steps keep no hidden states.
    """
    if not isinstance(runner.way, FlatWay):
        raise ValueError(f"speculation.method is 'mtp'; allowed for a model that runs flat, not as {runner.way.name}")
    return runner.way


def mtp_proposer(options: EngineConfig, folder: Path, runner: GeneralRunner) -> EagleProposer:
    """The proposer that guesses by the layer of the checkpoint in `folder`.

    Raises:
        ValueError: it has none, or one that can't be run; the text says why.
    """
    served = served_by(runner)
    config, dtype = read_general_config(folder), TORCH_DTYPES[runner.spec.dtype]
    base = config.model_class.base_model_prefix
    names, prefix = _names_of(config)
    tensors = _read(folder, prefix)
    own = {name: tensors.pop(f"{name}.weight", None) for name in names.parts}
    missing = [name for name, tensor in own.items() if tensor is None]
    if missing:
        raise ValueError(
            f"{folder}: tensor {prefix}{missing[0]}.weight is missing; with speculation.method 'mtp' the checkpoint"
            " must have a layer for multi-token prediction"
        )
    block = {
        f"{base}.layers.0.{name.removeprefix(names.block)}": tensor
        for name, tensor in tensors.items()
        if name.startswith(names.block) and not name.startswith(SHARED)
    }
    model = _one_layer(folder, config, block, dtype)
    body: Any = getattr(model, base)
    norms = []
    for name in (names.token_norm, names.feature_norm, names.last_norm):
        norm = copy.deepcopy(body.norm)
        weight = own[name]
        if weight is None or weight.shape != norm.weight.shape:
            raise ValueError(f"{folder}: tensor {name}.weight has another shape than {list(norm.weight.shape)}")
        norm.weight.data.copy_(weight)
        norms.append(norm.to(served.model.device).requires_grad_(False))
    hidden = len(norms[0].weight)
    join = own[names.join]
    if join is None or join.shape != (hidden, 2 * hidden):
        raise ValueError(f"{folder}: tensor {names.join}.weight has another shape than {[hidden, 2 * hidden]}")
    body.norm = nn.Identity()
    given = Given(hidden, dtype)
    model.set_input_embeddings(given)
    model.set_output_embeddings(nn.Identity())
    model.to(served.model.device)
    try:
        way, pools = _way_of(model, served, options, runner)
    except UnfitError as error:
        raise ValueError(f"{folder}: the layer for multi-token prediction can't be run: {error}") from error
    plans, make = Plans(len(way.store.placing.layout.groups)), dequantizing(dtype, linear)
    parts = Parts(
        make,
        make,
        ops,
        lambda pool, heads, most: plans,
        guessing(runner.sample),
        dtype,
        dtype,
        served.model.device,
        torch.inference_mode,
    )
    weight = join.to(dtype).to(served.model.device)
    made: Any = MtpModel(served.model, way, given, norms, weight, normed=names.normed)
    return EagleProposer(made, pools[0], parts, options.max_batch_tokens, options.speculation.max_tokens)


def brings_layer(folder: Path) -> bool:
    """Whether the checkpoint in `folder` has a layer for multi-token prediction."""
    names, prefix = _names_of(read_general_config(folder))
    return f"{prefix}{names.join}.weight" in Checkpoint(folder).tensors


def _names_of(config: GeneralConfig) -> tuple[Published, str]:
    """How a model's checkpoint names the parts of the layer, and the beginning of all these names."""
    names = APART if config.text.model_type in APART_TYPES else LAST
    base = config.model_class.base_model_prefix
    return names, names.own or f"{base}.layers.{int(config.text.num_hidden_layers)}."


def _read(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The checkpoint's tensors whose names begin so, by the rest of their names.

    Raises:
        ValueError: one isn't finite.
    """
    checkpoint, found = Checkpoint(folder), {}
    for name, entry in checkpoint.tensors.items():
        if name.startswith(prefix):
            with safe_open(entry.path, "pt") as file:
                tensor = file.get_tensor(name)
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise ValueError(f"{entry.path}: tensor {name} has a number that is infinite or NaN")
            found[name.removeprefix(prefix)] = tensor
    return found


def _one_layer(folder: Path, config: GeneralConfig, block: dict[str, Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """A model of the class with the block as its only layer.

    Raises:
        ValueError: the block lacks a tensor, or has one of another shape.
    """
    own = copy.deepcopy(config.config)
    text: Any = own.get_text_config(decoder=True)
    last = int(text.num_hidden_layers) - 1
    changes: dict[str, object] = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "tie_word_embeddings": False}
    changes |= {"vocab_size": 8, "pad_token_id": None, "decoder_sparse_step": 1}
    changes["mlp_only_layers"] = [] if any(".mlp.gate." in name for name in block) else [0]
    for name in KINDS:
        if isinstance(kinds := getattr(text, name, None), list):
            changes[name] = ["full_attention"] if "full_attention" in kinds else kinds[last : last + 1]
    for name, value in changes.items():
        if hasattr(text, name):
            setattr(text, name, value)
    model_class: Any = config.model_class
    try:
        model, info = model_class.from_pretrained(
            None, config=own, state_dict=block, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"{folder}: the layer for multi-token prediction can't be read: {error}") from error
    lacking = [name for name in sorted(info["missing_keys"]) if f"{model.base_model_prefix}.layers." in str(name)]
    for found in (*lacking, *sorted(info["mismatched_keys"])):
        name = found if isinstance(found, str) else found[0]
        raise ValueError(f"{folder}: tensor {name} of the layer for multi-token prediction is missing or misshapen")
    made: PreTrainedModel = model.eval().requires_grad_(False)
    return made


def _way_of(
    model: PreTrainedModel, served: FlatWay, options: EngineConfig, runner: GeneralRunner
) -> tuple[FlatWay, tuple[KVPool, ...]]:
    """The flat way of running the block over pools of its own, with as many blocks as the served model's.

    Raises:
        UnfitError: the block can't be run so.
    """
    layers = observe(model)
    swap_norms(model, served.team)
    if served.team is not None:
        tokens = torch.zeros((1, 3), dtype=torch.long, device=model.device)
        with watching(model) as uses, torch.inference_mode():
            model(input_ids=tokens, use_cache=False)
        make = quantizing(LAYERS.get(options.quantization), packer(served.team))
        swap(model, uses, make, make, ())
        swap_experts(model, on_cpu(served.team, make))
        fuse(model, served.team)
    order: Order = "HND" if model.device.type == "cuda" else "NHD"
    placing = arrange(layers, runner.spec.dtype, runner.spec.dtype, runner.cache_layout.block_size, order)
    pools = scratch_pools(placing.layout, max(pool.num_blocks for pool in runner.pools), 1, model.device)
    way = FlatWay(model, Store(placing, pools), served.team)
    tables = (np.zeros((1, 1), np.int64),) * len(placing.layout.groups)
    steps = [
        Step(np.zeros(count, np.int64), np.full(1, start), np.full(1, count), tables)
        for start, count in ((0, 3), (3, 1), (4, 1))
    ]

    def computed() -> Tensor:
        return torch.cat([way.run(step, np.arange(len(step.tokens))) for step in steps])

    with torch.inference_mode():
        expected = computed()
        try:
            gaps = [apart(*both) for both in zip(computed(), expected, strict=True)] if way.use_kernels() else []
        except Exception as error:  # noqa: BLE001  # a compiler or a driver fails in whatever way; torch attends without them
            logger.warning("the attention kernels fail for the layer that guesses, so torch attends: %s", error)
            return FlatWay(model, Store(placing, pools), served.team), pools
        # One position may differ: rounding can turn a router of experts at a tie.
        wrong = sum(not agrees(gap, TORCH_DTYPES[runner.spec.dtype]) for gap in gaps)
        if wrong > 1 or any(math.inf in gap for gap in gaps):
            logger.warning(
                "the attention kernels give the layer that guesses other results, so torch attends: %s", gaps
            )
            way = FlatWay(model, Store(placing, pools), served.team)
    return way, pools
