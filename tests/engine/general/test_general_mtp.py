"""Guesses by a checkpoint's own layer for multi-token prediction: the same greedy tokens, in fewer steps."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvrelay.engine.build import build_engine
from kvrelay.engine.config import EngineConfig, SpeculationConfig
from kvrelay.engine.request import Request, SamplingParams
from kvrelay.engine.speculate.mtp import APART, APART_TYPES, LAST
from support.checkpoints import change_tensors
from support.serving import run
from support.tiny_models import save, tiny_config

LAYERS = 2
BEHIND = f"model.layers.{LAYERS}."
FIELDS = {"num_hidden_layers": LAYERS, "max_position_embeddings": 256}
OPTIONS = EngineConfig(device="cpu", model_path="general", kv_memory_bytes=2**23, threads=1, max_batch_tokens=48)
COMPLETION = 60
PROMPTS = [[5, 9, 7, 11, 200], list(range(3, 60)), [3 + (7 * n) % 251 for n in range(21)]]


def one_layer(model_type: str) -> PreTrainedModel:
    """A model with a layer of the kind of the last one."""
    kinds = {"layer_types": ["full_attention"]} if model_type in APART_TYPES else {}
    config = tiny_config(model_type, **{**FIELDS, "num_hidden_layers": 1, "first_k_dense_replace": 0, **kinds})
    return AutoModelForCausalLM.from_config(config)


def saved(model_type: str, folder: Path) -> Path:
    """A model without the layer."""
    kinds = {"layer_types": ["linear_attention", "full_attention"]} if model_type in APART_TYPES else {}
    return save(model_type, folder, **FIELDS, **kinds)


def distill(model_type: str, served: PreTrainedModel, steps: int) -> dict[str, Tensor]:
    """Trains a layer on what the served model writes behind the prompts; its tensors, by their published names."""
    streams = []
    with torch.no_grad():
        for prompt in PROMPTS:
            tokens = torch.tensor([prompt])
            while tokens.shape[1] < len(prompt) + COMPLETION + 2:
                tokens = torch.cat((tokens, served(tokens).logits[:, -1:].argmax(-1)), 1)
            states = served.model(tokens).last_hidden_state[:, :-2]
            streams.append((states, served.get_input_embeddings()(tokens[:, 1:-1]), tokens[0, 2:]))
    hidden = streams[0][0].shape[-1]
    torch.manual_seed(2)
    layer, join = one_layer(model_type).train(), nn.Linear(2 * hidden, hidden, bias=False)
    norms = [type(layer.model.norm)(hidden) for _ in range(2)]
    modules = nn.ModuleList([layer, join, *norms])
    optimizer = torch.optim.Adam([each for each in modules.parameters() if each.requires_grad], 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        for states, embedded, targets in streams:
            x = join(torch.cat((norms[0](embedded), norms[1](states)), -1))
            logits = served.get_output_embeddings()(layer.model(inputs_embeds=x, use_cache=False).last_hidden_state)
            nn.functional.cross_entropy(logits[0], targets).backward()
        optimizer.step()
    names = APART if model_type in APART_TYPES else LAST
    made = {
        names.join: join,
        names.token_norm: norms[0],
        names.feature_norm: norms[1],
        names.last_norm: layer.model.norm,
    }
    found = {f"{name}.weight": module.weight.detach().clone() for name, module in made.items()}
    found |= {f"{names.block}{name}": tensor for name, tensor in published(layer).items()}
    return {f"{names.own or BEHIND}{name}": tensor for name, tensor in found.items()}


def published(layer: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a model's first layer, as they are in files."""
    with tempfile.TemporaryDirectory() as folder:
        layer.save_pretrained(folder)
        held = load_file(Path(folder) / "model.safetensors")
    prefix = "model.layers.0."
    return {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}


def add_layer(folder: Path, tensors: dict[str, Tensor]) -> None:
    change_tensors(folder, lambda held: held.update({name: tensor.contiguous() for name, tensor in tensors.items()}))


def served(folder: Path, options: EngineConfig) -> tuple[dict[str, list[int]], int]:
    """The tokens of each request, and the steps that it took to serve them together."""
    engine, _ = build_engine(folder, "float32", options)
    sampling = SamplingParams(temperature=0.0, max_tokens=COMPLETION)
    asked = [Request(str(number), 1, tuple(prompt), len(prompt), sampling) for number, prompt in enumerate(PROMPTS)]
    return run(engine, asked), engine.steps


@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", *(pytest.param(name, marks=pytest.mark.more) for name in ("glm4_moe", "qwen3_next"))]
)
@pytest.mark.more
def test_a_layer_that_predicts_well_halves_the_steps(model_type: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = saved(model_type, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    add_layer(folder, distill(model_type, model, 120))
    expected, alone = served(folder, OPTIONS)
    speculation = SpeculationConfig("mtp", max_tokens=2, adaptive=False)
    found, steps = served(folder, replace(OPTIONS, speculation=speculation))
    assert found == expected
    assert alone / steps >= 1.5


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    folder = save("deepseek_v3", tmp_path, **FIELDS)
    options = replace(OPTIONS, speculation=SpeculationConfig("mtp"))
    with pytest.raises(ValueError, match=r"model.layers.2.enorm.weight is missing; .* a layer for multi-token"):
        build_engine(folder, "float32", options)
    layer = {f"{BEHIND}{name}": tensor for name, tensor in published(one_layer("deepseek_v3")).items()}
    hidden, join = 64, f"{BEHIND}eh_proj.weight"
    layer |= {f"{BEHIND}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    add_layer(folder, layer | {join: torch.zeros(hidden, hidden)})
    with pytest.raises(ValueError, match=r"eh_proj.weight has another shape than \[64, 128\]"):
        build_engine(folder, "float32", options)
    del layer[f"{BEHIND}self_attn.o_proj.weight"]
    add_layer(save("deepseek_v3", tmp_path, **FIELDS), layer | {join: torch.zeros(hidden, 2 * hidden)})
    with pytest.raises(ValueError, match=r"self_attn.o_proj.weight of the layer .* is missing"):
        build_engine(folder, "float32", options)
