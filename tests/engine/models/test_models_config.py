"""config.json: what is read out of it, and what is refused."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from kvrelay.engine.models.reading.config import ModelConfig, read_config
from kvrelay.engine.models.reading.positions import RopeConfig
from kvrelay.engine.models.reading.rope import rotary

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def read(folder: Path, changes: dict[str, Any] | None = None, without: str = "") -> ModelConfig:
    config = BASE | (changes or {})
    config.pop(without, None)
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


def test_the_common_fields_and_their_defaults(tmp_path: Path) -> None:
    """A field that is null counts as absent."""
    config = read(tmp_path)
    assert (config.architecture, config.layers, config.hidden_size) == ("LlamaForCausalLM", 3, 64)
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 2, 16)
    assert config.norm_eps == 1e-5
    assert config.ropes == (RopeConfig(theta=10000.0),) * 3
    assert config.traits.windows == (0, 0, 0)
    assert not config.tie_embeddings
    assert config.eos_token_ids == (1,)
    assert config.dtype == "bfloat16"
    nulls = dict.fromkeys(["head_dim", "num_key_value_heads", "rope_scaling", "torch_dtype", "eos_token_id"])
    config = read(tmp_path, nulls)
    assert (config.kv_heads, config.head_dim, config.dtype, config.eos_token_ids) == (4, 16, "float32", ())
    assert read(tmp_path, {"head_dim": 80}).head_dim == 80


KINDS = ["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE = st.fixed_dictionaries(
    {},
    optional={
        "rope_theta": st.sampled_from([5e5, 1e6]),
        "rope_type": st.sampled_from(KINDS),
        "type": st.sampled_from(KINDS),
        "factor": st.sampled_from([2, 8.0]),
        "low_freq_factor": st.just(1.0),
        "high_freq_factor": st.just(4.0),
        "original_max_position_embeddings": st.sampled_from([512, 8192]),
        "partial_rotary_factor": st.just(1.0),
        "beta_fast": st.just(24.0),
        "beta_slow": st.just(2.0),
        "mscale": st.just(0.7),
        "mscale_all_dim": st.just(1.2),
        "attention_factor": st.just(1.25),
        "truncate": st.booleans(),
        "short_factor": st.just([1.5] * 8),
        "long_factor": st.just([2.5] * 8),
    },
)
FAMILIES = {
    "llama": ("LlamaForCausalLM", modeling_llama.LlamaRotaryEmbedding),
    "mistral": ("MistralForCausalLM", modeling_mistral.MistralRotaryEmbedding),
    "qwen2": ("Qwen2ForCausalLM", modeling_qwen2.Qwen2RotaryEmbedding),
    "qwen3": ("Qwen3ForCausalLM", modeling_qwen3.Qwen3RotaryEmbedding),
    "phi3": ("Phi3ForCausalLM", modeling_phi3.Phi3RotaryEmbedding),
}


@pytest.mark.more
@settings(deadline=None, max_examples=300)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    given_fields=st.fixed_dictionaries(
        {},
        optional={
            "rope_parameters": st.none() | ROPE,
            "rope_scaling": st.none() | ROPE,
            "rope_theta": st.just(2e5),
            "partial_rotary_factor": st.sampled_from([0.5, 1.0]),
            "original_max_position_embeddings": st.sampled_from([256, 4096]),
            "head_dim": st.just(32),
            "sliding_window": st.sampled_from([None, 64]),
            "use_sliding_window": st.booleans(),
            "max_window_layers": st.sampled_from([0, 2]),
            "num_key_value_heads": st.just(4),
        },
    ),
)
def test_positions_windows_and_heads_are_read_as_transformers_reads_them(
    tmp_path_factory: pytest.TempPathFactory, family: str, given_fields: dict[str, Any]
) -> None:
    model_class, rotary_class = FAMILIES[family]
    changes = {"architectures": [model_class], "model_type": family, "num_attention_heads": 32, "hidden_size": 512}
    values = {name: value for name, value in BASE.items() if name != "num_key_value_heads"} | changes | given_fields
    if family == "phi3":
        values.pop("head_dim", None)
        for name in ("rope_parameters", "rope_scaling"):
            rope = values.get(name) or {}
            share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
            lists = {name: value for name, value in rope.items() if isinstance(value, list)}
            values[name] = rope | {name: value[: int(share * 8)] for name, value in lists.items()}
    folder = tmp_path_factory.getbasetemp()
    (folder / "config.json").write_text(json.dumps(values))
    expected = None
    # A field that the kind needs is missing, or doesn't go with others.
    with suppress(KeyError, RuntimeError, StrictDataclassClassValidationError):
        hugging_face = AutoConfig.from_pretrained(folder)
        head_dim = getattr(hugging_face, "head_dim", 512 // 32)
        expected = rotary_class(hugging_face)
    if expected is None or (family != "phi3" and len(expected.inv_freq) != head_dim // 2):
        with pytest.raises(ValueError, match=r"^config\.json: .* allowed: "):
            read_config(folder)
        return
    config = read_config(folder)
    assert (config.head_dim, config.kv_heads) == (head_dim, hugging_face.num_key_value_heads)
    assert len(set(config.ropes)) == 1
    found, width = rotary(config.ropes[0], config.head_dim), len(expected.inv_freq)
    torch.testing.assert_close(found[0, :width], expected.inv_freq)
    torch.testing.assert_close(found[1, :width], torch.full((width,), expected.attention_scaling))
    assert torch.equal(found[:, width:], torch.tensor([[0.0], [1.0]]).expand(-1, head_dim // 2 - width))
    window = 0 if family == "llama" else hugging_face.sliding_window or 0
    kinds = getattr(hugging_face, "layer_types", None) or ["sliding_attention"] * config.layers
    assert config.traits.windows == tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def test_types_of_layers_say_which_have_windows(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    fields = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "layer_types": kinds}
    assert read(tmp_path, QWEN2 | fields).traits.windows == (8, 0, 8)


def test_generation_config_says_where_to_stop(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read(tmp_path).eos_token_ids == (1,)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"):
        with pytest.raises(ValueError, match=f"config.json: {name} is missing"):
            read(tmp_path, without=name)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; allowed: llama, mistral, ministral, qwen2, qwen3, "),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"architectures is .*allowed: \['LlamaForCausalLM'\]"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: silu"),
        ({"hidden_size": "64"}, "hidden_size is '64'; allowed: an integer of at least 1"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647; allowed: up to 4096"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "num_attention_heads is 5; allowed: a divisor of"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; allowed: a divisor of num_attention_heads"),
        ({"head_dim": 15}, "head_dim is 15; allowed: an even number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; allowed: a number above 0"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 10+; allowed: a number above 0"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; allowed: true, false"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'; allowed: float32, bfloat16, float16"),
        ({"eos_token_id": 320}, r"eos_token_id is 320; allowed: ids below vocab_size \(320\)"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id is"),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2}},
            "json: partial_rotary_factor is 0.5",
        ),
        ({"rope_parameters": LLAMA3 | {"partial_rotary_factor": 0.25}}, "rope_parameters: partial_rotary_factor is"),
        ({"rope_parameters": {"rope_base": 5e5}}, "rope_parameters: rope_base is 500000.0; allowed: rope_theta, "),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; allowed: an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        (
            {"rope_scaling": {"rope_type": "proportional", "factor": 4.0}},
            "rope_type is 'proportional'; allowed: default,",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling: factor is missing"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0.0] * 8}},
            r"long_factor is \[0.*\]; allowed: a list of 8 numbers above 0",
        ),
        (
            {
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
                "original_max_position_embeddings": 1,
            },
            "original_max_position_embeddings is 1; allowed: an integer of at least 2",
        ),
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_theta is 1; allowed: another"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, r"high_freq_factor is 4.0; allowed: .* above .* \(4.0\)"),
        (PHI3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type is 'linear'; allowed: default, longrope"),
        (PHI3 | {"partial_rotary_factor": 0.2}, "partial_rotary_factor is 0.2; allowed: 0.125, 0.25, "),
        (
            SMOLLM3 | {"no_rope_layers": [1, 0]},
            r"no_rope_layers is \[1, 0\]; allowed: a list of at least 3 times 0 or 1",
        ),
        ({"architectures": None, "model_type": "cohere", "use_qk_norm": True}, "use_qk_norm is True; allowed: False"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; allowed: null"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; allowed: False"),
        (GEMMA3 | {"hidden_activation": "silu"}, "hidden_activation is 'silu'; allowed: gelu_pytorch_tanh"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 10000.0; allowed: full_attention, sliding"),
        ({"quantization_config": {"bits": 4}}, "quant_method is missing; allowed: fp8"),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types is"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window is missing; allowed: true"),
        (QWEN2 | {"layer_types": ["chunked_attention"] * 3}, "layer_types is"),
    ],
)
def test_a_field_that_cannot_be_served_is_named_with_what_is_allowed(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, fields)


def test_a_file_that_is_no_json_object_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        read_config(tmp_path)
    for content in (b"", b"[]", b"{", b"\xff", b"[" * 10**6, b"9" * 5000):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.json: "):
            read_config(tmp_path)
