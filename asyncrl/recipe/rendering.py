"""``asyncrl render``: what the model of a recipe will read of a row, token by token, and how the conversation goes on.

stdout has the tokens, a line for each run of one kind; what is not right with the template goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence

import anyio
import anyio.to_thread
import numpy as np
from rich.console import Console
from rich.text import Text

from asyncrl.errors import ConfigError
from asyncrl.recipe.compose import ComposedPrompts, compose_prompts, renderer_of
from asyncrl.recipe.config import Recipe
from asyncrl.rollout.announcement import tagged
from asyncrl.rollout.border import checked_messages
from asyncrl.rollout.calls import call_user
from asyncrl.rollout.chattemplate import example_call, result_of
from asyncrl.rollout.env import Env
from asyncrl.rollout.renderer import ChatRenderer, TextRenderer
from asyncrl.rollout.tokenkinds import TokenKind, TokenRun, environment_runs, turn_runs
from asyncrl.rollout.tools import Tool
from asyncrl.types import IntArray, Message

__all__ = ["plain_console", "print_prompt", "print_runs", "render_row"]

_STYLES = {
    TokenKind.CONTROL: "bold magenta",
    TokenKind.TEMPLATE: "cyan",
    TokenKind.CONTENT: "",
    TokenKind.GENERATION_PROMPT: "yellow",
    TokenKind.MODEL: "green",
}
_WIDEST = max(len(kind) for kind in TokenKind)


async def render_row(recipe: Recipe, row: int, *, say: Callable[[str], None]) -> None:
    """Print the prompt of row ``row`` of the recipe's data, and one turn with what follows it.

    Raises ``ConfigError`` for a recipe, a row or a template that is refused, and what the environment's reset raises.
    """
    prompts = await anyio.to_thread.run_sync(compose_prompts, recipe)
    if not 0 <= row < len(prompts.rows):
        raise ConfigError.for_value("--row", row, f"0 to {len(prompts.rows) - 1}, for data.train has so many rows")
    renderer = await anyio.to_thread.run_sync(renderer_of, recipe, prompts.model)
    env = prompts.env()
    try:
        await _show(renderer, env, prompts, row, say)
    finally:
        await call_user(env.close)


async def _show(
    renderer: ChatRenderer | TextRenderer, env: Env, prompts: ComposedPrompts, row: int, say: Callable[[str], None]
) -> None:
    for problem in renderer.check(env.tools):
        say(f"{problem.name}: {', '.join(problem.tools)}: {problem.reason}")
    messages = checked_messages(await call_user(env.reset, prompts.rows[row]), env.reset, least=1)
    ids = await renderer.prompt(messages, env.tools)
    console = plain_console()
    print_runs(console, f"row {row}: {len(ids)} tokens", environment_runs(renderer, messages, env.tools, ids))
    turn_ids, new = _turn(renderer, env)
    parsed = await renderer.parse(turn_ids, env.tools)
    print_runs(console, "a turn of the model, as an example", turn_runs(renderer, turn_ids))
    framing = await renderer.continuation([*messages, parsed.message], new, turn_ids, env.tools)
    runs = environment_runs(renderer, new, env.tools, framing, turn=parsed.message)
    print_runs(console, f"what follows it: {len(framing)} tokens", runs)
    ends = [json.dumps(renderer.tokenizer.decode([id]), ensure_ascii=False) for id in renderer.stop_token_ids]
    say(f"a turn ends with {' or '.join([*ends, *map(json.dumps, renderer.stop)]) or 'nothing'}")


def _turn(renderer: ChatRenderer | TextRenderer, env: Env) -> tuple[IntArray, list[Message]]:
    """A turn that calls the environment's first tool, and its result; without tools an answer, and a question."""
    text, new = "(answer)", [{"role": "user", "content": "(next message)"}]
    if env.tools:
        call = example_call(env.tools[0])
        text = _written(renderer, env, call)
        new = [result_of(call, "(result)")]
    # As a model would write it, so control tokens are what they are.
    ids = renderer.tokenizer.encode(text, add_special_tokens=False)
    return np.asarray([*ids, *renderer.stop_token_ids[:1]], dtype=np.int32), new


def _written(renderer: ChatRenderer | TextRenderer, env: Env, call: Message) -> str:
    """The call as the template writes it, or as it is read if the template writes none."""
    if isinstance(renderer, ChatRenderer):
        with contextlib.suppress(ConfigError):
            written = renderer.template.calls(call, env.tools)
            if env.tools[0].name in written:
                return written
    return tagged(call)


def plain_console() -> Console:
    """Of stdout, for texts of anybody's: nothing in them is markup, and no line is broken."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_prompt(
    console: Console,
    renderer: ChatRenderer | TextRenderer,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    ids: IntArray,
) -> None:
    """Print ``ids``, the prompt with these messages and tools, as the model will read it."""
    runs = environment_runs(renderer, messages, tools, ids)
    print_runs(console, f"the prompt of row 0: {len(ids)} tokens", runs)


def print_runs(console: Console, title: str, runs: Sequence[TokenRun]) -> None:
    """Print the tokens of a text, a line for each run of one kind."""
    console.print(Text(title, style="bold"))
    for run in runs:
        # White space other than a blank, and what a terminal would obey, is made visible.
        shown = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in run.text)
        line = Text(f"  {run.kind:<{_WIDEST}} {len(run.ids):>6}  ", style="dim")
        console.print(line.append(shown, style=_STYLES[run.kind] or "not dim"))
    console.print()
