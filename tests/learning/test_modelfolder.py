"""Finding a model: folders, names in a Hugging Face cache that the test makes, and a hub on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.learning.modelfolder import find_model
from tests.modelfolder import FILES, write_model

COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub; nothing can be fetched."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def _cached(cache: Path, name: str, commit: str = COMMIT, *, ref: str = "main") -> Path:
    """A complete model in the cache, as the hub's library lays it out."""
    store = cache / f"models--{name.replace('/', '--')}"
    (store / "refs").mkdir(parents=True, exist_ok=True)
    (store / "refs" / ref).write_text(commit)
    return write_model(store / "snapshots" / commit)


def _refusal(model: str | Path, **options: object) -> str:
    with pytest.raises(ConfigError) as raised:
        find_model(model, **options)  # type: ignore[arg-type]
    return str(raised.value)


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute, relative to where one is or to another folder, and from the home folder."""
    folder = write_model(tmp_path / "models" / "small")
    assert find_model(folder) == find_model(str(folder)) == folder
    assert find_model("models/small", base=tmp_path) == folder
    monkeypatch.chdir(tmp_path)
    assert find_model("models/small") == Path("models/small")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model("~/models/small", base="/elsewhere") == folder


def test_a_name_in_the_cache_is_its_folder(cache: Path) -> None:
    """The main revision, another one, or a commit; a folder of that name comes first."""
    main = _cached(cache, "Qwen/Qwen3-0.6B")
    tuned = _cached(cache, "Qwen/Qwen3-0.6B", OTHER, ref="tuned")
    assert find_model("Qwen/Qwen3-0.6B") == main
    assert find_model("Qwen/Qwen3-0.6B@tuned") == tuned
    assert find_model(f"Qwen/Qwen3-0.6B@{OTHER}") == tuned
    assert find_model("Qwen/Qwen3-0.6B", download=True) == main
    assert _cached(cache, "gpt2") == find_model("gpt2")
    own = write_model(cache / "here" / "Qwen" / "Qwen3-0.6B")
    assert find_model("Qwen/Qwen3-0.6B", base=cache / "here") == own


@pytest.mark.parametrize(
    ("model", "near"),
    [
        ("Qwen/Qwen3-0.6", "Qwen/Qwen3-0.6B"),
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("qwen/qwen3-0.6b", "Qwen/Qwen3-0.6B"),
        ("HuggingFaceTB/SmolLM-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("meta-llama/Llama-3.2-1B", None),
    ],
)
def test_a_name_that_is_not_there_is_refused_with_what_is(cache: Path, model: str, near: str | None) -> None:
    """What was looked for and where, the nearest name, and how to get it."""
    _cached(cache, "Qwen/Qwen3-0.6B")
    _cached(cache, "HuggingFaceTB/SmolLM2-135M")
    said = _refusal(model, key="model.path", base=cache)
    assert said.startswith(f"model.path is '{model}', but there is no folder '{cache / model}'")
    assert f"the Hugging Face cache ({cache}) has no model of that name" in said
    assert (f"did you mean '{near}'?" in said) if near else ("did you mean" not in said)
    assert said.endswith("To download it from the hub, set model.download = true")


@pytest.mark.parametrize(
    ("key", "hint"),
    [("--model", "add --download"), ("model", "call rl.find_model('no/model', download=True) first")],
)
def test_the_hint_is_what_can_be_done_there(cache: Path, key: str, hint: str) -> None:
    """On the command line a flag, in a script a call."""
    assert _refusal("no/model", key=key).endswith(hint)
    with pytest.raises(ConfigError, match=r"download=True\) first"):
        rl.TorchLearner("no/model")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./modle", "there is no folder '{base}/modle'; did you mean 'model'?"),
        ("/no/such/folder", "there is no folder '/no/such/folder'"),
        ("a/b/c", "there is no folder '{base}/a/b/c'"),
        ("~nobody-at-all/model", "must be a folder that can be found"),
        ("", "a folder or a name such as"),
        ("a\0b", "a folder or a name such as"),
        ("file", "the folder of a model, not a file in it"),
        ("with space", "there is no folder '{base}/with space'"),
    ],
)
def test_what_is_neither_folder_nor_name_is_refused(cache: Path, tmp_path: Path, model: str, message: str) -> None:
    """The whole path is said, and a folder beside it that was probably meant."""
    write_model(tmp_path / "model")
    (tmp_path / "file").touch()
    assert message.format(base=tmp_path) in _refusal(model, base=tmp_path)


INCOMPLETE: list[tuple[dict[str, str], str]] = [
    ({}, "there is no config.json in it"),
    ({"model.safetensors": ""}, "there is no config.json in it"),
    ({"model.Q4.gguf": ""}, "there is no config.json in it, only GGUF files, which are made for inference"),
    ({"adapter_config.json": "{}", "adapter_model.safetensors": ""}, "no config.json in it, for it is a LoRA adapter"),
    ({"config.json": "{}"}, "there are no weights (model.safetensors) in it"),
    ({"config.json": "{}", "model.gguf": ""}, "there are no weights (model.safetensors) in it, only GGUF files"),
    ({"config.json": "{}", "pytorch_model.bin": ""}, "only pickled ones"),
    ({"config.json": "{}", "model.safetensors": ""}, "there is no tokenizer"),
    (
        {
            "config.json": "{}",
            "tokenizer.json": "",
            "model.safetensors.index.json": '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}',
            "1.safetensors": "",
        },
        "of its weights 1 files are missing: 2.safetensors",
    ),
    (
        {"config.json": "{}", "tokenizer.json": "", "model.safetensors.index.json": "{"},
        "model.safetensors.index.json cannot be read",
    ),
]


@pytest.mark.parametrize(("files", "message"), INCOMPLETE)
def test_an_incomplete_folder_is_refused_before_anything_starts(
    cache: Path, files: dict[str, str], message: str
) -> None:
    """Also one in the cache, where an interrupted download or another program leaves such."""
    snapshot = _cached(cache, "some/model")
    for name in FILES:
        (snapshot / name).unlink()
    for name, content in files.items():
        (snapshot / name).write_text(content)
    assert message in _refusal(snapshot)
    said = _refusal("some/model")
    assert "there is no folder" in said and message in said and "To download it" in said


def test_a_tokenizer_is_enough_for_what_only_renders(tmp_path: Path) -> None:
    """Then nothing else has to be there, but that has."""
    assert "there is no tokenizer" in _refusal(tmp_path, weights=False)
    (tmp_path / "tokenizer.json").touch()
    assert find_model(tmp_path, weights=False) == tmp_path
    assert "there is no config.json" in _refusal(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(model=st.text(max_size=20) | st.from_regex(r"[\w./@~-]{1,20}", fullmatch=True))
def test_any_text_is_a_model_or_refused(cache: Path, model: str) -> None:
    """By a ``ConfigError`` alone, whatever stands in a recipe."""
    assert "model" in _refusal(model, base=cache)


# -- downloading ------------------------------------------------------------------------------------------------------


class _Hub(ThreadingHTTPServer):
    """As much of the hub's interface as its client asks to download one model, on the loopback address."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files = {
            "config.json": b'{"vocab_size": 8}',
            "model.safetensors": b"weights",
            "tokenizer.json": b"{}",
            "original/model.pth": b"twice",
            "model.gguf": b"thrice",
        }
        self.asked: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        hub = self.server
        assert isinstance(hub, _Hub)
        path = self.path.partition("?")[0]
        hub.asked.append(path)
        status, body, headers = 404, b"{}", {"X-Error-Code": "RepoNotFound"}
        if path.startswith("/api/models/gated/"):
            status, headers = 403, {"X-Error-Code": "GatedRepo"}
        elif path.startswith("/api/models/own/model/revision/tuned"):
            headers = {"X-Error-Code": "RevisionNotFound"}
        elif path.startswith("/api/models/own/model/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in hub.files.items()
            ]
            status, body, headers = 200, json.dumps(listed).encode(), {"Content-Type": "application/json"}
        elif path.startswith("/api/models/own/model"):
            siblings = [{"rfilename": name} for name in hub.files]
            body = json.dumps({"id": "own/model", "sha": COMMIT, "siblings": siblings}).encode()
            status, headers = 200, {"Content-Type": "application/json"}
        elif path.startswith(f"/own/model/resolve/{COMMIT}/"):
            body = hub.files[path.rpartition("/")[2]]
            status, headers = 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Hub]:
    """A hub with the model ``own/model``, which the cache does not have."""
    with _Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield server
        server.shutdown()
        thread.join()


