"""A prefill and a decode worker that read the same GGUF file."""

import shutil
from pathlib import Path

import torch

from kvrelay.client import Client
from kvrelay.models import resolve
from support.checkpoints import make_checkpoint
from support.gguf_files import write_gguf
from support.processes import process_cluster

ENGINE = {"max_batch_tokens": 16, "kv_memory_bytes": 4 * 2**20, "threads": 1, "quantization": "dense"}
OUT = 24
CHATS = [
    "Say hello.",
    "A longer question, which takes several chunks of sixteen tokens to read: why is that so?",
    "3 + 4?",
]


def test_a_pair_answers_as_transformers_does(tmp_path: Path) -> None:
    """Chats, by the template in the file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    checkpoint = make_checkpoint(tmp_path / "llama", "llama", intermediate_size=128, rope_parameters=rope)
    file = write_gguf(checkpoint, tmp_path / "tiny.gguf", lambda name: "Q8_0" if "token_embd" in name else "Q4_1")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    try:
        with (
            process_cluster(tmp_path, file, worker={"engine": ENGINE, "dtype": "float32"}) as cluster,
            Client(cluster.router, timeout=60) as client,
        ):
            for text in CHATS:
                chat = [{"role": "user", "content": text}]
                found = client.complete(chat, max_tokens=OUT, temperature=0)
                given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
                prompt = given if isinstance(given, torch.Tensor) else given["input_ids"]
                expected = model.generate(prompt, max_new_tokens=OUT, do_sample=False)[0][prompt.shape[1] :].tolist()
                assert found.usage.prompt_tokens == prompt.shape[1]
                assert list(found.token_ids) == [token for token in expected if token != tokenizer.eos_token_id]
            cluster.wait_idle()
            log = (tmp_path / "prefill-0.log").read_text()
    finally:
        shutil.rmtree(resolve(str(file)).parent)
    assert "held as float32: 22 Q4_1, 1 Q8_0" in log
