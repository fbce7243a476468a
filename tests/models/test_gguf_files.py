"""GGUF files that are broken or not served are refused with file and field; tokenizers are those that were stored."""

import json
import os
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValue, GGUFValueType, GGUFWriter, TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvrelay.engine.models.reading.checkpoint import Checkpoint, expected_tensors
from kvrelay.engine.models.reading.config import read_config
from kvrelay.models import resolve
from kvrelay.models.gguf import folder
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf

Edit = Callable[[GGUFWriter], object]
TEXTS = [
    "Hello, it's me",
    "a  12 b 345",
    " größer 日本語 🙂\n\n  def f(x):\n\treturn x",
    "<|bos|>[user] hi<|eos|> </s> <s>",
    "",
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("cache")
        patch.setattr(folder, "user_cache", lambda: home)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    path = tmp_path_factory.mktemp("checkpoint") / "llama"
    return make_checkpoint(path, "llama", intermediate_size=128, num_hidden_layers=1, rope_parameters=rope)


@pytest.fixture(scope="module")
def whole(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(checkpoint, tmp_path_factory.mktemp("whole") / "tiny.gguf", lambda name: "Q4_1")


def read(model: Path) -> None:
    """Does what happens before a worker takes the model."""
    made = resolve(str(model))
    config = read_config(made)
    optional = frozenset({"lm_head.weight"}) if config.tie_embeddings else frozenset()
    Checkpoint(made).verify(expected_tensors(config), optional)


def put(key: str, value: Any, kind: GGUFValueType = GGUFValueType.UINT32) -> Edit:
    """Changes a key of the metadata; None removes it."""

    def edit(writer: GGUFWriter) -> None:
        if value is None:
            writer.kv_data[0].pop(key)
        else:
            writer.kv_data[0][key] = GGUFValue(value=value, type=kind)

    return edit


def without(name: str) -> Edit:
    return lambda writer: writer.tensors[0].pop(name)


STRING, ARRAY = GGUFValueType.STRING, GGUFValueType.ARRAY
EDITS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "another architecture": (
        put("general.architecture", "rwkv7", STRING),
        ("general.architecture", "rwkv7", "qwen3", "gemma2"),
    ),
    "no architecture": (put("general.architecture", None), ("general.architecture is missing",)),
    "experts": (put("llama.expert_count", 8), ("llama.expert_count is 8", "allowed: 0")),
    "no layers": (put("llama.block_count", None), ("llama.block_count is missing",)),
    "heads in unequal groups": (
        put("llama.attention.head_count_kv", 3),
        ("llama.attention.head_count_kv is 3", "head_count (4)"),
    ),
    "an end that isn't embedded": (
        put("tokenizer.ggml.eot_token_id", 320),
        ("tokenizer.ggml.eot_token_id is 320", "below 320"),
    ),
    "0 heads": (put("llama.attention.head_count", 0), ("llama.attention.head_count is 0",)),
    "absurd sizes": (put("llama.embedding_length", 2**32 - 1), ("llama.embedding_length is 4294967295",)),
    "a text": (put("llama.context_length", "long", STRING), ("llama.context_length is 'long'",)),
    "part of a head turns": (put("llama.rope.dimension_count", 8), ("llama.rope.dimension_count is 8", "(16)")),
    "yarn": (put("llama.rope.scaling.type", "yarn", STRING), ("llama.rope.scaling.type is 'yarn'", "none, linear")),
    "no tokenizer": (put("tokenizer.ggml.model", None), ("tokenizer.ggml.model is missing",)),
    "an unknown tokenizer": (put("tokenizer.ggml.model", "bert", STRING), ("tokenizer.ggml.model is 'bert'", "gpt2")),
    "an unknown split": (put("tokenizer.ggml.pre", "new", STRING), ("tokenizer.ggml.pre is 'new'", "llama-bpe")),
    "no tokens": (put("tokenizer.ggml.tokens", None), ("tokenizer.ggml.tokens is missing",)),
    "no merges": (put("tokenizer.ggml.merges", None), ("tokenizer.ggml.merges is missing",)),
    "broken merges": (put("tokenizer.ggml.merges", ["x"], ARRAY), ("tokenizer.ggml: no tokenizer",)),
    "too few tokens": (put("tokenizer.ggml.tokens", ["a"], ARRAY), ("tokenizer.ggml.token_type",)),
    "an id without a token": (put("tokenizer.ggml.bos_token_id", 10**6), ("tokenizer.ggml.bos_token_id is 1000000",)),
    "a split of several": (put("split.count", 3, GGUFValueType.UINT16), ("split.count is 3", "1, the number of files")),
    "no embedding": (without("token_embd.weight"), ("tensor token_embd.weight is missing",)),
    "no norm": (without("blk.0.ffn_norm.weight"), ("tensor blk.0.ffn_norm.weight is missing",)),
    "an unknown tensor": (
        lambda writer: writer.add_tensor("blk.0.ssm_a.weight", np.zeros((8, 32), np.float32)),
        ("tensor blk.0.ssm_a.weight", "LlamaForCausalLM"),
    ),
    "rope factors of 0": (
        lambda writer: writer.add_tensor("rope_freqs.weight", np.zeros(8, np.float32)),
        ("rope_freqs.weight", "numbers above 0"),
    ),
    "other rope factors": (
        lambda writer: writer.add_tensor("rope_freqs.weight", np.linspace(1, 9, 8).astype(np.float32)),
        ("rope_freqs.weight", "Llama 3"),
    ),
}


def refuses(file: Path, named: tuple[str, ...]) -> None:
    """The file isn't read; the text has its name and all of `named`."""
    with pytest.raises(ValueError, match=file.stem) as caught:
        read(file)
    assert [part for part in named if part not in str(caught.value)] == []


@pytest.mark.parametrize(("edit", "named"), EDITS.values(), ids=EDITS)
def test_what_is_not_served_is_refused(checkpoint: Path, tmp_path: Path, edit: Edit, named: tuple[str, ...]) -> None:
    refuses(write_gguf(checkpoint, tmp_path / "tiny.gguf", edit=edit), named)


def patched(data: bytes, at: int, form: str, value: int) -> bytes:
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]


