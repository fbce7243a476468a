"""The loss of quality by each format of weights and of KV: perplexity and three short tasks by lm-eval, on the CPU.

    pip install '.[eval]'
    python benchmarks/checkpoint.py MODEL --gguf smollm2
    python benchmarks/evaluation.py MODEL --gguf smollm2 --out benchmarks/results/smollm2-quality-2-cores.json

Nothing is downloaded: gensim's wheel carries the Lee corpus, 300 news articles of some 200 words, and the analogies of
Mikolov et al. (2013). The tasks are made of these, so their figures compare formats, not models of other papers:

    news          log-likelihood of whole articles, each read from its beginning: perplexity
    next_sentence which of an article's sentences 4 to 7 follows its first three: four choices
    last_word     the last word of a sentence, which the article has had before, greedily, as in LAMBADA
    analogy       "Athens is to Greece as Baghdad is to" one of four words of the same category

`divergence` is the mean Kullback-Leibler divergence, in nats a token, of a format's next-token distributions from
bfloat16's on the articles. `flips` counts items that only one of the two has right. `differ` counts the greedy
completions, of 64 tokens after 64 of an article, that aren't bfloat16's, and `differ_at` is the median place of their
first other token.
"""

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quantization import BASE, FORMATS, GGUF, GGUF_DENSE, KV_INT8, add_model_options, completions, runner_of
from steps import plan_of
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from turns import own_setting, save

from kvrelay.engine.runner.cpu import CpuRunner
from kvrelay.models import resolve

CORPUS, ANALOGIES = "gensim/test/test_data/lee_background.cor", "gensim/test/test_data/questions-words.txt"
ARTICLES, ITEMS, ROOM = 130, 200, 2**15
"""Articles whose perplexity is measured, items of a task at most, and tokens in a runner's pool."""
MULTIPLE_CHOICE = {"output_type": "multiple_choice", "doc_to_choice": "endings", "doc_to_target": "label"}
ACCURACY = [{"metric": "acc"}]
SCORES: dict[str, dict[str, Any]] = {
    "news": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "next_sentence": MULTIPLE_CHOICE | {"doc_to_text": "{{text}}", "metric_list": [*ACCURACY, {"metric": "acc_norm"}]},
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{' ' + word}}",
        "metric_list": [{"metric": "perplexity"}, *ACCURACY],
    },
    "analogy": MULTIPLE_CHOICE | {"doc_to_text": "{{text}}", "metric_list": ACCURACY},
}
"""How lm-eval asks and scores, by task."""


