"""The reference as pages: plain text for a terminal, and the Markdown of ``envs/REFERENCE.md``: never edited."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from asyncrl.errors import ConfigError
from asyncrl.observe.hints import HINTS
from asyncrl.observe.metricnames import EVALUATION_METRICS, STEP_METRICS, MetricReference, described
from asyncrl.recipe.reference import SectionReference, chosen, sections

__all__ = ["RENEW", "key_page", "markdown", "metric_page"]

RENEW = "asyncrl recipe --markdown > envs/REFERENCE.md"
"""The command that writes the file anew."""
_INDENT = "    "
_METRICS: Mapping[str, Mapping[str, MetricReference]] = {
    "Metrics of a step": STEP_METRICS,
    "Metrics of an evaluation": EVALUATION_METRICS,
}


def key_page(part: str, *, width: int) -> str:
    """What the reference has of a section or a key, or of everything for ``""``. ``ConfigError`` if it has nothing."""
    return "\n\n".join(_text_of(section, width) for section in chosen(part))


def _text_of(section: SectionReference, width: int) -> str:
    lines = textwrap.wrap(f"[{section.name}]  {section.text}", width, subsequent_indent=_INDENT)
    for key in section.keys:
        lines.append(f"  {key.name.removeprefix(f'{section.name}.')} = {key.default}    ({key.kind})")
        lines += textwrap.wrap(key.text, width, initial_indent=_INDENT * 2, subsequent_indent=_INDENT * 2)
    return "\n".join(lines)


def metric_page(part: str, *, width: int) -> str:
    """The metrics whose name begins with ``part``, or the one that it is. ``ConfigError`` if there is none."""
    parts = []
    for title, table in _METRICS.items():
        names = [name for name in table if name.startswith(part)] or [name for name in [described(table, part)] if name]
        if names:
            parts.append("\n".join([f"{title}", *_metric_lines({name: table[name] for name in names}, width)]))
    if not parts:
        raise ConfigError.for_unknown_key(part, [*STEP_METRICS, *EVALUATION_METRICS], where="metrics")
    return "\n\n".join(parts)


def _metric_lines(table: Mapping[str, MetricReference], width: int) -> Iterator[str]:
    for name, metric in table.items():
        yield f"  {name}    ({metric.unit})"
        yield from textwrap.wrap(metric.text, width, initial_indent=_INDENT * 2, subsequent_indent=_INDENT * 2)


def markdown() -> str:
    """The whole of ``envs/REFERENCE.md``."""
    lines = [
        "# Reference",
        "",
        f"Written by `{RENEW}`; a test fails when it is not as new as the code.",
        "",
        "- [Keys of a recipe](#keys-of-a-recipe), also by `asyncrl recipe [SECTION | KEY]`",
        *(f"- [{title}](#{title.lower().replace(' ', '-')}), also by `asyncrl recipe --metrics`" for title in _METRICS),
        "- [Notices](#notices)",
        "",
        "## Keys of a recipe",
        "",
        'A key that is "not set" is None in Python, and so is one that is left out; "required" has no default.',
    ]
    for section in sections():
        lines += ["", f"### [{section.name}]", "", *([section.text, ""] if section.text else [])]
        rows = [(f"`{key.name}`", key.kind, f"`{key.default}`", key.text) for key in section.keys]
        lines += _rows(("key", "type", "default", ""), rows)
    for title, table in _METRICS.items():
        lines += ["", f"## {title}", ""]
        lines += _rows(("key", "unit", ""), [(f"`{name}`", metric.unit, metric.text) for name, metric in table.items()])
    lines += [
        "",
        "## Notices",
        "",
        "What a run says beside its steps; `events.jsonl` and the log have the keys of each.",
    ]
    lines += [
        "",
        *_rows(("name", "what it means, and what to do"), [(f"`{name}`", hint) for name, hint in HINTS.items()]),
    ]
    return "\n".join(lines) + "\n"


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in cells]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")
