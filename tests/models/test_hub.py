"""Models of the Hugging Face hub, against a server on this machine that answers as the hub does."""

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from kvrelay.models import bundled, model_name, resolve
from support.terminal import Terminal

NAME = "someone/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SECONDS = 60
RESOLVE = """
import sys
from kvrelay.models import resolve
for model in sys.argv[2:]:
    try:
        print(resolve(model, weights=sys.argv[1] == "True"))
    except ValueError as error:
        print(f"refused: {error}")
"""


class Hub(http.server.ThreadingHTTPServer):
    """A hub that has one model, at `main` and at its commit, with a file that nobody needs."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        folder = bundled("pico-draft")
        self.files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        self.files["pytorch_model.bin"] = b"pickled"
        self.files["modeling_tiny.py"] = b"raise SystemExit('code of the model was run')"
        self.sent: list[str] = []
        """Name of each file that was asked for."""
        self.breaks_off = False
        """Whether each file ends in its middle."""
        self.pause = 0.0
        """Seconds between the two halves of a file."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @cached_property
    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "oid": hashlib.sha1(data).hexdigest(), "size": len(data)}
            for name, data in self.files.items()
        ]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        revision = path.rpartition("/revision/")[2].split("/")[0]
        if not path.removeprefix("api/models/").startswith(NAME):
            self._refuse("RepoNotFound")
        elif path.startswith(f"api/models/{NAME}/tree/"):
            self._send(json.dumps(self.server.tree).encode(), body, {"Content-Type": "application/json"})
        elif path.startswith("api/models/"):
            if revision not in ("main", COMMIT, "api"):
                self._refuse("RevisionNotFound")
                return
            siblings = [{"rfilename": name} for name in self.server.files]
            info = {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0}
            self._send(json.dumps(info).encode(), body, {"Content-Type": "application/json"})
        else:
            self._send_file(path.rpartition("/")[2], body)

    def _send_file(self, name: str, body: bool) -> None:
        data = self.server.files[name]
        if body:
            self.server.sent.append(name)
        self._send(data, body, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _send(self, data: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            time.sleep(self.server.pause)
            if not self.server.breaks_off:
                self.wfile.write(data[len(data) // 2 :])

    def _refuse(self, code: str) -> None:
        self.send_response(HTTPStatus.NOT_FOUND)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield hub
        hub.shutdown()
        thread.join(SECONDS)


def variables_of(cache: Path, endpoint: str) -> dict[str, str]:
    """The environment of a process whose hub is at `endpoint`, and whose cache is `cache`."""
    return os.environ | {"HF_HOME": str(cache), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}


def resolved(cache: Path, endpoint: str, *models: str, weights: bool = True, **variables: str) -> list[str]:
    """The folder of each model, or "refused: " and why, as a process sees them in the folder of the cache."""
    environment = variables_of(cache, endpoint) | variables
    command = [sys.executable, "-c", RESOLVE, str(weights), *models]
    done = subprocess.run(command, env=environment, timeout=SECONDS, capture_output=True, text=True, cwd=cache)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("prefix", ["hf:", ""])
@pytest.mark.some(1)
def test_a_model_is_downloaded_once_and_used_without_the_hub(hub: Hub, tmp_path: Path, prefix: str) -> None:
    model = prefix + NAME
    (found,) = resolved(tmp_path, hub.address, model, weights=False)
    tokenizer = Path(found)
    assert (tokenizer / "tokenizer.json").read_bytes() == hub.files["tokenizer.json"]
    assert not (tokenizer / "model.safetensors").exists()
    (found,) = resolved(tmp_path, hub.address, f"{model}@main")
    folder = Path(found)
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert len(hub.sent) == len(set(hub.sent)), "a file was downloaded twice"
    assert {name.rpartition(".")[2] for name in hub.sent} <= {"json", "jinja", "safetensors"}, "no code, no pickle"
    assert resolved(tmp_path, hub.address, model, HF_HUB_OFFLINE="1") == [found]
    assert resolved(tmp_path, "http://127.0.0.1:9", model) == [found]


def test_a_folder_takes_precedence_over_a_model_of_the_hub_without_the_prefix(hub: Hub, tmp_path: Path) -> None:
    folder = bundled("pico-draft")
    (tmp_path / NAME).parent.mkdir()
    (tmp_path / NAME).symlink_to(folder)
    assert resolved(tmp_path, hub.address, NAME) == [NAME]
    assert hub.sent == []
    (found,) = resolved(tmp_path, hub.address, f"hf:{NAME}")
    assert f"models--{NAME.replace('/', '--')}" in found


@pytest.mark.more
def test_a_download_shows_one_bar_on_a_terminal_and_one_that_is_not_needed_shows_nothing(
    hub: Hub, tmp_path: Path
) -> None:
    hub.pause = 1.0
    command = [sys.executable, "-m", "kvrelay.models", NAME]
    with Terminal(command, variables_of(tmp_path, hub.address), columns=200) as terminal:
        terminal.wait_until(lambda lines: any(re.search(rf"{NAME}: +\d+%.*B / .*B", line) for line in lines), "a bar")
        assert len(terminal.lines) == 1
        assert terminal.end() == 0
        (folder,) = terminal.lines
    assert (Path(folder) / "model.safetensors").is_file()
    with Terminal(command, variables_of(tmp_path, hub.address), columns=200) as terminal:
        assert terminal.end() == 0
        assert terminal.lines == [folder]


@pytest.mark.parametrize(
    ("offline", "reasons"),
    [
        ("", {"someone/other": "the hub has no such model", f"{NAME}@v9": "it has no revision 'v9'"}),
        ("1", {NAME: "it is not in the cache, and the hub can't be reached or HF_HUB_OFFLINE is set"}),
    ],
)
def test_what_the_hub_does_not_give_is_refused_with_the_reason(
    hub: Hub, tmp_path: Path, offline: str, reasons: dict[str, str]
) -> None:
    models = [f"{prefix}{model}" for model in reasons for prefix in ("hf:", "")]
    answers = resolved(tmp_path, hub.address, *models, HF_HUB_OFFLINE=offline)
    for model, named, bare in zip(reasons, answers[::2], answers[1::2], strict=True):
        assert named.startswith(f"refused: model: 'hf:{model}' can't be had: ")
        assert bare.startswith(f"refused: model: {model!r} is no folder here, and as a model of the")
        reason = named.partition("can't be had: ")[2]
        assert reasons[model] in reason
        assert reason == bare.partition("can't be had: ")[2]


@pytest.mark.parametrize("model", [f"hf:{NAME}", NAME])
@pytest.mark.some(1)
def test_a_broken_download_is_one_line_and_can_be_tried_again(hub: Hub, tmp_path: Path, model: str) -> None:
    hub.breaks_off = True
    (answer,) = resolved(tmp_path, hub.address, model)
    assert answer.startswith(f"refused: model: {model!r} ")
    assert "the download broke off (" in answer
    assert answer.endswith("; what has come is kept, so try again")
    hub.breaks_off = False
    (folder,) = resolved(tmp_path, hub.address, model)
    assert Path(folder).is_dir()


def test_a_model_that_has_pickled_weights_only_is_refused(hub: Hub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"]
    (answer,) = resolved(tmp_path, hub.address, NAME)
    assert "can't be had: it has no weights in safetensors; pickled ones are never read, so convert them" in answer
    assert "pytorch_model.bin" not in hub.sent


@pytest.mark.parametrize("model", ["hf:", "hf:tiny", "hf:a/b/c", "hf:a/b@", "hf:a/b@r e", "hf:../a", "hf:a/.."])
def test_a_name_that_the_hub_can_not_have_is_refused(model: str) -> None:
    with pytest.raises(ValueError, match=r"is no name of the Hugging Face hub; give hf:ORG/NAME or hf:ORG/NAME@REV"):
        resolve(model)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for model in (f"hf:{NAME}", NAME):
        with pytest.raises(ValueError, match=rf"'{model}' .*needs huggingface_hub; run `pip install 'kvrelay\[hub\]'`"):
            resolve(model)


@pytest.mark.parametrize("path", ["./a/b", "../a", "/a/b", "~/a/b", "a", "a/b/c", "a/", "a/.b", "a/b.gguf"])
def test_what_has_not_the_form_of_a_name_is_a_path(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr("kvrelay.models.hub.fetch", None)
    with pytest.raises(ValueError, match="is neither a folder nor a GGUF file nor a bundled model"):
        resolve(path)


def test_medusa_heads_come_by_the_name_that_they_are_published_by(hub: Hub, tmp_path: Path) -> None:
    hub.files["medusa_lm_head.safetensors"] = hub.files.pop("model.safetensors")
    (folder,) = resolved(tmp_path, hub.address, NAME)
    assert {"config.json", "medusa_lm_head.safetensors"} <= {path.name for path in Path(folder).iterdir()}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("pico", "pico"),
        (f"hf:{NAME}", NAME),
        (f"hf:{NAME}@v2", NAME),
        (NAME, NAME),
        (f"{NAME}@v2", NAME),
        (f"/hub/models--someone--tiny/snapshots/{COMMIT}", NAME),
        ("/models/tiny/", "tiny"),
        ("~/tiny", "tiny"),
        ("/models/Tiny-Q4_K_M.gguf", "Tiny-Q4_K_M"),
        ("/models/Big-Q8_0-00001-of-00002.gguf", "Big-Q8_0"),
    ],
)
def test_a_model_has_one_name_however_it_is_given(model: str, name: str) -> None:
    assert model_name(model) == name