def test_a_name_of_the_hub_is_downloaded_once_and_only_when_asked(hub: _Hub, cache: Path) -> None:
    """What is read is fetched, not the same weights in other formats; later it is there without the hub."""
    _refusal("own/model")
    assert hub.asked == []
    folder = find_model("own/model", download=True)
    assert folder == cache / "models--own--model" / "snapshots" / COMMIT
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    hub.asked.clear()
    assert find_model("own/model") == find_model("own/model", download=True) == folder
    assert hub.asked == []


def test_what_the_cache_lacks_of_a_model_is_fetched(hub: _Hub, cache: Path) -> None:
    """Somebody had loaded its configuration only."""
    folder = find_model("own/model", download=True)
    (folder / "model.safetensors").unlink()
    assert "has only a part of it: there are no weights" in _refusal("own/model")
    assert find_model("own/model", download=True) == folder


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no/model", "which the hub does not have, or not for everybody; log in by `hf auth login`"),
        ("gated/model", "which its owner gives only to people who asked for it; log in by `hf auth login`"),
        ("own/model@tuned", "which the hub has, but without a revision 'tuned'"),
    ],
)
def test_what_the_hub_refuses_is_said(hub: _Hub, model: str, message: str) -> None:
    """By the key, and with what to do."""
    said = _refusal(model, download=True, key="model.path")
    assert said.startswith(f"model.path is '{model}', {message}: ")


def test_a_model_of_the_hub_that_is_not_for_training_is_refused(hub: _Hub) -> None:
    """After what can be read of it was fetched."""
    del hub.files["model.safetensors"]
    assert "there are no weights" in _refusal("own/model", download=True)


def test_without_a_network_the_reason_is_said(cache: Path) -> None:
    """Here the hub's library is told to stay offline."""
    assert "which could not be downloaded: " in _refusal("own/model", download=True)
