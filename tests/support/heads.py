"""Random Medusa heads and EAGLE-3 checkpoints for tiny models, in the files that people publish; and a hand-off."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kvrelay.engine.engine import Engine
from kvrelay.engine.request import Request
from kvrelay.engine.states import StatesLayout


def medusa_tensors(heads: int, blocks: int, hidden: int, vocab: int, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of `medusa_lm_head.safetensors`."""
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for head in range(heads):
        for block in range(blocks):
            weight = torch.randn(hidden, hidden, generator=noise) / hidden**0.5
            tensors[f"{head}.{block}.linear.weight"] = weight
            tensors[f"{head}.{block}.linear.bias"] = 0.3 * torch.randn(hidden, generator=noise)
        tensors[f"{head}.{blocks}.weight"] = torch.randn(vocab, hidden, generator=noise) / hidden**0.5
    return tensors


def write_medusa(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    """Writes a folder of Medusa heads, and returns it."""
    return _write(folder, tensors, config, "medusa_lm_head.safetensors")


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, object], name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / name)
    return folder


HEADS, KV_HEADS, INNER = 4, 2, 96


def eagle_tensors(hidden: int, vocab: int, draft_vocab: int, *, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of an EAGLE-3 checkpoint, without an embedding, for a model of the same width."""
    noise = torch.Generator().manual_seed(seed)
    dim = hidden // HEADS

    def draw(outputs: int, inputs: int) -> Tensor:
        return 1.5 * torch.randn(outputs, inputs, generator=noise) / inputs**0.5

    def norm() -> Tensor:
        return 1.0 + 0.3 * torch.randn(hidden, generator=noise)

    targets = torch.randperm(vocab, generator=noise)[:draft_vocab].sort().values
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[targets] = True
    return {
        "d2t": targets - torch.arange(draft_vocab),
        "t2d": mask,
        "fc.weight": draw(hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "midlayer.self_attn.q_proj.weight": draw(HEADS * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": draw(KV_HEADS * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": draw(KV_HEADS * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": draw(hidden, HEADS * dim),
        "midlayer.mlp.gate_proj.weight": draw(INNER, hidden),
        "midlayer.mlp.up_proj.weight": draw(INNER, hidden),
        "midlayer.mlp.down_proj.weight": draw(hidden, INNER),
        "norm.weight": norm(),
        "lm_head.weight": draw(draft_vocab, hidden),
    }


def eagle_config(tensors: dict[str, Tensor], vocab: int) -> dict[str, object]:
    """The fields of its config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": len(tensors["norm.weight"]),
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "draft_vocab_size": len(tensors["lm_head.weight"]),
    }


def write_eagle(folder: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> Path:
    """Writes a folder of an EAGLE-3 checkpoint, and returns it."""
    return _write(folder, tensors, config, "model.safetensors")


def handed_over(
    engine: Engine, asked: Sequence[Request], wanted: StatesLayout | None, most: int = 0
) -> dict[str, list[int]]:
    """The streams of requests whose prompts come from another worker: this engine stands for both.

    Args:
        wanted: hidden states that come along.
        most: tokens whose hidden states come along at most; 0 for all.
    """
    scheduler = engine.scheduler
    states: dict[str, list[Tensor]] = {one.request_id: [] for one in asked}
    for one in asked:
        scheduler.add(one, handoff=True, states=wanted)
    done = []
    while engine.has_work:
        for report in engine.step():
            if report.states is not None:
                states[report.sequence.request.request_id].append(report.states[:, list(report.state_places)])
            if report.token is not None:
                done.append(report)
    heard = {}
    for report in done:
        request, hold = report.sequence.request, report.hold
        assert hold is not None
        scheduler.prefix.withdraw(hold)  # the index knows the last block, to which the other side goes on to write
        heard[request.request_id] = [report.token or 0]
        came = torch.cat(states[request.request_id])[-most:] if wanted is not None else None
        scheduler.resume(dataclasses.replace(request, attempt=2), report.token or 0, hold, came)
    while engine.has_work:
        for report in engine.step():
            assert report.token is not None
            heard[report.sequence.request.request_id].append(report.token)
    scheduler.check_integrity(idle=True)
    return heard


def wanted_by(engine: Engine) -> StatesLayout:
    return engine.scheduler.speculation.states(engine.runner)
