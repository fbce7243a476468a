"""Keeps special tokens out of the text of chat messages: what a client writes never becomes a control token.

A chat template puts special tokens, such as `<|im_end|>`, around texts of clients, which may have the same characters.
Only the template's are special tokens:

    protect   before the template renders: each `<` of a client's text becomes a private character of Unicode, and so
              does the first sign of every other special token
    encode    the rendered prompt gets its signs back. What had them before is the template's. If the tokenizer finds
              other special tokens than those, it is asked again under names of them that no client can guess

A prompt without such signs in its texts, or in which they are no special tokens, has the token ids that the tokenizer
gives the whole prompt, as in Hugging Face's `apply_chat_template`.
"""

import re
import secrets
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import tokenizers

from kvrelay.router.request.chat import Conversation, TemplateFailed

ROLES = frozenset(
    ("system", "user", "assistant", "tool", "function", "developer", "model", "observation", "ipython", "environment")
)
"""Roles from which templates make special tokens, as in `'<|' + role + '|>'`."""
_TAG = re.compile(r"</?[A-Za-z_]\w*>|\[/?[A-Z_]+\]")
"""Marks in a template's source that templates look for in a text, such as `</think>`."""
PRIVATE = range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)
"""Code points that no template looks for."""
UNKNOWN = "\U0010ffff"
"""No character, so no vocabulary has it."""
_NO_TOKEN = -1

Encode = Callable[[tokenizers.Tokenizer, str], "array[int]"]


