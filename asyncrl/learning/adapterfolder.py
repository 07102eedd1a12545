"""Adapter folders in PEFT's format, and what of a model folder goes with weights that were trained. No torch is needed.

Only plain LoRA is read: what SGLang serves.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson

from asyncrl.errors import ConfigError
from asyncrl.learning.options import LoraConfig

__all__ = ["ADAPTER_CONFIG", "copy_tokenizer", "is_adapter", "read_adapter", "read_adapter_config"]

ADAPTER_CONFIG = "adapter_config.json"
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "added_tokens.json",
)
_PLAIN = {"use_rslora": False, "use_dora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {}}
# Options of PEFT, and their values for plain LoRA.


def is_adapter(folder: Path) -> bool:
    """True if ``folder`` has an adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path, key: str = "model.adapter") -> dict[str, Any]:
    """The content of ``adapter_config.json``. Raises ``ConfigError`` naming ``key`` for anything but plain LoRA."""
    try:
        content: dict[str, Any] = orjson.loads((folder / ADAPTER_CONFIG).read_bytes())
        kind = content["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        allowed = f"a folder with a LoRA adapter in PEFT's format ({ADAPTER_CONFIG}: {error!r})"
        raise ConfigError.for_value(key, str(folder), allowed) from error
    odd = [name for name, plain in _PLAIN.items() if content.get(name, plain) not in (plain, None)]
    if kind != "LORA" or odd:
        raise ConfigError.for_value(
            key, str(folder), f"a plain LoRA adapter: this one is {kind}{' with ' if odd else ''}{', '.join(odd)}"
        )
    return content


def read_adapter(folder: Path, wanted: LoraConfig | None) -> LoraConfig:
    """The options of the adapter in ``folder``. Raises ``ConfigError`` if they are not those that are ``wanted``."""
    content = read_adapter_config(folder)
    targets = content.get("target_modules") or "all-linear"
    found = LoraConfig(
        r=content["r"],
        alpha=content["lora_alpha"],
        target_modules=targets if isinstance(targets, str) else tuple(sorted(targets)),
    )
    if wanted is None:
        return found
    for name in ("r", "alpha"):
        if getattr(wanted, name) != getattr(found, name):
            raise ConfigError(
                f"lora.{name} is {getattr(wanted, name)}, but the adapter in {folder} has {getattr(found, name)}: use "
                "that, or leave lora out"
            )
    return wanted


def copy_tokenizer(model: Path, folder: Path) -> None:
    """Copy the tokenizer and the chat template of ``model`` into ``folder``."""
    for pattern in _TOKENIZER_FILES:
        for file in model.glob(pattern):
            # The content alone: who may read the copy is decided where it is.
            shutil.copyfile(file, folder / file.name)
