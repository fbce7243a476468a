"""Converts tokens to text as they come: whole characters only, O(1) per token.

Every token stands for some bytes; the text of a completion is their concatenation, decoded as UTF-8. The bytes of a
token are looked up once and kept, and the bytes of an unfinished character are held back.

With byte-level tokenizers (Llama 3, Qwen) the joined pieces equal the library's `decode` of all ids. With tokenizers
like SentencePiece (Llama 2, Mistral) they differ in two places: a completion keeps the space before its first word,
which `decode` drops as the beginning of a text; and an invalid byte doesn't turn the valid characters before it into
U+FFFD.
"""

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class _Found(dict[int, bytes]):
    """Cache of lookups as a dictionary of its own: a token that is known runs no Python code."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token: int) -> bytes:
        found = self[token] = self._find(token)
        return found


class TokenBytes:
    """The bytes that each token of a vocabulary stands for; empty for special tokens and for ids without a text."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.to_str()).get("decoder")
        kinds = {part["type"] for part in _parts(decoder)}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._special = frozenset(
            index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._anchor = None if self._byte_level else _anchor(tokenizer)
        self._known = _Found(self._find)

    @property
    def longest(self) -> int:
        """Bytes of the longest token of the vocabulary, at least 1."""
        # With byte-level tokenizers, each character of a piece stands for a byte.
        vocabulary = self._tokenizer.get_vocab()
        return max((len(piece) if self._byte_level else len(piece.encode()) for piece in vocabulary), default=1)

    def __getitem__(self, token: int) -> bytes:
        return self._known[token]

    def join(self, tokens: Iterable[int]) -> bytes:
        """The bytes of several tokens, one behind the other."""
        return b"".join(map(self._known.__getitem__, tokens))

    def name(self, token: int) -> bytes:
        """The bytes of a token as the vocabulary has it: those of a special token, too."""
        return self[token] or (self._tokenizer.id_to_token(token) or "").encode()

    def _find(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None or token in self._special:
            return b""
        if self._byte_level:
            return _byte_level_bytes(piece)
        if self._byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes((int(match[1], 16),))
        if self._anchor is None:
            return self._tokenizer.decode([token]).encode()
        # The text that the token adds after other text, which can differ from its text at the beginning.
        before = self._tokenizer.decode([self._anchor])
        return self._tokenizer.decode([self._anchor, token])[len(before) :].encode()


class Detokenizer:
    """The text of one completion."""

    def __init__(self, token_bytes: TokenBytes, shown: Collection[int] = ()) -> None:
        """`shown`: special tokens whose names are part of the text."""
        self._token_bytes = token_bytes
        self._shown = shown
        self._unfinished = b""

    def push(self, tokens: Sequence[int]) -> str:
        """The characters that `tokens` complete; may be empty."""
        if self._shown:
            found, shown = self._token_bytes, self._shown
            data = b"".join(found.name(token) if token in shown else found[token] for token in tokens)
        else:
            data = self._token_bytes.join(tokens)
        return self._decode(data, final=False)

    def flush(self) -> str:
        """Ends the text; returns U+FFFD if it ends inside a character."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        data = self._unfinished + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._unfinished = data[used:]
        return text


def _parts(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    else:
        yield decoder


def _anchor(tokenizer: tokenizers.Tokenizer) -> int | None:
    """A plain letter's token: the library decodes the tokens after it as the middle of a text."""
    for character in "aeiost":
        token = tokenizer.token_to_id(character)
        if token is not None and tokenizer.decode([token]) == character:
            return token
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE's character for each byte: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in piece)
    except KeyError:
        return piece.encode()  # an added token is plain text
