"""Config, class and weights of a checkpoint of any architecture that transformers has. No code of a checkpoint runs."""

import inspect
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvrelay.engine.degree import Degree
from kvrelay.engine.kv.layout import FloatDtype
from kvrelay.engine.models.fast.loader import OnLoaded
from kvrelay.engine.models.general.gguf import architecture_of, read_gguf_config, read_gguf_weights
from kvrelay.engine.models.general.mxfp4 import class_without_experts, give_stored, is_placeholder
from kvrelay.engine.models.general.ranks.parts import WHOLE, Part, class_of_part, put_together
from kvrelay.engine.models.general.ranks.plan import allowed_degrees, check
from kvrelay.engine.models.reading.checkpoint import Checkpoint
from kvrelay.engine.models.reading.config import DTYPES, MOST_LAYERS, eos_token_ids
from kvrelay.engine.models.reading.fields import Fields, read_json
from kvrelay.engine.models.reading.stored import MXFP4, StoredFormat

VERSION: str = transformers.__version__
CONFIG = "config.json"
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
"""Fields that hold the longest context, in the order in which they are asked."""
MOST_WEIGHTS_A_BYTE = 16
"""Largest number of weights for each byte of the files: tied ones are held once there."""
UNLIMITED_CONTEXT = 2**17
"""Longest context, in tokens, of a model whose config names none."""
ATTENTION = "_kvrelay_attention"
"""Attribute of a model: the name of the function that its parts attend by."""
ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable of transformers."""
_LOADING = threading.Lock()
"""Lock that is held while a model is loaded, because transformers then changes global state."""
MODEL_TYPES = "a model type of transformers " + VERSION


@dataclass(frozen=True, slots=True)
class GeneralConfig:
    """A model as its config describes it."""

    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: FloatDtype
    """Dtype of the weights in the files, as the config says; float32 if it doesn't."""
    gguf: str = ""
    """Architecture as the GGUF file names it; empty if the weights are in safetensors files."""

    stored: StoredFormat | None = None
    """Format of the files' experts; None if nothing is quantized."""
    form = ""
    """See `ModelConfig.form`."""

    @property
    def architecture(self) -> str:
        return self.model_class.__name__

    @property
    def text(self) -> PreTrainedConfig:
        """The config of the text model, which may be a part of the whole."""
        return self.config.get_text_config(decoder=True)


def read_general_config(folder: Path) -> GeneralConfig:
    """The config of the model in `folder`.

    Raises:
        ValueError: the config can't be read, or transformers has no model of this type that continues a text; the text
            names file, field and value.
    """
    fields = Fields(CONFIG, read_json(folder / CONFIG))
    if architecture := architecture_of(fields):
        found = general_config(read_gguf_config(Checkpoint(folder), fields), fields, folder)
        return replace(found, gguf=architecture)
    if fields.get("model_type") not in CONFIG_MAPPING:
        fields.refuse("model_type", MODEL_TYPES)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    return general_config(config, fields, folder)


