"""Tiny random models of all text-only classes in transformers' causal-LM mapping, with every kind of layer in each."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 256
LAYERS = 4
WINDOW = 8
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embedding_size", "embedding_dim", "emb_dim", "lru_width"), 64
    ),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "output_embedding_size"), 64),
    **dict.fromkeys(
        ("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "ffn_hidden_size", "dff"), 128
    ),
    **dict.fromkeys(
        ("dim_ff", "d_inner", "feed_forward_size", "dense_intermediate_size", "shared_intermediate_size"), 128
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "linear_num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "num_query_groups"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "swa_head_dim", "dim_head", "d_head"), 16),
    **dict.fromkeys(("q_lora_rank", "index_head_dim", "state_size", "ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim", "attention_head_size"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "time_step_rank", "mamba_dt_rank", "gated_norm_rank"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    "qk_head_dim": 24,
    "index_n_heads": 16,
    "index_topk": 64,
    "linear_num_value_heads": 4,
    "swa_num_key_value_heads": 2,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers", "num_encoder_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(
        ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB_SIZE
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 256),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "local_attention"), WINDOW),
    **dict.fromkeys(("window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "router_hidden_size", "laurel_rank", "adapter_rank"), 32),
    "hidden_size_per_layer_input": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups", "zero_expert_num"), 2),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("pad_token_id", "eod_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id", "forced_eos_token_id"), 2),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), 1),
    **dict.fromkeys(("num_logits_to_keep", "num_nextn_predict_layers"), 0),
    "max_window_layers": 2,
    "use_sliding_window": True,
    "layerdrop": 0.0,
}
"""Values of fields, by name, where a config has them."""
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")
"""Fields that list the kinds of layers; each kind that the default has is in turn."""
KINDS_OF_ATTENTION = ("sliding_attention", "full_attention")
MIXED = ["conv", "full_attention"] * 2
NOTE = {
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank"), 16),
    "head_dim": 24,
    "qk_rope_head_dim": 8,
}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "xmod": {"default_language": "en_XX"},
    "deepseek_v2": {"num_experts_per_tok": 2},
    # In both, transformers applies this limit to chunks, but not to single tokens.
    "zamba2": {"mamba_ngroups": 1, "time_step_min": 1e-9},
    "nemotron_h": {"time_step_min": 1e-9},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "eos_token_id": 2,
        "ple_layer_ids": [1, 3],
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 1,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "hc_lowrank": 8,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "xlm": {"causal": True},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 8,
        "index_topk_blocks": 8,
        "index_n_heads": 4,
    },
    "lfm2": {"layer_types": MIXED},
    "lfm2_moe": {"layer_types": MIXED, "num_dense_layers": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {"01": {"head_dim": 32}, "03": {"head_dim": 32}},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in KINDS_OF_ATTENTION},
    },
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "shared_experts_intermediate_size": 64,
        "per_layer_config": dict.fromkeys(("01", "03"), NOTE),
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "zaya": {"num_experts_per_tok": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 128},
    },
    "roc_bert": {
        "pronunciation_vocab_size": 256,
        "pronunciation_embed_dim": 16,
        "shape_vocab_size": 256,
        "shape_embed_dim": 16,
    },
    "marian": {"share_encoder_decoder_embeddings": True},
}
"""Fields of one model type."""


def classes() -> dict[str, str]:
    """Names of the classes, each with the last of its model types, that of text alone; without those
    that take more than text."""
    found: dict[str, str] = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = names if isinstance(names, str) else names[0]
        if name not in OTHERS:
            found[name] = model_type
    return dict(sorted(found.items()))


OTHERS = frozenset(
    {
        "BltForCausalLM",
        "Emu3ForCausalLM",
        "FuyuForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4AssistantForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
        "Gemma4UnifiedAssistantForCausalLM",
        "GitForCausalLM",
        "GotOcr2ForConditionalGeneration",
        "MllamaForCausalLM",
        "MoshiForCausalLM",
        "MossTranscribeDiarizeForConditionalGeneration",
        "MusicgenForCausalLM",
        "MusicgenMelodyForCausalLM",
        "Phi4MultimodalForCausalLM",
        "TrOCRForCausalLM",
        "WhisperForCausalLM",
    }
)
"""Classes whose input isn't text alone."""


def tiny_config(model_type: str, **fields: object) -> PreTrainedConfig:
    """A small config of a model type, with these fields in the place of its own."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    text = default if getattr(default, "is_encoder_decoder", False) else default.get_text_config(decoder=True)
    small = _small(text, {**OWN.get(text.model_type, {}), **fields})
    if text is not default:
        names = [name for name, value in default.to_dict().items() if getattr(default, name, None) is text]
        config = config_class(**{names[0]: small}) if names else copy.deepcopy(default)
    else:
        config = config_class(**small)
    return config


def _small(default: PreTrainedConfig, own: dict[str, Any]) -> dict[str, Any]:
    known = default.to_dict()
    fields = {
        name: value
        for name, value in SMALL.items()
        if known.get(name) is not None or (name in ("head_dim",) and name in known)
    }
    for name in KINDS:
        if isinstance(known.get(name), list):
            kinds = list(dict.fromkeys(known[name]))
            fields[name] = [kinds[number % len(kinds)] for number in range(LAYERS)]
    if "num_key_value_heads" in fields and known["num_key_value_heads"] == known.get("num_attention_heads"):
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if "qk_rope_head_dim" in fields and "head_dim" in fields:
        fields["head_dim"] = fields["qk_rope_head_dim"]
    return {**fields, **own}


def tiny_model(model_type: str, **fields: object) -> PreTrainedModel:
    """A model with random weights, so large that logits are far apart; `fields` as for `tiny_config`."""
    torch.manual_seed(0)
    config = tiny_config(model_type, **fields)
    for part in (config, config.get_text_config(decoder=True)):
        for name, value in (("is_decoder", True), ("is_encoder_decoder", False)):
            if hasattr(part, name):
                setattr(part, name, value)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model)
    return model.eval()


def _randomize(model: PreTrainedModel) -> None:
    """Draws the weights of products and convolutions so large that each part of the model shows in the logits."""
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() > 1 and not any(part in name for part in ("A_log", "norm")):
                spread = 0.3 if "embed" in name or "wte" in name else 1.2 * weight[0].numel() ** -0.5
                weight.copy_(spread * torch.randn(weight.shape))


def save(model_type: str, folder: Path, **fields: object) -> Path:
    """Writes a tiny checkpoint into `folder`; `fields` as for `tiny_config`."""
    tiny_model(model_type, **fields).save_pretrained(folder)
    return folder
