"""Writes small tasks for lm-eval, of text in this repository, so that no data set is downloaded.

    python benchmarks/lm_eval_tasks.py FOLDER
    lm-eval --tasks kv_rolling,kv_choice,kv_gen --include_path FOLDER --log_samples --output_path OUT --model ...

`kv_rolling`: log-likelihood of whole documents. `kv_choice`: the right end of a line of code among four. `kv_gen`:
greedy text up to the end of the line.
"""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENTS, DOCUMENT_CHARACTERS = 10, 3000
QUESTIONS, CHOICES = 60, 4
LINE = re.compile(r"^def \w+\(.*$|^class \w+.*$|^    return .*$", re.MULTILINE)


def documents() -> list[dict[str, Any]]:
    pages = [
        *sorted(ROOT.glob("docs/*.md"))[: DOCUMENTS - 2],
        ROOT / "router/entry/front.py",
        ROOT / "engine/scheduling/scheduler.py",
    ]
    return [{"text": page.read_text()[:DOCUMENT_CHARACTERS]} for page in pages]


def questions() -> list[dict[str, Any]]:
    draw = random.Random(1)
    lines = [line for path in sorted(ROOT.glob("router/*.py")) for line in LINE.findall(path.read_text())]
    halves = [(line[: len(line) // 2], line[len(line) // 2 :]) for line in lines if len(line) > 8]
    found = []
    for _ in range(QUESTIONS):
        picked = draw.sample(halves, CHOICES)
        answer = draw.randrange(CHOICES)
        found.append({"question": picked[answer][0], "choices": [end for _, end in picked], "answer": answer})
    return found


def write(folder: Path) -> None:
    """The tasks, and the data that they read."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("documents", documents()), ("questions", questions())):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks: dict[str, dict[str, Any]] = {
        "kv_rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "kv_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "target_delimiter": "",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
        },
        "kv_gen": {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{choices[answer]}}",
            "generation_kwargs": {"until": ["\n"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 24},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in tasks.items():
        data = folder.resolve() / ("documents.jsonl" if name == "kv_rolling" else "questions.jsonl")
        common = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps({**common, "test_split": "test", **task}, indent=2))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