def after(data: bytes, text: bytes) -> int:
    """The place behind a text in the header."""
    return data.index(struct.pack("<Q", len(text)) + text) + 8 + len(text)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], tuple[str, ...]]] = {
    "empty": (lambda data: b"", ("not a GGUF file",)),
    "another magic": (lambda data: b"GGML" + data[4:], ("not a GGUF file",)),
    "an old version": (lambda data: patched(data, 4, "<I", 1), ("version: 1; allowed: 2, 3",)),
    "big-endian": (lambda data: patched(data, 4, ">I", 3), ("version", "big-endian")),
    "a count of tensors": (lambda data: patched(data, 8, "<Q", 2**60), ("number of tensors", str(2**60))),
    "a count of pairs": (lambda data: patched(data, 16, "<Q", 2**63), ("number of metadata pairs", str(2**63))),
    "a length of a text": (lambda data: patched(data, 24, "<Q", 2**62), ("metadata pair 0", str(2**62))),
    "a length of a list": (
        lambda data: patched(data, after(data, b"tokenizer.ggml.tokens") + 8, "<Q", 2**61),
        ("tokenizer.ggml.tokens", str(2**61)),
    ),
    "a list of numbers": (
        lambda data: patched(data, after(data, b"tokenizer.ggml.token_type") + 8, "<Q", 2**40),
        ("tokenizer.ggml.token_type", str(2**40)),
    ),
    "a type of a value": (
        lambda data: patched(data, after(data, b"llama.block_count"), "<I", 99),
        ("llama.block_count", "type 99"),
    ),
    "dimensions": (
        lambda data: patched(data, after(data, b"output.weight"), "<I", 9),
        ("output.weight", "9 dimensions"),
    ),
    "a shape": (
        lambda data: patched(data, after(data, b"output.weight") + 4, "<Q", 2**50),
        ("output.weight", "shape", str(2**50)),
    ),
    "a shape of no blocks": (
        lambda data: patched(data, after(data, b"output.weight") + 4, "<Q", 63),
        ("output.weight", "63", "blocks of 32"),
    ),
    "a type of a tensor": (
        lambda data: patched(data, after(data, b"output.weight") + 20, "<I", 77),
        ("output.weight", "type 77", "Q4_K"),
    ),
    "an offset out of the file": (
        lambda data: patched(data, after(data, b"output.weight") + 24, "<Q", 2**40),
        ("output.weight", str(2**40)),
    ),
    "an offset in another tensor": (
        lambda data: patched(data, after(data, b"output_norm.weight") + 16, "<Q", 32),
        ("output_norm.weight", "within tensor"),
    ),
    "cut short by one byte of a tensor": (lambda data: data[:-33], ("cut short",)),
    "cut short in the header": (lambda data: data[:700], ("cut short",)),
}


