"""The text that comes token by token equals the text of all tokens; stop strings."""

import itertools
import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from kvrelay.internal.v1.worker_pb2 import Sampling
from kvrelay.router.request.prompt import Prompt
from kvrelay.router.request.validation import CheckedRequest
from kvrelay.router.session.output import Completion
from kvrelay.router.text.detokenizer import Detokenizer, TokenBytes
from kvrelay.router.text.stops import StopStrings
from kvrelay.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED
from support.tokenizers import byte_level_tokenizer

REPLACEMENT = "\ufffd"


def metaspace_tokenizer() -> Tokenizer:
    """Like those of Llama 2 and Mistral: words with `▁` for the space, and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,", "▁a", "▁b", "th", "▁th", "▁▁", "é", "日"]
    merges = [("▁", "a"), ("▁", "b"), ("t", "h"), ("▁", "th"), ("▁", "▁")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


BYTE_LEVEL = byte_level_tokenizer()
BYTE_LEVEL.add_tokens(["<tool>", "añadido\u2026", " x y "])
METASPACE = metaspace_tokenizer()
METASPACE.encode_special_tokens = True  # as text
BYTE_LEVEL_BYTES = TokenBytes(BYTE_LEVEL)
METASPACE_BYTES = TokenBytes(METASPACE)
UNICODE = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)


def incremental(table: TokenBytes, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(table)
    return [detokenizer.push([token]) for token in ids] + [detokenizer.flush()]


@settings(max_examples=150)
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=60))
def test_any_byte_level_ids_decode_to_the_same_text(ids: list[int]) -> None:
    assert "".join(incremental(BYTE_LEVEL_BYTES, ids)) == BYTE_LEVEL.decode(ids)


@settings(max_examples=300)
@given(UNICODE)
def test_any_text_comes_back_in_whole_characters(text: str) -> None:
    # Metaspace writes a space as `▁`, and puts one before the text.
    spaced = f" {text}".replace("▁", " ") if text else ""
    for tokenizer, table, expected in ((BYTE_LEVEL, BYTE_LEVEL_BYTES, text), (METASPACE, METASPACE_BYTES, spaced)):
        pieces = incremental(table, tokenizer.encode(text).ids)
        assert "".join(pieces) == expected
        assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in pieces)


@settings(max_examples=200)
@given(UNICODE, st.sampled_from(["", "ab", "é", "a b"]), st.integers(0, 6), st.data())
def test_tokens_that_come_together_give_what_they_give_one_by_one(
    text: str, stop: str, min_tokens: int, data: st.DataObject
) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    sampling = Sampling(max_tokens=100, min_tokens=min_tokens)
    request = CheckedRequest("r", "r/1", Prompt((5,)), sampling, (stop,) if stop else (), "")

    def pieces(sizes: Iterator[int]) -> tuple[str, list[int], int]:
        completion, shown, taken, reason = Completion(request, BYTE_LEVEL_BYTES), "", list[int](), 0
        left = ids
        while left and not reason:
            part, left = left[: (size := next(sizes))], left[size:]
            piece = completion.add(part, FINISH_REASON_UNSPECIFIED if left else FINISH_REASON_LENGTH)
            shown, taken, reason = shown + piece.text, [*taken, *piece.token_ids], piece.finish_reason
        return shown, taken, reason

    cuts = data.draw(st.lists(st.integers(1, 9), min_size=len(ids), max_size=len(ids)))
    assert pieces(iter(cuts)) == pieces(itertools.repeat(1))


def test_bytes_of_a_character_are_held_until_it_is_whole() -> None:
    ids = [METASPACE.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    assert incremental(METASPACE_BYTES, ids) == ["", "", "", "🙂", ""]
    assert incremental(METASPACE_BYTES, ids[:3]) == ["", "", "", REPLACEMENT]
    assert incremental(METASPACE_BYTES, [*ids[:2], METASPACE.token_to_id("a")]) == ["", "", f"{REPLACEMENT}a", ""]


def test_added_tokens_are_their_text_and_special_ones_have_none() -> None:
    ids = [BYTE_LEVEL.token_to_id(token) for token in ("<tool>", "<s>", " x y ", "</s>")]
    assert incremental(BYTE_LEVEL_BYTES, ids) == ["<tool>", "", " x y ", "", ""]


# Stop strings.

LETTERS = "ab"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), min_size=1, max_size=4)


def expected_end(pieces: list[str], stops: list[str], armed_from: int) -> int | None:
    """The end of the text: before the match that is complete first in an armed piece, the longest of several."""
    text = "".join(pieces)
    for end in range(len("".join(pieces[:armed_from])) + 1, len(text) + 1):
        ended = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ended:
            return end - max(ended)
    return None


@settings(max_examples=200)
@given(st.lists(st.text(LETTERS, max_size=4), max_size=20), STOPS, st.just(0) | st.integers(0, 20))
def test_text_ends_before_the_first_match_however_it_is_cut(
    pieces: list[str], stops: list[str], armed_from: int
) -> None:
    """A match that ends in an earlier piece than `armed_from` is shown."""
    text = "".join(pieces)
    end = expected_end(pieces, stops, armed_from)
    stop_strings = StopStrings(stops)
    shown = ""
    stopped = False
    for at, piece in enumerate(pieces):
        more, stopped = stop_strings.push(piece, armed=at >= armed_from)
        shown += more
        so_far = "".join(pieces[: at + 1])
        if stopped:
            break
        # The text held back is the longest end that may begin a stop string, and no longer.
        held = so_far[len(shown) :]
        longest = max(
            k
            for k in range(len(so_far) + 1)
            if k == 0 or any(stop[:k] == so_far[-k:] and k < len(stop) for stop in stops)
        )
        assert len(held) == longest
    assert stopped == (end is not None)
    assert shown + ("" if stopped else stop_strings.flush()) == (text if end is None else text[:end])


@pytest.mark.parametrize("kind", ["equal", "different"])
def test_stop_strings_cost_a_bounded_number_of_steps(kind: str) -> None:
    """Strings that are twice as long cost less than ten times as much, whatever begins them."""
    text = "".join(random.Random(1).choices("xxxxxxxxxxxxxxxy", k=5000))

    def seconds(length: int) -> float:
        ends = ["x"] * 16 if kind == "equal" else [chr(97 + index) for index in range(16)]
        stop_strings = StopStrings([f"{'x' * (length - 1)}{end}" for end in ends])
        began = time.process_time()
        shown = "".join(stop_strings.push(character)[0] for character in text)
        assert shown + stop_strings.flush() == text
        return time.process_time() - began

    assert min(seconds(256) for _ in range(3)) < 10 * max(seconds(128) for _ in range(3))
