"""``asyncrl export``: trained weights as a folder that transformers, PEFT and SGLang load, and that can be given away.

It has the weights, the tokenizer, and a card that says what trained them. No path of this machine is in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from asyncrl.errors import ConfigError
from asyncrl.files import drafted, emptied, flush, read_json, remove, settle
from asyncrl.learning.adapterfolder import ADAPTER_CONFIG, copy_tokenizer, read_adapter_config
from asyncrl.observe.sinks import read_results
from asyncrl.observe.summary import RunSummary
from asyncrl.recipe.trained import Trained, base_name, hub_name

__all__ = ["export"]

_OURS = ("about.json", "probe.json")
# Of a version in a run directory: for resuming, and nobody else's.


def export(trained: Trained, out: Path, *, merged: bool = False) -> None:
    """Write ``trained`` into the new folder ``out``, whole or not at all. Blocking; ``merged`` imports torch.

    ``merged``: an adapter becomes part of the weights of its model. Raises ``ConfigError`` if ``out`` has files, or the
    base model is not there.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError.for_value("OUT", str(out), "a new or an empty folder")
    base = trained.base_model()
    folder = drafted(out)
    emptied(folder)
    try:
        _write(trained, base, folder, merged=merged)
        text = _card(trained, base, is_adapter=trained.is_adapter and not merged)
        (folder / "README.md").write_text(text, encoding="utf-8")
        _open_to_all(folder)
        flush(folder)
        settle(folder, out)
    finally:
        with contextlib.suppress(OSError):
            remove(folder)


def _write(trained: Trained, base: Path, folder: Path, *, merged: bool) -> None:
    if trained.is_adapter and merged:
        _merge(trained.folder, base, folder)
        copy_tokenizer(base, folder)
        return
    for path in trained.folder.iterdir():
        if path.is_file() and path.name not in (*_OURS, ADAPTER_CONFIG, "README.md"):
            shutil.copyfile(path, folder / path.name)
    if trained.is_adapter:
        config = {**read_adapter_config(trained.folder, "adapter"), "base_model_name_or_path": base_name(base)}
        (folder / ADAPTER_CONFIG).write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
        copy_tokenizer(base, folder)


def _merge(adapter: Path, base: Path, folder: Path) -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto", local_files_only=True)
    merged: Any = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    with torch.no_grad():
        merged.save_pretrained(folder)


def _open_to_all(folder: Path) -> None:
    """Files as any program writes them: libraries write some for their owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for path in folder.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)


def _card(trained: Trained, base: Path, *, is_adapter: bool) -> str:
    """What trained the weights, in the format of model cards of the Hugging Face hub."""
    name = base_name(base) if trained.is_adapter else None
    library = "peft" if is_adapter else "transformers"
    head = ["---", f"library_name: {library}", *([f"base_model: {name}"] if name else []), "tags:", "- asyncrl", "---"]
    lines = [*head, "", "# Trained with asyncrl", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in _facts(trained, name).items()]
    if is_adapter:
        where = name if hub_name(base) else f"the folder of {name}"
        load = [
            f'model = AutoModelForCausalLM.from_pretrained("{where}")  # the base model',
            'model = PeftModel.from_pretrained(model, "this folder")',
        ]
        imports = ["from peft import PeftModel", "from transformers import AutoModelForCausalLM, AutoTokenizer"]
    else:
        load = ['model = AutoModelForCausalLM.from_pretrained("this folder")']
        imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
    tokenizer = 'tokenizer = AutoTokenizer.from_pretrained("this folder")'
    return "\n".join([*lines, "", "```python", *imports, "", *load, tokenizer, "```", ""])


def _facts(trained: Trained, base: str | None) -> dict[str, object]:
    facts: dict[str, object] = {"base model": base} if base else {}
    if trained.run is not None:
        facts |= {"version (updates)": trained.version, **_of_run(trained.run)}
    return {
        **facts,
        "asyncrl": metadata.version("asyncrl"),
        "exported": datetime.now(UTC).date().isoformat(),
    }


def _of_run(run: Path) -> dict[str, object]:
    content = read_json(run / "run.json")
    path = (content.get("origin") or {}).get("path")
    trainer: Mapping[str, Any] = (content.get("configuration") or {}).get("trainer") or {}
    said = {key: trainer[key] for key in ("loss", "max_staleness", "groups_per_step", "group_size") if key in trainer}
    summary = RunSummary()
    for event in read_results(run):
        summary.observe(event)
    numbers = {
        key.replace("_", " "): round(value, 4) if isinstance(value, float) else value
        for key, value in summary.summary().items()
    }
    # The names of its folder and its file, and not where they were.
    recipe = "/".join(Path(path).parts[-2:]) if path else None
    return {"run": run.resolve().name, **({"recipe": recipe} if recipe else {}), **said, **numbers}
