"""The architectures that kvrelay can serve."""

from kvrelay.engine.models.architecture import Architecture
from kvrelay.engine.models.llama import LLAMA
from kvrelay.engine.models.mistral import MISTRAL
from kvrelay.engine.models.qwen2 import QWEN2
from kvrelay.engine.models.qwen3 import QWEN3

ARCHITECTURES: dict[str, Architecture] = {known.model_type: known for known in (LLAMA, MISTRAL, QWEN2, QWEN3)}
