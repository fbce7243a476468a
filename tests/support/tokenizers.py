"""A small tokenizer, and a checkpoint's folder as a router reads it."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "</s>"
CORPUS = ["def __init__(self, name):\n    self.name = name\n    return None\n", "größer als 日本語 🙂🙃 e\u0301"] * 4
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}<s>assistant:"


def byte_level_tokenizer(
    vocab_size: int = 400, special: Sequence[str] = ("<s>", EOS), corpus: Sequence[str] = CORPUS
) -> Tokenizer:
    """A tiny byte-level BPE; the first ids are special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def model_folder(folder: Path) -> Path:
    """A checkpoint's folder with the files that a router reads."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
