"""The model's tokenizer: converts text and chat messages to token ids, and token ids to text."""

import asyncio
import json
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from kvrelay.router.request.chat import ChatTemplate, Conversation, TemplateFailed, load_chat_template
from kvrelay.router.request.special import SpecialTokens
from kvrelay.router.text.detokenizer import TokenBytes

T = TypeVar("T")

INLINE_CHARACTERS = 4096
"""Longest text in characters that is encoded on the event loop; longer ones, above a millisecond, go to a thread."""

INLINE_TOKENS = 4096
"""Most tokens that are decoded on the event loop, for the same reason."""


class TooManyTokens(ValueError):
    """A text has more tokens than it may have."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} tokens")
        self.count = count


class Tokenizer:
    """A checkpoint's `tokenizer.json`, `tokenizer_config.json` and chat template."""

    def __init__(self, folder: Path, chat_template: Path | None = None, *, threads: bool = True) -> None:
        """Reads them from `folder`, or the template from `chat_template`.

        Args:
            threads: whether long texts are encoded and decoded on threads.

        Raises:
            ValueError: a file is missing or can't be used; the text names the file.
        """
        self._tokenizer = _read_tokenizer(folder / "tokenizer.json")
        settings = read_object(folder / "tokenizer_config.json")
        self._template: ChatTemplate | None = load_chat_template(folder, settings, chat_template)
        self._special = SpecialTokens(self._tokenizer, self.template_source)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer") if threads else None
        self.token_bytes = TokenBytes(self._tokenizer)
        self.longest_token_bytes = self.token_bytes.longest
        """Bytes of text that one token stands for, at most."""

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    async def encode(self, text: str, most: int | None = None) -> "array[int]":
        """Token ids of a prompt, with the special tokens that the model expects around it.

        Raises:
            TooManyTokens: they are more than `most`.
        """
        return await self._run(len(text) <= INLINE_CHARACTERS, lambda: self._encode(text, most, special=True))

    async def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """The token ids of each word by itself and after a space, where they differ."""

        def encode() -> list[list[int]]:
            both = [form for word in words for form in (word, f" {word}")]
            found = self._tokenizer.encode_batch_fast(both, add_special_tokens=False)
            return [list(ids) for ids in dict.fromkeys(tuple(encoding.ids) for encoding in found) if ids]

        return await self._run(sum(map(len, words)) <= INLINE_CHARACTERS // 2, encode)

    @property
    def template_source(self) -> str:
        """The chat template; empty if there is none."""
        return "" if self._template is None else self._template.source

    async def encode_chat(
        self, make: Callable[[], Conversation], max_characters: int, most: int | None = None
    ) -> "array[int]":
        """Token ids of a conversation. A short prompt is encoded at once: a template may render much more than it was
        given.

        Args:
            make: the conversation.
            max_characters: of the rendered prompt.

        Raises:
            LookupError: the model has no chat template.
            TemplateFailed: the template refuses the messages, or takes too long, or renders too much.
            TooManyTokens: the prompt has more than `most`.
        """
        template = self._template
        if template is None:
            raise LookupError("the model has no chat template")

        conversation = make()
        signs: dict[str, str] = {}
        try:
            if not conversation.parse_special:
                conversation, signs = self._special.protect(conversation)
        except RecursionError:
            raise TemplateFailed("the messages are nested too deeply") from None
        text = template.render(conversation, max_characters, signs)

        def encode(tokenizer: tokenizers.Tokenizer, text: str) -> "array[int]":
            return self._encode(text, most, special=False, tokenizer=tokenizer)

        return await self._run(len(text) <= INLINE_CHARACTERS, lambda: self._special.encode(text, signs, encode))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return await self._run(
            len(token_ids) <= INLINE_TOKENS,
            # decode_batch releases the interpreter lock while it works.
            lambda: self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=True)[0],
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """The text that the tokens stand for, as in a completion."""
        return b"".join(self.token_bytes[token] for token in token_ids).decode(errors="replace")

    def names(self, token_ids: Sequence[int]) -> str:
        """The text, with the names of special tokens."""
        return b"".join(map(self.token_bytes.name, token_ids)).decode(errors="replace")

    def id_of(self, piece: str) -> int | None:
        """The id of the token that is exactly `piece`."""
        found: int | None = self._tokenizer.token_to_id(piece)
        return found

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _encode(
        self, text: str, most: int | None, *, special: bool, tokenizer: tokenizers.Tokenizer | None = None
    ) -> "array[int]":
        # This releases the interpreter lock while it works, and computes no offsets, as `encode` does.
        encoding = (tokenizer or self._tokenizer).encode_batch_fast([text], add_special_tokens=special)[0]
        # Some million ids would hold the lock for 20 ms.
        if most is not None and len(encoding) > most:
            raise TooManyTokens(len(encoding))
        return array("I", encoding.ids)

    async def _run(self, inline: bool, work: Callable[[], T]) -> T:
        """Does the work at once, or on a thread."""
        if inline or self._threads is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ValueError(f"{path}: missing; the model folder needs a tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception for every fault in the file
        raise ValueError(f"{path}: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none.

    Raises:
        ValueError: the file holds something else; the text names it.
    """
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds {type(config).__name__}; allowed: an object")
    return config