class SpecialTokens:
    """The special tokens of a model: those that its tokenizer's files call special, and others that only its chat
    template writes."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: str) -> None:
        """
        Args:
            template: source of the chat template.
        """
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._ids = {
            token.content: token_id
            for token_id, token in self._added.items()
            if token.content and (token.special or (token.content in template and not _TAG.fullmatch(token.content)))
        }
        # What stands for unknown characters comes from plain text, too.
        unknown = tokenizer.encode_batch_fast([UNKNOWN], add_special_tokens=False)[0].ids
        self._unknown = [name for name, token in self._ids.items() if token in unknown]
        self._special = frozenset(self._ids.values()).difference(unknown)
        self._lengths = sorted({len(name) for name in self._ids}, reverse=True)
        self._offsets: dict[str, set[int]] = {}
        """The signs, and where they are in the special tokens that have them."""
        for name in self._ids:
            at = next((at for at, sign in enumerate(name) if not sign.isalnum() and sign not in ' "\\'), 0)
            self._offsets.setdefault(name[at], set()).add(at)
        self._words = [name for name in self._ids if name.isalnum()]
        self._cores = {re.sub(r"^\W+|\W+$", "", name) for name in self._ids} - ROLES
        self._tags = [tag for tag in set(_TAG.findall(template)) if not any(tag in name for name in self._ids)]
        self._names = {name: f"special{secrets.token_hex(12)}x" for name in self._ids}
        """Other names of the special tokens, which no client can guess."""
        self._break = f"special{secrets.token_hex(12)}x"
        self._renamed: tuple[tokenizers.Tokenizer, dict[int, int]] | None = None

    def protect(self, conversation: Conversation) -> tuple[Conversation, dict[str, str]]:
        """The conversation without special tokens in its texts, and the sign that each private character in it stands
        for; none if the texts have no signs.

        Raises:
            TemplateFailed: a role has the name of a special token.
        """
        for at, message in enumerate(conversation.messages):
            if message["role"] in self._cores:
                raise TemplateFailed(f"the role of messages[{at}] is the name of a special token")
        values = conversation.messages, conversation.tools, conversation.variables
        texts = list(_texts(values))
        hidden = [sign for sign in self._offsets if not sign.isalnum()] + self._words
        present = [part for part in hidden if any(part in text for text in texts)]
        if not present:
            return conversation, {}
        free = (private for private in map(chr, chain(*PRIVATE)) if not any(private in text for text in texts))
        private = dict(zip(present, free, strict=False))
        if len(private) < len(present):
            raise TemplateFailed("the messages have every private character of Unicode")
        changes = [(part, private[part] + part[1:]) for part in present]
        tags = [(_changed(tag, changes), tag) for tag in self._tags]

        def protected(text: str) -> str:
            changed = _changed(text, changes)
            return text if changed == text else _changed(changed, tags)

        messages, tools, variables = (_mapped(value, protected) for value in values)
        signs = {private[part]: part[0] for part in present}
        return replace(conversation, messages=messages, tools=tools, variables=variables), signs

    def encode(self, rendered: str, signs: Mapping[str, str], encode: Encode) -> "array[int]":
        """The token ids of a prompt.

        Args:
            rendered: by the template from a protected conversation.
            signs: those of that.
            encode: the ids that a tokenizer gives a text.

        Raises:
            TemplateFailed: the model's vocabulary has no other tokens for the text of a special token.
        """
        text = _changed(rendered, signs.items())
        ids = encode(self._tokenizer, text)
        if not signs:
            return ids
        spans = self._spans(rendered)
        expected = [token for start, end in spans if (token := self._ids[rendered[start:end]]) in self._special]

        def sound(ids: "array[int]") -> bool:
            return [token for token in ids if token in self._special] == expected

        if sound(ids) and all(text.count(name) == rendered.count(name) for name in self._unknown):
            return ids
        for broken in ("", self._break):
            ids = self._encode_renamed(rendered, spans, {key: sign + broken for key, sign in signs.items()}, encode)
            if sound(ids):
                return ids
        raise TemplateFailed("the messages have the text of a special token, for which the model has no other tokens")

    def _encode_renamed(
        self, rendered: str, spans: Sequence[tuple[int, int]], signs: Mapping[str, str], encode: Encode
    ) -> "array[int]":
        """The ids of a prompt in which only the tokens at `spans` can be special."""
        if self._renamed is None:
            self._renamed = self._rename()
        tokenizer, originals = self._renamed
        parts, last = [], 0
        for start, end in spans:
            parts += [rendered[last:start], self._names[rendered[start:end]]]
            last = end
        ids = encode(tokenizer, _changed("".join((*parts, rendered[last:])), signs.items()))
        found = (originals.get(token, token) for token in ids)
        return array("I", [token for token in found if token != _NO_TOKEN])

    def _rename(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """A tokenizer over the same vocabulary whose special tokens have other names, and the original of each of its
        added ids."""
        renamed = tokenizers.Tokenizer(self._tokenizer.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (value := getattr(self._tokenizer, part)) is not None:
                setattr(renamed, part, value)
        names = {token_id: self._names.get(token.content, token.content) for token_id, token in self._added.items()}
        added = {
            token_id: tokenizers.AddedToken(
                names[token_id],
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            for token_id, token in self._added.items()
        }
        renamed.add_special_tokens([token for token in added.values() if token.special])
        renamed.add_tokens([token for token in added.values() if not token.special])
        renamed.add_special_tokens([tokenizers.AddedToken(self._break, normalized=False)])
        originals: dict[int, int] = {}
        for name, token_id in ((self._break, _NO_TOKEN), *((name, token_id) for token_id, name in names.items())):
            found = renamed.token_to_id(name)
            if found is None:
                raise RuntimeError(f"the tokenizer has not taken the added token {name}")
            originals[found] = token_id
        return renamed, originals

    def _spans(self, text: str) -> list[tuple[int, int]]:
        """The places of special tokens in a text, as the tokenizer finds them: the first, and of those the longest."""
        found = []
        for sign, offsets in self._offsets.items():
            at = text.find(sign)
            while at >= 0:
                for start in (at - offset for offset in offsets if offset <= at):
                    length = next((size for size in self._lengths if text[start : start + size] in self._ids), 0)
                    if length:
                        found.append((start, -length))
                at = text.find(sign, at + 1)
        spans: list[tuple[int, int]] = []
        for start, length in sorted(set(found)):
            if not spans or start >= spans[-1][1]:
                spans.append((start, start - length))
        return spans


def _changed(text: str, changes: Iterable[tuple[str, str]]) -> str:
    for old, new in changes:
        text = text.replace(old, new)
    return text


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The value with each text changed, names of fields too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(each, change) for key, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, (list, tuple)) else value