@pytest.mark.parametrize(("damage", "named"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused(
    whole: Path, tmp_path: Path, damage: Callable[[bytes], bytes], named: tuple[str, ...]
) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(damage(whole.read_bytes()))
    refuses(file, (f"{file}: ", *named))


@given(seed=st.integers(0, 2**32), bits=st.integers(1, 6), cut=st.one_of(st.none(), st.floats(0, 1)))
def test_no_damage_of_a_header_crashes_or_takes_memory(whole: Path, seed: int, bits: int, cut: float | None) -> None:
    """Bytes changed anywhere in the header, and the file cut at any place: it is read, or refused with its name."""
    data, draw = bytearray(whole.read_bytes()), random.Random(seed)
    for _ in range(bits):
        data[draw.randrange(4, 9000)] = draw.choice((0, 1, 127, 255, draw.randrange(256)))
    file = whole.with_name("damaged.gguf")
    file.write_bytes(data if cut is None else data[: int(cut * len(data))])
    refused = str(file)
    tracemalloc.start()
    try:
        read(file)
    except ValueError as error:
        refused = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert str(file) in refused
    assert peak < 30 * 2**20


def test_a_name_of_none_of_no_splits_is_that_of_one_file(whole: Path, tmp_path: Path) -> None:
    os.link(whole, odd := tmp_path / "tiny-00001-of-00000.gguf")
    read(odd)


def test_a_missing_split_is_named(checkpoint: Path, tmp_path: Path) -> None:
    first = write_gguf(checkpoint, tmp_path / "tiny.gguf", splits=3)
    read(first)
    missing = first.with_name("tiny-00002-of-00003.gguf")
    missing.unlink()
    for model in (first, tmp_path):
        with pytest.raises(ValueError, match=f"{missing}: no such file"):
            read(model)


def test_a_folder_of_several_models_asks_for_one(whole: Path, tmp_path: Path) -> None:
    for name in ("one.gguf", "other.gguf"):
        os.link(whole, tmp_path / name)
    with pytest.raises(ValueError, match=r"several GGUF models; give one of them: one\.gguf, other\.gguf"):
        resolve(str(tmp_path))
    assert resolve(str(tmp_path / "one.gguf")).name == "one"
    (tmp_path / "other.gguf").unlink()
    assert resolve(str(tmp_path)) == resolve(str(tmp_path / "one.gguf"))


def test_folders_that_were_used_longest_ago_are_removed(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(folder, "MAX_FOLDERS", 2)
    made = []
    for age in (3, 2, 1):
        copy = tmp_path / f"{age}.gguf"
        copy.write_bytes(whole.read_bytes())
        made.append(resolve(str(copy)))
        os.utime(made[-1].parent, (1e9 - age, 1e9 - age))
    assert [path.is_dir() for path in made] == [False, True, True]
    assert resolve(str(tmp_path / "3.gguf")) == made[0]
    assert [path.is_dir() for path in made] == [True, False, True]


def test_a_changed_file_is_read_anew(checkpoint: Path, tmp_path: Path) -> None:
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf")
    before = resolve(str(file))
    assert resolve(str(file)) == before
    file = write_gguf(checkpoint, file, edit=put("llama.context_length", 512))
    assert read_config(resolve(str(file))).max_positions == 512
    assert read_config(before).max_positions == 1024


def test_the_tokenizer_and_the_template_are_those_of_the_checkpoint(checkpoint: Path, whole: Path) -> None:
    made = resolve(str(whole))
    original, found = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (checkpoint, made))
    for text in TEXTS:
        for special in (False, True):
            ids = found.encode(text, add_special_tokens=special).ids
            assert ids == original.encode(text, add_special_tokens=special).ids
            assert found.decode(ids, skip_special_tokens=special) == original.decode(ids, skip_special_tokens=special)
    config = json.loads((made / "tokenizer_config.json").read_text())
    assert config["chat_template"] == (checkpoint / "chat_template.jinja").read_text()
    assert (config["bos_token"], config["eos_token"]) == ("<|bos|>", "<|eos|>")


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
def test_splits_into_words_are_those_of_transformers(checkpoint: Path, tmp_path: Path, pre: str) -> None:
    from transformers import AutoTokenizer

    file = write_gguf(checkpoint, tmp_path / "tiny.gguf", edit=put("tokenizer.ggml.pre", pre, STRING))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    ours = Tokenizer.from_file(str(resolve(str(file)) / "tokenizer.json"))
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False).ids == theirs(text, add_special_tokens=False).input_ids


def test_digits_are_split_where_the_file_says_so(checkpoint: Path, tmp_path: Path) -> None:
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf", edit=put("tokenizer.ggml.pre", "smollm", STRING))
    tokenizer = Tokenizer.from_file(str(resolve(str(file)) / "tokenizer.json"))
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("it's 345")]
    assert words == ["it", "'s", "Ġ", "3", "4", "5"]


