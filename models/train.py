"""Trains the bundled models, `pico` and `pico-draft`, on the source files of Python's standard library.

    python models/train.py pico-draft --minutes 10
    python models/train.py pico --minutes 65
    python models/train.py pico --minutes 26 --continue --tests --peak-lr 7e-4
    python models/train.py pico-draft --minutes 62 --continue --teacher pico --peak-lr 1.5e-3 --seed 1

One CPU thread is enough, and nothing is downloaded: the data is the standard library of the running interpreter, and
the network is transformers' (in kvrelay's dev extra). The script writes a Hugging Face folder beside itself, first
after a minute and then every few minutes, so that an unfinished model can already be served; at the end it writes the
model card. An interrupted run continues from its last checkpoint. `--steps` instead of `--minutes` makes the learning
rate, and so the whole run, independent of the machine's speed. `--continue` starts from a finished model with a new
optimizer; `--tests` adds the library's own tests to the data. `--teacher` distils: the model learns the distributions
of another model here, with that one's tokenizer, which is what a draft model for it needs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import random
import string
import sysconfig
import time
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, CONTEXT = 4096, 4096
BOS, EOS, EOS_ID = "<s>", "</s>", 1  # BOS is 0; EOS ends each document, and nothing precedes one

ROWS, LENGTH = 4, 512  # a step has four short windows,
LONG_EVERY = 32  # and every 32nd step one window of the whole context
WARMUP = 0.03  # of the budget
FLOOR = 0.05  # of the peak learning rate, at the end
FIRST_SAVE_S, SAVE_EVERY_S = 60.0, 240.0

# Codec tables and help topics aren't code, lib2to3 has Python 2, and installed packages aren't the library.
SKIPPED_FOLDERS = {"lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages"}
TEST_FOLDERS = {"test", "tests", "idle_test"}
SKIPPED_PREFIX = "_sysconfigdata"  # generated; has paths of the machine that built Python

PROMPT = "def __init__(self,"


@dataclass(frozen=True)
class Shape:
    """A model's dimensions, and the peak learning rate for them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    peak_lr: float
    head_dim: int = 32

    def config(self) -> dict[str, Any]:
        """The `config.json` that transformers reads."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "rms_norm_eps": 1e-5,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": EOS_ID,
            "torch_dtype": "bfloat16",
        }


SHAPES = {
    "pico": Shape(hidden=256, layers=8, heads=8, kv_heads=4, intermediate=704, peak_lr=1e-3),
    "pico-draft": Shape(hidden=128, layers=3, heads=4, kv_heads=2, intermediate=352, peak_lr=2e-3),
}


def build(shape: Shape) -> LlamaForCausalLM:
    """An untrained model in float32. Matrices that add to the residual stream start smaller in a deeper model."""
    model = LlamaForCausalLM(LlamaConfig.from_dict(shape.config() | {"torch_dtype": "float32", "use_cache": False}))
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            shrink = math.sqrt(2 * shape.layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(weight, std=0.02 / shrink)
    return model


def library_files(tests: bool = False) -> dict[str, str]:
    """The sources of the standard library, or of its tests, by path within the library, in sorted order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        skipped = not SKIPPED_FOLDERS.isdisjoint(relative.parts) or path.name.startswith(SKIPPED_PREFIX)
        if not skipped and tests != TEST_FOLDERS.isdisjoint(relative.parts):
            # Some test files have deliberate syntax or encoding errors.
            with suppress(SyntaxError, UnicodeDecodeError), tokenize.open(path) as source:
                files[relative.as_posix()] = source.read()
    return files


