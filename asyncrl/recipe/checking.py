"""``asyncrl check``: what is wrong with a recipe and its environment, in seconds and before anything is trained.

Everything that a run would refuse is looked at part by part, so that one look shows several faults; then the first
prompt, and a rehearsal of the environment. Nothing is sampled, no weights are loaded, and no server is started.
``check_start`` is the part of it that every run does first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import anyio
import anyio.to_thread

from asyncrl.errors import AsyncRLError, ConfigError, InfrastructureError, RolloutTimeout
from asyncrl.events import Events
from asyncrl.learning.modelfolder import find_model
from asyncrl.plain import copied, error_text
from asyncrl.recipe.compose import ComposedRun, compose, parts, renderer_of
from asyncrl.recipe.config import Recipe
from asyncrl.recipe.findings import Findings
from asyncrl.recipe.rehearsal import Rehearsal
from asyncrl.rollout.border import checked_messages, place, shared_parts
from asyncrl.rollout.budget import Budget
from asyncrl.rollout.calls import call_user
from asyncrl.rollout.closing import Closing
from asyncrl.rollout.env import Env, EnvFactory, env_factory
from asyncrl.rollout.renderer import ChatRenderer, TextRenderer
from asyncrl.rollout.tools import Tool
from asyncrl.rollout.usercode import place_of
from asyncrl.types import IntArray, Message, Row

__all__ = ["check_composed", "check_recipe", "check_start"]

T = TypeVar("T")
ShowPrompt: TypeAlias = Callable[[ChatRenderer | TextRenderer, Sequence[Message], Sequence[Tool], IntArray], None]
_CONNECT_S = 2.0
_RESET_S = 10.0
# A run does not wait longer than that for a reset that is only looked at.


async def check_recipe(recipe: Recipe, findings: Findings, *, show_prompt: ShowPrompt, timeout_s: float) -> None:
    """Look at everything, tell ``findings``, and show the first prompt.

    ``timeout_s``: for each call of user code.
    """
    made = await anyio.to_thread.run_sync(_look_at_parts, recipe, findings)
    renderer = None
    if (model := made.get("model")) is not None:
        renderer = await anyio.to_thread.run_sync(_load_renderer, model, recipe, findings)
    await _look_at_servers(recipe, findings)
    factory = _attempt("env", findings, lambda: env_factory(made["env"])) if "env" in made else None
    if renderer is not None and factory is not None and "data.train" in made:
        subject = _Subject(
            factory=factory,
            row=made["data.train"][0],
            renderer=renderer,
            budget=recipe.engine["budget"],
            model=made["model"],
        )
        await _rehearse(subject, findings, show_prompt=show_prompt, timeout_s=timeout_s)
    else:
        findings.unchecked("rehearsal", "the environment: it needs all of [env], [data] and [model]")
    findings.unchecked("run", "whether the model fits into memory, and how long things take")


async def check_composed(
    composed: ComposedRun, findings: Findings, *, show_prompt: ShowPrompt, timeout_s: float
) -> None:
    """The same of a run that a script has built: its first prompt and the rehearsal."""
    engine, model = composed.engine, composed.engine.policy.learner.model_path
    try:
        await anyio.to_thread.run_sync(find_model, model)
        renderer = await engine.open_renderer(Events())
    except ConfigError as error:
        findings.error("model", error)
        return
    if not isinstance(renderer, ChatRenderer | TextRenderer):
        findings.unchecked("rehearsal", "the environment: the renderer is the script's own")
        return
    budget: Any = engine.identity()["budget"]
    subject = _Subject(factory=engine.factory, row=composed.rows[0], renderer=renderer, budget=budget, model=model)
    await _rehearse(subject, findings, show_prompt=show_prompt, timeout_s=timeout_s)


def _look_at_parts(recipe: Recipe, findings: Findings) -> Mapping[str, Any]:
    """The parts that could be made, by their keys."""
    made: dict[str, Any] = {}
    wanted = parts(recipe)
    for key, make in wanted.items():
        try:
            made[key] = make()
            findings.ok(key, _shown_part(key, made[key]))
        except ConfigError as error:
            findings.error(key, error)
    for name, reason in shared_parts(made["data.train"][0]) if "data.train" in made else ():
        findings.warn("data.train", f"{reason} ({name})")
    if len(made) == len(wanted):  # else it would be refused for what is told already
        _attempt("run", findings, lambda: compose(recipe, directory=Path(recipe.run.directory) / "check"))
    _look_at_directory(Path(recipe.run.directory), findings)
    return made


def _shown_part(key: str, made: Any) -> str:
    if key.startswith("data."):
        return f"{len(made)} rows"
    if key == "env":
        return str(getattr(getattr(made, "func", made), "__qualname__", made))
    return str(made)


def _attempt(part: str, findings: Findings, make: Callable[[], T]) -> T | None:
    """What ``make`` returns; None if it is refused, which is told."""
    try:
        return make()
    except ConfigError as error:
        findings.error(part, error)
        return None


def _look_at_directory(directory: Path, findings: Findings) -> None:
    nearest = next(path for path in (directory.absolute(), *directory.absolute().parents) if os.path.lexists(path))
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        findings.ok("run.directory", f"{directory}, which can be written")
    else:
        todo = "name another folder: --set run.directory=.."
        findings.fault("run.directory", f"{directory} cannot be made: {nearest} cannot be written", todo=todo)


def _load_renderer(model: Path, recipe: Recipe, findings: Findings) -> ChatRenderer | TextRenderer | None:
    todo = "the folder of a model has its tokenizer beside the weights (tokenizer.json, tokenizer_config.json)"
    try:
        renderer = renderer_of(recipe, model)
    except ConfigError as error:
        findings.error("renderer", error)
    except (OSError, ValueError, LookupError, TypeError) as error:
        findings.fault("tokenizer", f"{model}: {error_text(error)}", todo=todo)
    else:
        if renderer.stop_token_ids or renderer.stop:
            ends = [renderer.tokenizer.decode([id]) for id in renderer.stop_token_ids]
            findings.ok("renderer", f"a turn ends with {' or '.join(map(repr, [*ends, *renderer.stop]))}")
        else:
            text = "nothing ends a turn: neither the tokenizer nor the model's files name an end token"
            findings.warn(
                "renderer", text, todo="each turn takes all of its budget: set rollout.stop or max_turn_tokens"
            )
        return renderer
    return None


async def _look_at_servers(recipe: Recipe, findings: Findings) -> None:
    """Whether the servers that the recipe names by URL take connections."""
    from urllib.parse import urlsplit

    section = recipe.sampler
    if not section.named:
        findings.unchecked("sampler", f"the servers of backend {section.backend!r}, which a run starts")
        return
    if section.urls_file is not None or any(not url.startswith(("http://", "https://")) for url in section.urls):
        findings.unchecked("sampler", "the servers, whose addresses are looked up when a run starts")
        return
    for url in section.urls:
        split = urlsplit(url)
        try:
            with anyio.fail_after(_CONNECT_S):
                stream = await anyio.connect_tcp(split.hostname or "", split.port or 80)
            await stream.aclose()
            findings.ok("sampler", f"{url} takes connections; which model it has is not checked")
        except (OSError, TimeoutError, ValueError) as error:
            todo = "start the server, or correct sampler.urls"
            findings.fault("sampler", f"{url} takes no connection: {error_text(error)}", todo=todo)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """What is rehearsed."""

    factory: EnvFactory
    row: Row
    renderer: ChatRenderer | TextRenderer
    budget: Budget
    model: Path


async def _rehearse(subject: _Subject, findings: Findings, *, show_prompt: ShowPrompt, timeout_s: float) -> None:
    factory, renderer = subject.factory, subject.renderer
    with Rehearsal(factory, subject.row, renderer, findings, timeout_s=timeout_s) as rehearsal:
        opening = await rehearsal.opening()
        if opening is not None:
            env, messages = opening
            _look_at_tools(renderer, env, factory, findings)
            try:
                ids = await renderer.prompt(messages, env.tools)
            except ConfigError as error:
                findings.error("prompt", error)
            else:
                show_prompt(renderer, messages, env.tools, ids)
                _look_at_room(len(ids), subject, findings)
                await rehearsal.run(env)


def _look_at_tools(renderer: ChatRenderer | TextRenderer, env: Env, factory: EnvFactory, findings: Findings) -> None:
    for problem in renderer.check(env.tools):
        text = f"{', '.join(problem.tools)}: {problem.reason} ({problem.name})"
        (findings.fault if problem.refused(factory) else findings.warn)("tools", text)
    for tool in env.tools:
        if not tool.description.strip():
            text = f"{tool.name} has no docstring ({place(tool.function)})"
            findings.warn("tools", text, todo="say in it what the tool does: the model is told that")
    findings.ok("tools", ", ".join(tool.name for tool in env.tools) or "none")


def _look_at_room(tokens: int, subject: _Subject, findings: Findings) -> None:
    """Whether the context has room for the prompt, and for what the budget lets the model say."""
    budget = subject.budget
    context = min(budget.max_context_tokens, _context_of(subject.model) or budget.max_context_tokens)
    wanted = budget.max_generated_tokens
    if budget.max_turn_tokens is not None:
        wanted = min(wanted, budget.max_turns * budget.max_turn_tokens)
    text = f"{tokens} tokens, and the context has room for {context}"
    if tokens >= context:
        findings.fault("prompt", text, todo="shorten the first messages, or raise budget.max_context_tokens")
    elif tokens + wanted > context:
        todo = f"set budget.max_generated_tokens to at most {context - tokens}, or shorten the prompt"
        text = f"{text}: a conversation may be cut off before the {wanted} tokens that its budget allows"
        findings.warn("prompt", text, todo=todo)
    else:
        findings.ok("prompt", text)


def _context_of(model: Path) -> int | None:
    """Tokens for which the model has positions; None if its files do not say so."""
    try:
        found = json.loads((model / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) else None


async def check_start(recipe: Recipe, composed: ComposedRun) -> None:
    """What every run does first, before it loads anything: the reset of the first row. Nothing else is called.

    Raises ``ConfigError`` if the environment cannot be made, or does not begin. A reset whose machinery fails, or that
    takes longer than ten seconds, is left to the run, which tries again.
    """
    factory = composed.engine.factory
    try:
        env = factory.create()
        try:
            reset = await call_user(env.reset, copied(composed.rows[0]), timeout=_RESET_S)
            checked_messages(reset, env.reset, least=1)
        finally:
            if factory.owned:
                await Closing().close(env, "start", Events())
    except (InfrastructureError, RolloutTimeout):
        return
    except ConfigError as error:
        raise ConfigError(f"{recipe.path}: {error}") from error
    except Exception as error:
        place = place_of(error)
        said = str(error) if isinstance(error, AsyncRLError) else error_text(error)
        what = f"reset of the first row failed: {said}{f' ({place})' if place and place not in said else ''}"
        raise ConfigError(f"{recipe.path}: {what}. For more: asyncrl check {recipe.path}") from error