def test_a_sentencepiece_vocabulary(checkpoint: Path, tmp_path: Path) -> None:
    """Merges follow from scores; texts begin with a space and the first token; other characters are bytes."""
    from transformers import AutoTokenizer

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdehilorw", "▁h", "▁he", "lo", "llo", "▁hello", "el", "▁w", "or", "▁wor", "ld"]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    kinds += [TokenType.NORMAL] * (len(pieces) - len(kinds))

    def edit(writer: GGUFWriter) -> None:
        for key in ("model", "pre", "tokens", "token_type", "merges"):
            writer.kv_data[0].pop(f"tokenizer.ggml.{key}")
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_types(kinds)
        writer.add_token_scores([float(-index) for index in range(len(pieces))])
        put("tokenizer.ggml.bos_token_id", 1)(writer)
        put("tokenizer.ggml.eos_token_id", 2)(writer)
        put("tokenizer.ggml.unknown_token_id", 0)(writer)

    file = write_gguf(checkpoint, tmp_path / "tiny.gguf", edit=edit)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    ours = Tokenizer.from_file(str(resolve(str(file)) / "tokenizer.json"))
    for text in ("hello world", "hello  worldly 日本", "a</s>", "word\n"):
        ids = ours.encode(text).ids
        assert ids == theirs(text).input_ids
        assert ids[0] == 1
        assert ours.decode(ids) == text.replace("</s>", "")
    assert ours.encode("hello").tokens == ["<s>", "▁hello"]


def test_transformers_reads_the_same_configuration(whole: Path) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.from_pretrained(whole.parent, gguf_file=whole.name)
    ours = read_config(resolve(str(whole)))
    assert theirs.model_type == "llama"
    for name, value in (
        ("hidden_size", ours.hidden_size),
        ("intermediate_size", ours.intermediate_size),
        ("num_hidden_layers", ours.layers),
        ("num_attention_heads", ours.heads),
        ("num_key_value_heads", ours.kv_heads),
        ("head_dim", ours.head_dim),
        ("vocab_size", ours.vocab_size),
        ("max_position_embeddings", ours.max_positions),
        ("rms_norm_eps", ours.norm_eps),
        ("eos_token_id", ours.eos_token_ids[0]),
    ):
        assert getattr(theirs, name) == value, name
    assert theirs.rope_parameters["rope_theta"] == ours.ropes[0].theta
