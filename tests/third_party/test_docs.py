"""Runs the snippets of the documentation against a pair on the bundled model, with a chat template and API keys off."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.processes import process_cluster

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/start.md", "docs/clients.md", "docs/api.md", "packaging/client/README.md")
ENGINE = {"max_batch_tokens": 256, "max_context": 256, "kv_memory_bytes": 16 * 2**20, "threads": 1}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
PROGRAMS = ("curl", "buf", "grpcurl")
"""Programs: a snippet of a shell is run if it calls one of these."""
LIBRARIES = ("langchain_openai", "litellm", "llama_index")
"""Libraries that the tests don't need: snippets with them are run where they are installed."""
SECONDS = 120


@dataclass(frozen=True)
class Snippet:
    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets() -> list[Snippet]:
    """Snippets of the documentation in Python, and snippets that call one of PROGRAMS."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in re.finditer(r"^```(python|sh)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            language, code = match.groups()
            if language == "python" or code.split()[0] in PROGRAMS:
                found.append(Snippet(page, text.count("\n", 0, match.start()) + 1, language, code))
    return found


SNIPPETS = snippets()


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of the running router, by the addresses that the documentation writes instead."""
    folder = tmp_path_factory.mktemp("documented")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    router = {"http_port": 0, "chat_template": str(template)}
    with process_cluster(folder, "pico", worker={"engine": ENGINE}, router=router) as cluster:
        http = cluster.member("router-0").member.http_address
        yield {"127.0.0.1:50051": cluster.router, "127.0.0.1:8000": http}
        cluster.wait_idle(20)


def test_the_pages_have_snippets() -> None:
    assert {snippet.page for snippet in SNIPPETS} == set(PAGES)
    assert len(SNIPPETS) >= 15


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
def test_a_snippet_runs(addresses: dict[str, str], snippet: Snippet, capsys: pytest.CaptureFixture[str]) -> None:
    code = snippet.code
    for written, real in addresses.items():
        code = code.replace(written, real)
    if snippet.language == "python":
        for library in LIBRARIES:
            if library in code:
                pytest.importorskip(library)
        exec(compile(code, str(snippet), "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out.strip()
        return
    program = code.split()[0]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert '"text":' in done.stdout, done.stdout