class Scorer:
    """Scores texts by a runner's logits, and compares those of whole texts with another runner's."""

    def __init__(self, runner: CpuRunner, base: CpuRunner) -> None:
        self._runner, self._base = runner, base
        self.end_token = min(runner.spec.eos_token_ids)
        self.divergence, self.read = 0.0, 0
        """Sum of the divergences from `base` on whole texts, and their tokens."""

    def whole(self, tokens: list[int]) -> float:
        """Log-likelihood of the tokens behind the first one."""
        logs = logits(self._runner, tokens[:-1]).log_softmax(-1)
        right = logs if self._runner is self._base else logits(self._base, tokens[:-1]).log_softmax(-1)
        self.divergence += functional.kl_div(logs, right, log_target=True, reduction="sum").item()
        self.read += len(tokens) - 1
        return -functional.nll_loss(logs, torch.tensor(tokens[1:]), reduction="sum").item()

    def continuations(self, pairs: Iterable[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Log-likelihood of each continuation of a context, computed on the context's KV as a served one is, and
        whether it is the greedy one."""
        found, known, last = [], None, torch.empty(0)
        for context, continuation in pairs:
            if context != known:
                known, last = context, logits(self._runner, context, 0, 1)
            rest = [logits(self._runner, continuation[:-1], len(context))] if continuation[1:] else []
            logs, right = torch.cat([last, *rest]).log_softmax(-1), torch.tensor(continuation)
            score = -functional.nll_loss(logs, right, reduction="sum").item()
            found.append((score, bool((logs.argmax(-1) == right).all())))
        return found


def logits(runner: CpuRunner, tokens: Sequence[int], start: int = 0, last: int = 0) -> Tensor:
    """float32 [tokens, vocabulary], behind `start` tokens whose KV is there; of the `last` ones, or of all for 0."""
    with torch.inference_mode():
        hidden = runner.forward(plan_of(runner, np.asarray(tokens, np.int32), 1, start))
        return runner.model.logits(hidden[-last:].clone()).float().clone()


def sentences(article: str) -> list[str]:
    return re.split(r'(?<=[.!?])\s+(?=["A-Z])', article.strip())


def last_words(articles: Iterable[str]) -> Iterable[dict[str, str]]:
    """The shortest beginning of each article, three sentences or more, whose last word has come in it before: the text
    before that word, and the word."""
    for article in articles:
        parts = sentences(article)
        for count in range(3, len(parts) + 1):
            found = re.fullmatch(r'(.+) ([A-Za-z]{5,})[.!?]"?', " ".join(parts[:count]))
            if found and re.search(rf"\b{found[2]}\b", found[1]):
                yield {"text": found[1], "word": found[2]}
                break


def analogies(lines: Sequence[str], chance: random.Random) -> Iterable[dict[str, Any]]:
    """Questions from each category, as many from each: a row of four words, and three other words of the category that
    could take the last one's place."""
    categories = [part.splitlines()[1:] for part in "\n".join(lines).split(": ")[1:]]
    for category in categories:
        rows = [line.split() for line in category]
        words = sorted({row[3] for row in rows})
        for one, other, third, right in chance.sample(rows, ITEMS // len(categories)):
            endings = [right, *chance.sample([word for word in words if word not in (right, other)], 3)]
            chance.shuffle(endings)
            text = f"{one} is to {other} as {third} is to"
            yield {"text": text, "endings": endings, "label": endings.index(right)}


def tasks() -> list[dict[str, Any]]:
    """The tasks, as lm-eval takes them."""
    import datasets

    chance, package = random.Random(0), distribution("gensim")
    articles = Path(str(package.locate_file(CORPUS))).read_text().splitlines()
    ordered = []
    for parts in filter(lambda parts: len(parts) >= 7, map(sentences, articles)):
        endings = chance.sample(parts[3:7], 4)
        ordered.append({"text": " ".join(parts[:3]), "endings": endings, "label": endings.index(parts[3])})
    items: dict[str, Iterable[dict[str, Any]]] = {
        "news": [{"text": article} for article in articles[:ARTICLES]],
        "next_sentence": ordered,
        "last_word": last_words(articles),
        "analogy": analogies(Path(str(package.locate_file(ANALOGIES))).read_text().splitlines(), chance),
    }
    made = {name: datasets.Dataset.from_list(list(rows)[:ITEMS]) for name, rows in items.items()}
    return [
        {"task": name, "test_split": "test", "custom_dataset": lambda rows=rows, **_: {"test": rows}} | SCORES[name]
        for name, rows in made.items()
    ]


def figures(
    scorer: Scorer, tokenizer: Tokenizer, given: list[dict[str, Any]], limit: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures of a format by task, and which items it has right."""
    # Imported where they are used, so that a test of the scores needs no lm-eval.
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM

    class Model(TemplateLM):
        """The scorer, as lm-eval calls a model."""

        @property
        def eot_token_id(self) -> int:
            found = tokenizer.token_to_id("<|endoftext|>")
            return int(scorer.end_token if found is None else found)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return list(tokenizer.encode(string, add_special_tokens=False).ids)

        def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
            return [scorer.whole([self.eot_token_id, *self.tok_encode(request.args[0])]) for request in requests]

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            return scorer.continuations((context, continuation) for _texts, context, continuation in requests)

        def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
            raise NotImplementedError("no task here generates")

    found = lm_eval.simple_evaluate(Model(), tasks=given, limit=limit, bootstrap_iters=1000, random_seed=0)
    rows, right = {}, {}
    for task, row in found["results"].items():
        values = {name.removesuffix(",none"): value for name, value in row.items() if "," in name and value != "N/A"}
        rows[task] = {name: round(value, 4) for name, value in values.items()}
        rows[task]["items"] = len(found["samples"][task])
        if task != "news":
            right[task] = {sample["doc_id"]: sample["acc"] for sample in found["samples"][task]}
    rows["news"] |= {"tokens": scorer.read, "divergence": round(scorer.divergence / max(1, scorer.read), 6)}
    return rows, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--formats", type=lambda text: text.split(","), help="all unless given")
    parser.add_argument("--limit", type=int, help="items of each task, and completions")
    args = parser.parse_args()
    args.formats = args.formats or [*FORMATS, KV_INT8, *([GGUF, GGUF_DENSE] if args.gguf else [])]
    tokenizer = Tokenizer.from_file(str(resolve(args.model) / "tokenizer.json"))
    base, options = runner_of(args, BASE, ROOM)
    given = tasks()
    texts = [row["text"] for row in given[0]["custom_dataset"]()["test"]][: args.limit]
    prompts = [tuple(tokenizer.encode(text).ids[:64]) for text in texts]
    result: dict[str, Any] = {**own_setting("torch", "lm-eval", "gensim"), "formats": {}}
    expected: dict[str, Any] = {}
    answers = completions(base, options, prompts)
    for name in dict.fromkeys((BASE, *args.formats)):
        began = time.monotonic()
        runner, options = (base, options) if name == BASE else runner_of(args, name, ROOM)
        rows, right = figures(Scorer(runner, base), tokenizer, given, args.limit)
        expected = expected or right
        for task, of in right.items():
            rows[task]["flips"] = sum(of[item] != expected[task][item] for item in of)
        found = answers if runner is base else completions(runner, options, prompts)
        pairs = [zip(*pair, strict=False) for pair in zip(found, answers, strict=True)]
        places = [next((at for at, (one, other) in enumerate(pair) if one != other), -1) for pair in pairs]
        other = [place for place in places if place >= 0]
        rows["completions"] = {"items": len(places), "differ": len(other)}
        rows["completions"] |= {"differ_at": statistics.median(other)} if other else {}
        result["formats"][name] = rows | {"seconds": round(time.monotonic() - began)}
        print(json.dumps({name: result["formats"][name]}), flush=True)
        if args.out is not None:
            save(args.out, result)


if __name__ == "__main__":
    main()
