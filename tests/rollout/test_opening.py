from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import asyncrl as rl
from asyncrl.errors import ConfigError
from asyncrl.events import Event, Events, Notice
from asyncrl.rollout.env import env_factory
from asyncrl.rollout.renderer import open_renderer
from asyncrl.types import Message, Row
from tests.rollout.families import FAMILIES, make_family_tokenizer


class Adds(rl.Env):
    """Has one tool."""

    async def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": "?"}]

    @rl.tool
    async def add(self, a: int, b: str) -> str:
        """Add."""
        return ""

    async def reward(self, traj: rl.Trajectory, row: Row) -> float:
        return 0.0


class Answers(Adds):
    """Answers turns itself."""

    async def on_turn(self, traj: rl.Trajectory) -> list[Message]:
        return [{"role": "user", "content": "!"}]


class Silent(Adds):
    """Has none."""

    tools = ()


@pytest.mark.slow
@pytest.mark.parametrize("env", [Adds, partial(Adds), Answers, Silent])
@pytest.mark.parametrize("name", FAMILIES)
async def test_tools_that_a_template_loses_are_refused_or_warned_about(
    tmp_path: Path, name: str, env: type[rl.Env]
) -> None:
    """By name; an environment that answers itself may not need results, and one without tools needs nothing."""
    family = FAMILIES[name]
    make_family_tokenizer(name, "characters").save_pretrained(tmp_path)
    seen: list[Event] = []
    events = Events()
    events.subscribe(seen.append)
    opened = open_renderer(tmp_path, "chat", env_factory(env), events)
    own = env is Answers and family.problems == ("results_not_written",)
    if family.fatal and env is not Silent and not own:
        with pytest.raises(ConfigError, match=rf"tools \(add\), but .* \({family.problems[0]}\)"):
            await opened
        return
    await opened
    notices = [event for event in seen if isinstance(event, Notice)]
    assert [notice.name for notice in notices] == list(() if env is Silent else family.problems)
    assert all(notice.keys["tools"] == "add" and notice.level == "warning" for notice in notices)
