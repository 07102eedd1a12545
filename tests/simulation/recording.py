"""Writing the events of a run by hand, and small recipes to simulate."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from asyncrl.events import Event
from asyncrl.observe.sinks import encode_event
from asyncrl.recipe.config import load_recipe
from asyncrl.simulation.cost import Cost, LoadModel
from asyncrl.simulation.grid import RunOptions
from asyncrl.simulation.workload import GroupScript, MemberScript, TurnScript, Workload

RECIPE = """
[model]
path = "."
lora = { r = 8 }
[env]
factory = "env.py:Missing"
[data]
train = "env.py:rows"
[trainer]
steps = 12
groups_per_step = 2
group_size = 2
max_staleness = 1
[optimizer]
lr = 1e-3
"""


def run_options(folder: Path, *overrides: str, lora_rank: int | None = 8) -> RunOptions:
    """Two groups of two a step, a bound of 1; neither its environment nor its model exists."""
    path = folder / "recipe.toml"
    path.write_text(RECIPE, encoding="utf-8")
    recipe = load_recipe(path, overrides)
    return RunOptions(path=path, engine=recipe.engine, trainer=recipe.trainer, steps=recipe.steps, lora_rank=lora_rank)


def workload(
    *,
    tokens: int = 10,
    turns: int = 1,
    own: float = 0.1,
    shared: float = 0.0,
    reply_s: float = 0.0,
    train_s: float = 0.0,
    publish_s: float = 0.0,
) -> Workload:
    """Groups of two members that are all alike but for their reward; ``own`` and ``shared`` are seconds a token.

    Staging takes a quarter of publishing.
    """
    script = tuple(TurnScript(new_tokens=5, uncached_tokens=5, tokens=tokens, reply_s=reply_s) for _ in range(turns))
    group = GroupScript(members=(MemberScript(turns=script, reward=0.0), MemberScript(turns=script, reward=1.0)))
    return Workload(
        groups=[group] * 4,
        sampling=LoadModel(own=(0.0, own, 0.0), shared=(0.0, shared, 0.0)),
        training=Cost(coefficients=(train_s, 0.0, 0.0)),
        optimizer=Cost(coefficients=(0.0,)),
        staging=Cost(coefficients=(publish_s / 4,)),
        publication=LoadModel(own=(publish_s,), shared=(0.0,)),
    )


def write_events(folder: Path, events: Iterable[Event]) -> Path:
    """The run directory of a run in which these things happened."""
    (folder / "events.jsonl").write_bytes(b"".join(map(encode_event, events)))
    return folder


def write_lines(folder: Path, *lines: dict[str, Any], end: str = "") -> Path:
    """The same from plain objects; ``end`` is a last line without its end."""
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end, encoding="utf-8")
    return folder
