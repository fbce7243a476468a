"""The Python client: `Client` blocks, `AsyncClient` is for asyncio. Both continue a stream whose router is lost.

>>> from kvrelay.client import Client
>>> with Client("localhost:50051") as client:
...     for chunk in client.generate("def __init__(self,", max_tokens=64, temperature=0):
...         print(chunk.text, end="", flush=True)
"""

from kvrelay.client.aio import AsyncChunkStream, AsyncClient
from kvrelay.client.errors import (
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    InternalError,
    InvalidRequest,
    KvrelayError,
    Unauthenticated,
    Unavailable,
)
from kvrelay.client.messages import (
    Chunk,
    Completion,
    FinishReason,
    GenerateOptions,
    ModelInfo,
    Prompt,
    Timeline,
    TokenLogprobs,
    Usage,
)
from kvrelay.client.security import Tls
from kvrelay.client.sync import ChunkStream, Client

__all__ = [
    "AsyncChunkStream",
    "AsyncClient",
    "Cancelled",
    "Chunk",
    "ChunkStream",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Exhausted",
    "FinishReason",
    "GenerateOptions",
    "InternalError",
    "InvalidRequest",
    "KvrelayError",
    "ModelInfo",
    "Prompt",
    "Timeline",
    "Tls",
    "TokenLogprobs",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