def is_held_out(path: str) -> bool:
    """Whether this file is excluded from training: one in twenty, by the hash of the path."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "big") % 20 == 0


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE trained on `texts`. It encodes any text without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> npt.NDArray[np.int64]:
    """All texts in one array, each followed by EOS, with an EOS at the beginning: every text follows an EOS."""
    ids = [EOS_ID]
    for encoding in tokenizer.encode_batch(texts):
        ids += [*encoding.ids, EOS_ID]
    return np.array(ids, dtype=np.int64)


class Corpus:
    """The training stream, in batches that depend only on the seed and the step."""

    def __init__(self, tokenizer: Tokenizer, texts: list[str], seed: int) -> None:
        shuffled = random.Random(seed).sample(texts, len(texts))
        self.stream = token_stream(tokenizer, shuffled)
        self.windows = (len(self.stream) - 1) // LENGTH
        self.seed = seed

    def batch(self, step: int) -> Tensor:
        """[rows, length + 1] ids. Each epoch visits every window once, in its own order and with its own offsets."""
        starts = [self._start(step * ROWS + row) for row in range(ROWS)]
        length = LENGTH
        if step % LONG_EVERY == LONG_EVERY - 1:
            starts, length = starts[:1], CONTEXT
        last = len(self.stream) - length - 1
        return torch.from_numpy(np.stack([self.stream[s : s + length + 1] for s in (min(s, last) for s in starts)]))

    def _start(self, position: int) -> int:
        epoch, place = divmod(position, self.windows)
        order = np.random.default_rng((self.seed, epoch))
        return int(order.integers(LENGTH)) + int(order.permutation(self.windows)[place]) * LENGTH


@torch.inference_mode()
def bits_per_byte(model: LlamaForCausalLM, stream: npt.NDArray[np.int64], window: int, n_bytes: int) -> float:
    """Cross-entropy of `stream` in bits, divided by `n_bytes`. Each window starts without context."""
    nats = 0.0
    for start in range(0, len(stream) - 1, window):
        ids = torch.from_numpy(stream[start : start + window + 1])
        nats += F.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:], reduction="sum").item()
    return nats / math.log(2) / n_bytes


@torch.inference_mode()
def continue_greedily(model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, n_tokens: int) -> str:
    """The text of `prompt` and its `n_tokens` most likely next tokens."""
    ids: list[int] = tokenizer.encode(prompt).ids
    for _ in range(n_tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text


@dataclass(frozen=True)
class Budget:
    """Limit of the training: a number of steps, or minutes of wall time where steps is None."""

    minutes: float
    steps: int | None

    def progress(self, step: int, seconds: float) -> float:
        """The used share of the budget: training ends at 1."""
        return step / self.steps if self.steps is not None else seconds / (60.0 * self.minutes)


@dataclass
class Spent:
    """Steps and time that a run has used so far, including the time before interruptions."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up, then a half cosine down to the floor."""
    if progress < WARMUP:
        return peak * (0.01 + 0.99 * progress / WARMUP)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, (progress - WARMUP) / (1.0 - WARMUP))))
    return peak * (FLOOR + (1.0 - FLOOR) * cosine)


class Training:
    """A model, its optimizer and what they have used so far; `checkpoint` keeps all three across an interruption."""

    def __init__(
        self, shape: Shape, seed: int, peak_lr: float, checkpoint: Path, teacher: LlamaForCausalLM | None = None
    ) -> None:
        """
        Args:
            teacher: whose distributions are learned instead of the text's next tokens.
        """
        torch.manual_seed(seed)
        self.teacher = teacher
        self.peak_lr = peak_lr
        self.model = build(shape)
        self.spent = Spent()
        weights = [p for p in self.model.parameters() if p.ndim == 2]
        gains = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.98), fused=True)
        self.checkpoint = checkpoint
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.spent = Spent(**state["spent"])

    def save(self) -> None:
        """Replaces the checkpoint atomically."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "spent": asdict(self.spent),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def step(self, ids: Tensor, progress: float) -> float:
        """One update on `ids` [rows, length + 1]; returns the loss in nats per token: with a teacher, KL divergence."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.peak_lr, progress)
        # With AVX512_BF16, matrix products are twice as fast in bfloat16; the weights stay float32.
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(ids[:, :-1]).logits.float().flatten(0, 1)
        if self.teacher is None:
            loss = F.cross_entropy(logits, ids[:, 1:].flatten())
        else:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                wanted = self.teacher(ids[:, :-1]).logits.float().flatten(0, 1)
            loss = F.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.spent.steps += 1
        self.spent.tokens += ids.shape[0] * (ids.shape[1] - 1)
        return loss.item()

    def run(self, corpus: Corpus, budget: Budget) -> Iterator[None]:
        """Trains to the end of the budget and prints its progress; yields whenever it is time to save."""
        before, started = self.spent.seconds, time.monotonic()
        next_save = before + FIRST_SAVE_S
        mean_loss = math.nan
        while (progress := budget.progress(self.spent.steps, self.spent.seconds)) < 1.0:
            loss = self.step(corpus.batch(self.spent.steps), progress)
            mean_loss = loss if math.isnan(mean_loss) else 0.98 * mean_loss + 0.02 * loss
            self.spent.seconds = before + time.monotonic() - started
            if self.spent.steps % 50 == 0:
                rate = self.spent.tokens / self.spent.seconds
                print(f"{progress:6.1%}  step {self.spent.steps}  loss {mean_loss:.3f}  {rate:.0f} tok/s", flush=True)
            if self.spent.seconds >= next_save:
                yield
                next_save = self.spent.seconds + SAVE_EVERY_S


def write_atomically(path: Path, text: str) -> None:
    """Replaces the file by a rename, so that a reader never sees a part of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """`value` as indented JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")


