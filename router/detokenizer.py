"""Tokens to text as they come: whole characters only, O(1) per token.

Every token stands for some bytes, and the text of a completion is their concatenation, decoded as UTF-8. So a token is
turned into its bytes once (and kept), and an incremental UTF-8 decoder holds back the bytes of an unfinished character;
nothing is ever decoded twice.

For byte-level tokenizers (Llama 3, Qwen) the sum of the pieces equals the library's `decode` of all ids, whatever they
are. SentencePiece-like ones (Llama 2, Mistral) differ from it in two places, for the better: a completion keeps the
space that its first word begins with (`decode` takes it for the beginning of a text and drops it), and a broken byte
doesn't turn the whole characters before it into U+FFFD.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes that each token of a vocabulary stands for; none for special tokens and for ids without a text."""

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
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._find(token)
        return known

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
        # What the token adds to a text, not what it is as the beginning of one.
        before = self._tokenizer.decode([self._anchor])
        return self._tokenizer.decode([self._anchor, token])[len(before) :].encode()


class Detokenizer:
    """The text of one completion."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that `token` completes; may be none."""
        return self._utf8.decode(self._token_bytes[token])

    def flush(self) -> str:
        """Ends the text: U+FFFD if it ends inside a character."""
        return self._utf8.decode(b"", final=True)


def _parts(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _parts(part)
    else:
        yield decoder


def _anchor(tokenizer: tokenizers.Tokenizer) -> int | None:
    """A token that is plain text: what follows it is decoded as the middle of a text."""
    for character in "aeiost":
        token = tokenizer.token_to_id(character)
        if token is not None and tokenizer.decode([token]) == character:
            return token
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    values: Iterable[int | None] = [_ALPHABET.get(character) for character in piece]
    whole = [value for value in values if value is not None]
    # An added token is text and not in the alphabet of bytes as a rule.
    return bytes(whole) if len(whole) == len(piece) else piece.encode()
