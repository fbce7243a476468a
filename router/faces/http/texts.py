"""`/tokenize` and `/detokenize`."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import to_json

from kvrelay.internal.v1.worker_pb2 import ModelInfo
from kvrelay.router.faces.http.fields import MAX_UINT32, Fields, Neutral, misfit, whole_list
from kvrelay.router.faces.http.messages import ConversationFields
from kvrelay.router.request.tokenizer import Tokenizer
from kvrelay.router.request.validation import (
    DETOKENIZE_IDS,
    TOKENIZE_BYTES,
    TOKENIZE_WHY,
    checked_ids,
    text_tokens,
)
from kvrelay.v1.inference_pb2 import TokenizeRequest as Texts


class TokenizeRequest(ConversationFields):
    """The body of `/tokenize`: a prompt, or messages."""

    model: str | None = None
    """Model's name, as in a completion."""
    prompt: str | None = Field(None, min_length=1)
    """Text."""
    return_token_strs: bool | None = None
    """The answer has the tokens' texts as `token_strs`."""
    add_special_tokens: Annotated[Any, Neutral(True)] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise misfit("prompt", None, "a text exactly if there are no messages")
        return self

    async def answer(self, model: ModelInfo, tokenizer: Tokenizer) -> bytes:
        """
        Raises:
            InvalidRequest: the text is too long, or the template doesn't render the messages.
        """
        texts = Texts(text=self.prompt) if self.prompt is not None else Texts(messages=self.conversation(self.tools))
        tokens = await text_tokens(texts, tokenizer, TOKENIZE_BYTES, TOKENIZE_WHY)
        answer = {"count": len(tokens), "max_model_len": model.max_context, "tokens": tokens.tolist()}
        if self.return_token_strs:
            answer["token_strs"] = [tokenizer.bytes_of(token).decode(errors="replace") for token in tokens]
        return to_json(answer)


class DetokenizeRequest(Fields):
    """The body of `/detokenize`."""

    model: str | None = None
    """Model's name, as in a completion."""
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MAX_UINT32)]], BeforeValidator(whole_list)] = Field(
        max_length=DETOKENIZE_IDS
    )
    """Token ids."""

    async def answer(self, model: ModelInfo, tokenizer: Tokenizer) -> bytes:
        """
        Raises:
            InvalidRequest: an id is outside of the vocabulary.
        """
        return to_json({"prompt": await tokenizer.decode(await checked_ids("tokens", self.tokens, model.vocab_size))})