def export(folder: Path, model: LlamaForCausalLM, shape: Shape, tokenizer: Tokenizer) -> None:
    """Writes the Hugging Face folder, with weights in bfloat16; each file is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    special = {"bos_token": BOS, "eos_token": EOS}
    write_json(folder / "config.json", shape.config())
    write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": EOS_ID})
    write_json(folder / "special_tokens_map.json", special)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "add_bos_token": False,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    )
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    partial = folder / "model.safetensors.partial"
    # Without the output matrix, which is the embedding.
    weights = {name: w.detach().to(torch.bfloat16).contiguous() for name, w in model.named_parameters()}
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors creates files that only their owner can read
    os.replace(partial, folder / "model.safetensors")


def described(earlier: dict[str, Any] | None) -> str:
    """The runs that made the model that this run started from, the first one first; empty without any."""
    if earlier is None:
        return ""
    bits = earlier["held_out_bits_per_byte"][str(LENGTH)]
    teacher = f"teacher {earlier['teacher']}, " if earlier.get("teacher", "none") != "none" else ""
    return described(earlier.get("earlier")) + (
        f"{earlier['steps']:,} steps, {earlier['tokens']:,} tokens of the library {earlier['tests']} its tests, "
        f"{teacher}peak learning rate {earlier['peak_learning_rate']}, {earlier['minutes']} minutes: {bits} bits per "
        "byte. "
    )


def write_card(folder: Path, record: dict[str, Any], sample: str) -> None:
    """Writes `training.json`, and the model card from the template `model_card.md` and the record's values."""
    write_json(folder / "training.json", record)
    template = string.Template(Path(__file__).with_name("model_card.md").read_text())
    bpb = {f"bits_per_byte_{window}": value for window, value in record["held_out_bits_per_byte"].items()}
    figures = {key: f"{value:,}" if isinstance(value, int) else value for key, value in record.items()}
    figures["before"] = described(record.get("earlier")).rstrip() or "none"
    write_atomically(folder / "README.md", template.substitute(figures, sample=sample, **bpb))


def main() -> None:
    """Trains one model."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("--minutes", type=float, default=65.0, help="wall time to train for")
    parser.add_argument("--steps", type=int, help="steps to train for, instead of --minutes")
    parser.add_argument("--continue", dest="earlier", action="store_true", help="start from the finished model")
    parser.add_argument("--tests", action="store_true", help="train on the library's tests too")
    parser.add_argument("--teacher", choices=SHAPES, help="the finished model whose distributions are learned")
    parser.add_argument("--peak-lr", type=float, help="peak learning rate, instead of the model's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=here, help="parent of the model's folder")
    parser.add_argument("--work", type=Path, default=here.parent / "build" / "train", help="for checkpoints")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)

    shape: Shape = SHAPES[args.name]
    files = library_files()
    seen = [text for path, text in files.items() if not is_held_out(path)]
    unseen = [text for path, text in files.items() if is_held_out(path)]
    teacher = None
    if args.teacher is None:
        tokenizer = train_tokenizer(seen)
    else:
        tokenizer = Tokenizer.from_file(str(here / args.teacher / "tokenizer.json"))
        teacher = LlamaForCausalLM.from_pretrained(here / args.teacher, dtype=torch.float32)
    if args.tests:
        seen += [text for path, text in library_files(tests=True).items() if not is_held_out(path)]
    corpus = Corpus(tokenizer, seen, args.seed)
    held_out, held_out_bytes = token_stream(tokenizer, unseen), sum(len(text.encode()) for text in unseen)

    folder: Path = args.out / args.name
    peak_lr = args.peak_lr or shape.peak_lr
    training = Training(shape, args.seed, peak_lr, args.work / f"{args.name}.pt", teacher)
    earlier = None
    if args.earlier:
        earlier = json.loads((folder / "training.json").read_text())
        if not training.checkpoint.exists():
            training.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # one tied matrix
    parameters = sum(p.numel() for p in training.model.parameters())
    print(f"{args.name}: {parameters:,} parameters, {len(seen)} files, {len(corpus.stream):,} tokens an epoch")
    print(f"held out: {len(unseen)} files, {held_out_bytes:,} bytes, {len(held_out):,} tokens", flush=True)
    for _ in training.run(corpus, Budget(args.minutes, args.steps)):
        training.save()
        export(folder, training.model, shape, tokenizer)
        print(continue_greedily(training.model, tokenizer, PROMPT, 40), flush=True)

    export(folder, training.model, shape, tokenizer)
    shipped = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    record = {
        "name": args.name,
        "parameters": parameters,
        "python": platform.python_version(),
        "seed": args.seed,
        "tests": "with" if args.tests else "without",
        "teacher": args.teacher or "none",
        "train_files": len(seen),
        "train_bytes": sum(len(text.encode()) for text in seen),
        "train_tokens_per_epoch": len(corpus.stream),
        "steps": training.spent.steps,
        "tokens": training.spent.tokens,
        "epochs": round(training.spent.tokens / len(corpus.stream), 2),
        "minutes": round(training.spent.seconds / 60, 1),
        "tokens_per_second": round(training.spent.tokens / training.spent.seconds),
        "threads": args.threads,
        "peak_learning_rate": peak_lr,
        "held_out_files": len(unseen),
        "held_out_bytes": held_out_bytes,
        "held_out_bits_per_byte": {
            str(window): round(bits_per_byte(shipped, held_out, window, held_out_bytes), 4)
            for window in (LENGTH, CONTEXT)
        },
    }
    if earlier is not None:
        record["earlier"] = earlier
    write_card(folder, record, continue_greedily(shipped, tokenizer, PROMPT, 60))
    training.checkpoint.unlink(missing_ok=True)
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