def general_config(config: PreTrainedConfig, fields: Fields, folder: Path) -> GeneralConfig:
    """See `read_general_config`, with a config that transformers has read."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        fields.refuse("model_type", MODEL_TYPES + " that continues a text")
    stored = None
    if getattr(config, "quantization_config", None) is not None:
        quantized = fields.fields("quantization_config")
        method = None if quantized is None else quantized.get("quant_method")
        if method != MXFP4.method or fields.get("model_type") != "gpt_oss":
            allowed = "none, because this architecture isn't one of kvrelay's own; mxfp4 for gpt_oss"
            fields.refuse("quantization_config", allowed)
        stored = MXFP4
        # transformers would convert the experts to bfloat16; `general.mxfp4` reads them.
        del config.quantization_config
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    text = config.get_text_config(decoder=True)
    # Set before the class is made: a model that is one half of an encoder and a decoder must know it.
    for part in (config, text):
        for name, value in (("is_decoder", True), ("is_encoder_decoder", False), ("use_cache", True)):
            if hasattr(part, name):
                setattr(part, name, value)
    vocab_size = int(getattr(text, "vocab_size", 0) or 0)
    if vocab_size < 1:
        fields.refuse("vocab_size", "an integer of at least 1")
    limits = [getattr(text, name, None) for name in CONTEXT_FIELDS]
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    return GeneralConfig(
        config,
        model_class,
        vocab_size,
        known[0] if known else UNLIMITED_CONTEXT,
        eos_token_ids(folder, fields, vocab_size),
        dtype if dtype in DTYPES else "float32",
        stored=stored,
    )


def load_model(
    config: GeneralConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str,
    on_loaded: OnLoaded | None = None,
    part: Part = WHOLE,
) -> PreTrainedModel:
    """The model, or a rank's part of it, with its weights on a device.

    Args:
        on_loaded: called with the loaded share of a GGUF file's weights, 0 to 1.

    Raises:
        ValueError: the files don't hold what the class needs, or have weights that aren't finite; the text names file
            and tensor.
    """
    _check_size(config, checkpoint)
    transformers.utils.logging.disable_progress_bar()
    weights, model_class = None, config.model_class
    divided = part.place.degree.ranks > 1
    if divided:
        model_class = class_of_part(model_class, part)
    if config.stored is not None:
        if divided:
            raise ValueError(f"tensor_parallel is {part.place.degree.tensor}; allowed for experts in mxfp4: 1")
        model_class = class_without_experts(model_class)
    if config.gguf:
        weights = read_gguf_weights(config.model_class, config.config, checkpoint, config.gguf, dtype, on_loaded)
    try:
        with _one_by_one(divided):
            loaded: Any = model_class.from_pretrained(
                None if config.gguf else checkpoint.folder,
                config=config.config,
                state_dict=weights,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named, and refused, below
            )
    except (OSError, RuntimeError, KeyError) as error:
        raise ValueError(f"{checkpoint.folder}: {error}") from error
    model: PreTrainedModel
    model, info = loaded
    for kind, why in (("missing_keys", "is missing"), ("mismatched_keys", "has another shape than config.json says")):
        for found in sorted(info[kind]):
            name = found if isinstance(found, str) else found[0]
            if config.stored is not None and is_placeholder(model, name):
                continue
            raise ValueError(f"{_file_of(checkpoint, name)}: tensor {name} {why}")
    check_numbers(model, checkpoint)
    if config.stored is not None:
        model.__class__ = config.model_class
        give_stored(model, checkpoint)
    if divided:
        put_together(model, part.place)
    moved: Any = model.to(device)
    moved.eval().requires_grad_(False)
    return model


@contextmanager
def _one_by_one(wanted: bool) -> Iterator[None]:
    """Context in which transformers loads one model at a time, and if that is `wanted`, one tensor after the other: a
    tensor of which a rank keeps a part is then not in memory for longer than that takes.
    """
    with _LOADING:
        before = os.environ.get(ONE_BY_ONE)
        if wanted:
            os.environ[ONE_BY_ONE] = "1"
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(ONE_BY_ONE, None)
            else:
                os.environ[ONE_BY_ONE] = before


def without_weights(config: GeneralConfig) -> PreTrainedModel:
    """The model on the device `meta`."""
    with torch.device("meta"):
        return config.model_class(config.config)


def _check_size(config: GeneralConfig, checkpoint: Checkpoint) -> None:
    """Raises ValueError if the model has far more weights than the files, which would take the memory for them."""
    layers = getattr(config.text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise ValueError(f"{CONFIG}: num_hidden_layers is {layers}; allowed: up to {MOST_LAYERS}")
    weights = sum(weight.numel() for weight in without_weights(config).parameters())
    held = sum(entry.end - entry.begin for entry in checkpoint.tensors.values())
    if weights > MOST_WEIGHTS_A_BYTE * held:
        raise ValueError(
            f"{checkpoint.folder}: {CONFIG} describes a model of {weights} weights, and the files have {held} bytes"
        )


def check_division(folder: Path, degree: Degree, experts: int) -> None:
    """Checks that the model in `folder` can be divided over the ranks of a worker, without reading its weights.

    Args:
        experts: parts over which whole experts are divided, `expert_parallel`.

    Raises:
        ValueError: it can't; the text names the option, its value and what is allowed.
    """
    check(without_weights(read_general_config(folder)), degree, experts)


def degrees_of(folder: Path) -> list[int]:
    """Numbers of ranks that the model in `folder` can be divided over, by tensor parallelism, without reading its
    weights."""
    return allowed_degrees(without_weights(read_general_config(folder)))


def check_numbers(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Raises ValueError naming file and tensor if a weight isn't finite."""
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and not weight.isfinite().all():
            raise ValueError(f"{_file_of(checkpoint, name)}: tensor {name} has a number that is infinite or NaN")


def _file_of(checkpoint: Checkpoint, name: str) -> Path:
    """The file that has the tensor; if the name is another one there, the only file, or the folder."""
    for known, entry in checkpoint.tensors.items():
        if known == name or name.endswith(f".{known}") or known.endswith(f".{name}"):
            return entry.path
    paths = {entry.path for entry in checkpoint.tensors.values()}
    return paths.pop() if len(paths) == 1 else checkpoint.folder


def parameters_of(model: PreTrainedModel) -> frozenset[str]:
    """Names of the arguments of the model's `forward`."""
    signature: Any = inspect.signature(model.forward)
    return frozenset(signature.parameters)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Sets the attention function of all of the model's parts to one that is registered with transformers."""
    if getattr(model, ATTENTION, None) == name:
        return
    setattr(model, ATTENTION, name)
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for config in configs.values():
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = name  # noqa: SLF001  # `set_attn_implementation` refuses some models
