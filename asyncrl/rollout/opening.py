"""Bringing up the renderer of a run: it is loaded, and its chat template tried with the environment's tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread

from asyncrl.errors import ConfigError
from asyncrl.events import Events, Notice
from asyncrl.rollout.env import EnvFactory
from asyncrl.rollout.renderer import ChatRenderer, Renderer, load_renderer
from asyncrl.rollout.roundtrip import Problem

__all__ = ["open_renderer"]


async def open_renderer(
    model: Path,
    kind: Literal["auto", "chat", "text"],
    factory: EnvFactory,
    events: Events,
    *,
    stop: Sequence[str] = (),
    template_options: Mapping[str, Any] | None = None,
) -> Renderer:
    """The renderer of the model in ``model``, in a thread.

    What its template does not carry through of the tools is reported as a ``Notice``, or raised as ``ConfigError`` if
    the run would only show it by calls that nobody reads or results that the model never sees.
    """
    load: Callable[[], tuple[Renderer, list[Problem]]] = partial(
        _load, model, kind, factory, stop=stop, template_options=template_options
    )
    renderer, problems = await anyio.to_thread.run_sync(load)
    for problem in problems:
        names = ", ".join(problem.tools)
        if problem.fatal and not (problem.name == "results_not_written" and factory.answers):
            raise ConfigError(f"the environment has tools ({names}), but {problem.reason} ({problem.name})")
        keys = {"tools": names, "reason": problem.reason}
        events.emit(Notice(time=anyio.current_time(), name=problem.name, level="warning", keys=keys))
    return renderer


def _load(
    model: Path, kind: Literal["auto", "chat", "text"], factory: EnvFactory, **options: Any
) -> tuple[Renderer, list[Problem]]:
    renderer = load_renderer(model, kind, **options)
    problems = renderer.check(factory.tools) if isinstance(renderer, ChatRenderer) and factory.tools else []
    return renderer, problems
