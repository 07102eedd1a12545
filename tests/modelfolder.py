"""A folder that passes for a model where only its options are looked at."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FILES", "write_model"]

FILES = ("config.json", "model.safetensors", "tokenizer.json")
"""What a complete folder has at least."""


def write_model(folder: Path, config: str = "{}") -> Path:
    """Make ``folder`` one with all files that a model has, of which only ``config`` has a content; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).write_text(config if name == "config.json" else "", encoding="utf-8")
    return folder
