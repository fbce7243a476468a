"""tokenizer.json and tokenizer_config.json of a GGUF file's model."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.pre_tokenizers import PreTokenizer

from kvrelay.models.gguf.config import CONTROL
from kvrelay.models.gguf.header import GGUFError, Header

PREFIX = "tokenizer.ggml"
USER_DEFINED = 4
SPACE = "\u2581"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = ("default", "gpt-2", "phi-2", "mellum")
"""Names of GPT-2's way to split a text into words, as `tokenizer.ggml.pre` has them."""
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Names of GPT-2's way with each digit as a word of its own."""
SPLITS: Mapping[str, str] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
}
"""Regular expressions of the other ways."""


def tokenizer_of(header: Header) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and the values of tokenizer_config.json.

    Raises:
        GGUFError: the file has none, or one that isn't known; the text names the key.
    """
    model = header.text(f"{PREFIX}.model")
    if model not in ("gpt2", "llama"):
        header.refuse(f"{PREFIX}.model", "gpt2, llama")
    tokens = header.entries(f"{PREFIX}.tokens", str)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if not tokens or len(vocabulary) < len(tokens):
        header.refuse(f"{PREFIX}.tokens", "different texts, at least one")
    kinds = header.entries(f"{PREFIX}.token_type", int, default=[1] * len(tokens))
    if len(kinds) != len(tokens):
        header.refuse(f"{PREFIX}.token_type", f"{len(tokens)} types, one for each token")
    named = {name: _named(header, tokens, name, end) for name, end in _NAMED.items()}
    try:
        if model == "gpt2":
            tokenizer, adds_bos = _byte_level(header, vocabulary)
        else:
            tokenizer, adds_bos = _sentencepiece(header, tokens, vocabulary, named["unk_token"])
        # In the order of the ids, as the library gives new ones in that order where they must be made.
        for token, kind in zip(tokens, kinds, strict=True):
            if kind in (CONTROL, USER_DEFINED):
                tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL)])
        _add_around(header, tokenizer, named, vocabulary, adds_bos)
    except GGUFError:
        raise
    except Exception as error:  # the library raises a bare Exception for every fault
        raise GGUFError(header.path, f"{PREFIX}: no tokenizer can be made of it: {error}") from error
    config: dict[str, Any] = {name: token for name, token in named.items() if token is not None}
    if "tokenizer.chat_template" in header.metadata:
        config["chat_template"] = header.text("tokenizer.chat_template")
    return tokenizer, config


_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Ends of the keys of special tokens, by their names in tokenizer_config.json."""


def _named(header: Header, tokens: Sequence[str], name: str, end: str) -> str | None:
    key = f"{PREFIX}.{end}_token_id"
    if key not in header.metadata:
        return None
    index = header.integer(key, minimum=0)
    if index >= len(tokens):
        header.refuse(key, f"an id below {len(tokens)}, the number of tokens")
    return tokens[index]


def _byte_level(header: Header, vocabulary: dict[str, int]) -> tuple[Tokenizer, bool]:
    """A byte-level BPE, and whether texts begin with the first token unless the file says otherwise."""
    merges = []
    for text in header.entries(f"{PREFIX}.merges", str):
        first, _, second = text.partition(" ")
        merges.append((first, second))
    pre = header.text(f"{PREFIX}.pre", "default")
    llama3 = SPLITS.get(pre) == _LLAMA3
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=llama3 or pre == "tekken"))
    parts: list[PreTokenizer]
    if pre in SPLITS:
        parts = [pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    elif pre in DIGITS:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    elif pre in GPT2:
        parts = [pre_tokenizers.ByteLevel(False)]
    else:
        header.refuse(f"{PREFIX}.pre", ", ".join((*GPT2, *DIGITS, *SPLITS)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if SPLITS.get(pre) == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, llama3


def _sentencepiece(
    header: Header, tokens: Sequence[str], vocabulary: dict[str, int], unknown: str | None
) -> tuple[Tokenizer, bool]:
    """As `_byte_level`, of SentencePiece's BPE: the merges follow from the tokens and their scores."""
    scores = header.entries(f"{PREFIX}.scores", float)
    if len(scores) != len(tokens):
        header.refuse(f"{PREFIX}.scores", f"{len(tokens)} scores, one for each token")
    pairs = []
    for token, index in vocabulary.items():
        parts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(first, second) for first, second in parts if first in vocabulary and second in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        pairs += [(scores[index], pair) for pair in known]
    pairs.sort(key=lambda scored: scored[0], reverse=True)
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary, [pair for _, pair in pairs], unk_token=unknown, fuse_unk=True, byte_fallback=True, dropout=None
        )
    )
    replaced = normalizers.Replace(" ", SPACE)
    prefixed = header.boolean(f"{PREFIX}.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replaced] if prefixed else [replaced])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _add_around(
    header: Header,
    tokenizer: Tokenizer,
    named: Mapping[str, str | None],
    vocabulary: Mapping[str, int],
    adds_bos: bool,
) -> None:
    """Adds the tokens that the model expects around texts."""
    bos = named["bos_token"] if header.boolean(f"{PREFIX}.add_bos_token", adds_bos) else None
    eos = named["eos_token"] if header.boolean(f"{PREFIX}.add_eos_token", False) else None
    around = [token for token in (bos, eos) if token is not None]
    if around:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
            pair=[*([bos] if bos else []), "$A", "$B", *([eos] if eos else [])],
            special_tokens=[(token, vocabulary[token]) for token in around],
        )
