"""A model as people name it: a folder, or a name of the Hugging Face hub, such as ``Qwen/Qwen3-0.6B``.

Whoever takes a model calls ``find_model``. It promises a folder with all that a run reads (configuration, weights and
tokenizer), or a ``ConfigError`` that says what was looked for, where, and what to do. The network is used only with
``download=True``. Blocking; importing this imports nothing of the hub.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.plain import error_text, shown

__all__ = ["find_model"]

_HOW: Mapping[str, str] = {"model.path": "set model.download = true", "--model": "add --download"}
# By the keys at which names stand; in Python it is a call of ``find_model``.
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "LICENSE*", "README.md")
_LEFT = ("*/*", "consolidated*")
# Of a repository, what transformers and SGLang read; not the same weights once more in other formats.
_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)


def find_model(
    model: str | Path,
    *,
    download: bool = False,
    weights: bool = True,
    key: str = "model",
    base: str | Path | None = None,
) -> Path:
    """The folder of ``model``: a folder (``~`` too), or ``owner/name`` or ``owner/name@revision`` of the hub.

    A name is looked up in the cache of ``huggingface_hub`` (``HF_HOME``). With ``download`` what is not there is
    fetched into it, which takes minutes for a large model and shows its progress on stderr.
    ``weights``: False if a tokenizer is enough, for what only reads and writes prompts.
    ``base``: folder that relative paths are seen from, by default the current one. ``key``: names it in errors.

    Blocking: in a program with a running event loop call it before, or in a thread. Raises ``ConfigError``.
    """
    text = str(model)
    folder = _local(text, key, Path() if base is None else Path(base))
    if folder.is_dir():
        return _complete(folder, f"{key} is {shown(text)}", weights=weights)
    if folder.exists():
        raise ConfigError.for_value(key, text, "the folder of a model, not a file in it")
    name, _, revision = text.partition("@")
    if _NAME.fullmatch(name) is None:
        near = difflib.get_close_matches(folder.name, _folders_in(folder.parent), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{key} is {shown(text)}, but there is no folder {shown(str(folder))}{hint}")
    found = _cached(name, revision or None)
    problem = None if found is None else _problem(found, weights=weights)
    if found is not None and problem is None:
        return found
    if not download:
        raise _not_here(key, text, folder, problem)
    return _complete(_fetched(key, text, name, revision or None), f"{key} is {shown(text)}", weights=weights)


def _local(text: str, key: str, base: Path) -> Path:
    """Where the folder of that name would be."""
    if not text or "\0" in text:
        raise ConfigError.for_value(key, text, "a folder or a name such as 'Qwen/Qwen3-0.6B'")
    try:
        return base.expanduser() / Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError.for_value(key, text, f"a folder that can be found: {error}") from error


def _cached(name: str, revision: str | None) -> Path | None:
    """The folder in the hub's cache that has something of that model, whoever put it there; None without one."""
    from huggingface_hub import snapshot_download

    try:
        # What has to be in it is said here, not by the list of all files of the repository.
        return Path(snapshot_download(name, revision=revision, local_files_only=True, allow_patterns="config.json"))
    except (OSError, ValueError):
        return None


def _fetched(key: str, text: str, name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    def refused(why: str, error: Exception) -> ConfigError:
        return ConfigError(f"{key} is {shown(text)}, which {why}: {' '.join(error_text(error).split())}")

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*_FILES], ignore_patterns=[*_LEFT]))
    except GatedRepoError as error:
        raise refused("its owner gives only to people who asked for it; log in by `hf auth login`", error) from error
    except RepositoryNotFoundError as error:
        raise refused("the hub does not have, or not for everybody; log in by `hf auth login`", error) from error
    except RevisionNotFoundError as error:
        raise refused(f"the hub has, but without a revision {revision!r}", error) from error
    except (OSError, ValueError) as error:
        raise refused("could not be downloaded", error) from error


def _not_here(key: str, text: str, folder: Path, problem: str | None) -> ConfigError:
    """Neither a folder nor, with all its files, in the cache."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).expanduser()
    owners = [path.removeprefix("models--").replace("--", "/") for path in _folders_in(cache, "models--")]
    near = _nearest(text, owners)
    hint = f"; did you mean {near!r}?" if near else ""
    found = f"has only a part of it: {problem}" if problem else f"has no model of that name{hint}"
    how = _HOW.get(key) or f"call rl.find_model({text!r}, download=True) first"
    return ConfigError(
        f"{key} is {shown(text)}, but there is no folder {shown(str(folder))}, and the Hugging Face cache ({cache}) "
        f"{found}. To download it from the hub, {how}"
    )


def _nearest(text: str, names: list[str]) -> str | None:
    """The name that was probably meant; its owner may be missing."""
    text = text.partition("@")[0]
    full = {name.lower(): name for name in names}
    own = {name.lower().rpartition("/")[2]: name for name in names}
    for known, wanted in ((full, text.lower()), (own, text.lower().rpartition("/")[2])):
        if near := difflib.get_close_matches(wanted, known, n=1, cutoff=0.75):
            found = known[near[0]]
            return found if found != text else None
    return None


def _folders_in(folder: Path, prefix: str = "") -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if path.name.startswith(prefix) and path.is_dir())
    except OSError:
        return []


def _complete(folder: Path, said: str, *, weights: bool) -> Path:
    if problem := _problem(folder, weights=weights):
        raise ConfigError(f"{said}, but must be a folder with a model: {problem} ({folder})")
    return folder


def _problem(folder: Path, *, weights: bool) -> str | None:
    """What a run would miss in ``folder``; None if all is there. The files themselves are not read."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if weights and (problem := _problem_of_weights(folder, names)):
        return problem
    if not names.intersection(_TOKENIZERS):
        return "there is no tokenizer (tokenizer.json) in it"
    return None


def _problem_of_weights(folder: Path, names: set[str]) -> str | None:
    if "config.json" not in names:
        return f"there is no config.json in it{_instead(names)}"
    if not names & {_WEIGHTS, _INDEX}:
        return f"there are no weights (model.safetensors) in it{_instead(names)}"
    if _WEIGHTS not in names and (missing := _missing_parts(folder / _INDEX, names)):
        return f"of its weights {len(missing)} files are missing: {', '.join(missing[:3])}"
    return None


def _instead(names: set[str]) -> str:
    """What else is in a folder without a configuration, or without weights that can be read."""
    if "adapter_config.json" in names:
        return ", for it is a LoRA adapter"
    if any(name.endswith(".gguf") for name in names):
        return ", only GGUF files, which are made for inference: use the model that they were made of"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
        return ", only pickled ones: save it with safetensors, as save_pretrained of transformers does"
    return ""


def _missing_parts(index: Path, names: set[str]) -> list[str]:
    try:
        parts = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{index.name} cannot be read"]
    return sorted(str(part) for part in parts if part not in names)
