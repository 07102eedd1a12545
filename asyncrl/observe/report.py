"""One screen about a run: is it healthy, what is slow, what did it say, what to change.

Pure: from what was read of the run to lines of text.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from asyncrl.observe.advice import PHASES, RECENT, advice, mean, phase_shares, recent, trend
from asyncrl.observe.conversations import calls_of, merit, number, one_line, said
from asyncrl.observe.rollouts import RolloutFile
from asyncrl.observe.runfiles import Folded, RunFiles

__all__ = ["report", "sparkline"]

_BLOCKS = "▁▂▃▄▅▆▇█"
_LABEL = 22
_MOST_FAILURES, _MOST_NOTICES = 4, 3
_FOLDERS = re.compile(r"(?:/[^/\s:()]+)*/(?=[^/\s:()]+\.py:\d)")
# In front of a file and its line.

_LAST_MESSAGES = 3
# Of a conversation in the overview: a call, its result, and the answer.


def report(run: RunFiles, last: RolloutFile | None, *, now: float, width: int) -> list[Text]:
    """The lines. ``last``: what is kept of the newest step; ``now``: seconds since 1970."""
    sections = (
        list(_state(run, now)),
        list(_learning(run, width)),
        list(_seconds(run, width)),
        list(_failures(run, width)),
        list(_excerpts(last, width)),
        list(_changes(run, last)),
    )
    lines: list[Text] = []
    for section in filter(None, sections):
        lines += [*([Text()] if lines else []), *section]
    return lines


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of at most ``width`` characters; blank where nothing is known."""
    points = list(values)
    if len(points) > width:
        bounds = [round(place * len(points) / width) for place in range(width + 1)]
        points = [mean(points[start:stop]) for start, stop in itertools.pairwise(bounds)]
    finite = [point for point in points if math.isfinite(point)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high - low
    if not 0 < span < math.inf:
        return "".join(_BLOCKS[0] if math.isfinite(point) else " " for point in points)
    return "".join(_BLOCKS[min(7, int(8 * (point - low) / span))] if math.isfinite(point) else " " for point in points)


def _head(text: str) -> Text:
    return Text(text, style="bold")


def _row(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"  {label:<{_LABEL}}", "dim"), (text, style))


def _state(run: RunFiles, now: float) -> Iterator[Text]:
    said_now, style = _condition(run)
    yield Text.assemble(("Run ", "bold"), (f"{one_line(str(run.directory), 200)}: ", "bold"), (said_now, style))
    yield _row("what", ", ".join(_what(run)) or "unknown (run.json is missing or damaged)")
    written = "nothing was written yet" if run.written is None else f"last wrote {_ago(now - run.written)} ago"
    yield _row("when", f"started {one_line(str(run.about.get('started') or 'at an unknown time'), 40)}, {written}")
    if run.ended is not None and run.ended.get("error"):
        where = f" ({run.ended['where']})" if run.ended.get("where") else ""
        yield _row("error", one_line(f"{run.ended['error']}{where}", 300), "red")
    if run.unreadable:
        yield _row("damaged", f"{run.unreadable} lines of its files cannot be read, and are left out", "yellow")


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"


def _condition(run: RunFiles) -> tuple[str, str]:
    done = int(run.steps[-1]["n"]) if run.steps else 0
    of = "" if run.planned is None else f" of {run.planned}"
    if run.running:
        return f"running, {done}{of} steps done", "cyan"
    reason = run.ended.get("reason") if run.ended else None
    if reason == "failed":
        return f"failed after step {done}{of}", "bold red"
    if run.planned is not None and done >= run.planned:
        return f"finished, {done} steps", "green"
    how = "stopped" if reason else "not running (stopped, killed or failed)"
    return f"{how} after step {done}{of}; asyncrl train RECIPE --resume RUN goes on", "yellow"


def _what(run: RunFiles) -> Iterator[str]:
    names = (
        ("model", run.configured("model", "path") or run.configured("model", "source")),
        ("environment", run.configured("env", "factory") or run.plan("env")),
        ("loss", run.plan("loss")),
        ("recipe", run.recipe),
    )
    for label, value in names:
        if isinstance(value, str) and value:
            yield f"{label} {one_line(value, 60)}"


def _learning(run: RunFiles, width: int) -> Iterator[Text]:
    if not run.steps and not run.evaluations:
        yield _head("Learning")
        yield Text("  No step is done yet: the first one needs its samples.")
        return
    heldout = [evaluation.get("reward_mean", math.nan) for evaluation in run.evaluations]
    yield Text.assemble(("Learning ", "bold"), (f"({len(run.steps)} steps, {len(heldout)} evaluations)", "dim"))
    yield from _curve("reward", run.series("reward/mean"), width)
    yield from _curve("held-out reward", heldout, width)
    if not heldout:
        yield _row("held-out reward", "not measured (rows for it: data.heldout)")
    yield from _curve("loss", run.series("loss/loss"), width, judged=False)
    yield from _curve("tokens sampled per s", run.series("sampling/generated_tokens_per_second"), width, judged=False)
    if math.isfinite(silent := recent(run, "reward/zero_variance_group_frac")):
        yield _row("groups without signal", f"{silent:.0%} (equal rewards: nothing to learn)")
    yield from _ages(run)
    yield from _lengths(run)


def _curve(label: str, values: Sequence[float], width: int, *, judged: bool = True) -> Iterator[Text]:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return
    room = 40 if width >= 120 else 30 if width >= 95 else 18
    way = trend(values) if judged else ""
    style = {"rising": "green", "falling": "red"}.get(way, "")
    numbers = f"{number(float(finite[0]))} -> {number(float(finite[-1]))}"
    yield Text.assemble(
        (f"  {label:<{_LABEL}}", "dim"),
        (f"{sparkline(values, room):<{room}}", "cyan"),
        f"  {numbers:<20}",
        (way, style),
    )


def _ages(run: RunFiles) -> Iterator[Text]:
    values = [recent(run, f"staleness/span_age_{name}") for name in ("p50", "p99")]
    oldest = max((age for age in run.series("staleness/span_age_max") if math.isfinite(age)), default=math.nan)
    if any(map(math.isnan, [*values, oldest])):
        return
    bound = run.plan("max_staleness")
    allowed = f"; max_staleness is {bound}" if isinstance(bound, int) else ""
    text = f"p50 {values[0]:.1f}, p99 {values[1]:.1f}, oldest {oldest:.0f}{allowed}"
    yield _row("age in versions", text)


def _lengths(run: RunFiles) -> Iterator[Text]:
    median, longest = (recent(run, f"length/generated_{name}") for name in ("p50", "p99"))
    if math.isnan(median):
        return
    causes = sorted({key for step in run.steps[-RECENT:] for key in step if key.startswith("truncated/")})
    cut = [(recent(run, key), key.removeprefix("truncated/")) for key in causes]
    named = ", ".join(f"{cause} {share:.0%}" for share, cause in sorted(cut, reverse=True) if share > 0)
    yield _row(
        "tokens generated", f"p50 {median:.0f}, p99 {longest:.0f} a conversation; cut off by: {named or 'nothing'}"
    )


def _seconds(run: RunFiles, width: int) -> Iterator[Text]:
    shares = phase_shares(run)
    if not shares:
        return
    counted = min(RECENT, len(run.steps))
    total = recent(run, "train/batch_seconds")
    yield Text.assemble(
        ("Where a step's time goes ", "bold"), (f"(mean of the last {counted} steps: {number(total)} s)", "dim")
    )
    room = 40 if width >= 95 else 25
    for key, share in shares.items():
        blocks = "█" * round(room * min(1.0, max(0.0, share)))
        yield Text.assemble(
            (f"  {PHASES[key]:<{_LABEL}}", "dim"),
            (f"{blocks:<{room}}", "blue"),
            f" {share:4.0%} {share * total:8.3g} s",
        )
    for place, wait in enumerate(run.waits):
        text = f"{wait.seconds:.3g} s for group {wait.group}, member {wait.member}, which was busy with: {wait.doing}"
        yield _row("" if place else "longest waits", one_line(text, width - _LABEL - 2))


def _failures(run: RunFiles, width: int) -> Iterator[Text]:
    if not (run.failures or run.dropped or run.notices):
        if run.steps:
            yield Text.assemble(("Failures ", "bold"), ("none", "green"))
        return
    yield _head("Failures and warnings")
    yield from _folded(run.failures, _MOST_FAILURES, "red", width)
    if run.dropped:
        text = ", ".join(f"{reason} {count}" for reason, count in run.dropped.most_common())
        yield _row("groups dropped", one_line(text, width - _LABEL - 2), "yellow")
    yield from _folded(run.notices, _MOST_NOTICES, "yellow", width)


def _folded(entries: Sequence[Folded], most: int, style: str, width: int) -> Iterator[Text]:
    for entry in entries[:most]:
        where = f"  ({one_line(_without_folders(entry.where), width)})" if entry.where else ""
        text = one_line(_without_folders(entry.text), max(30, width - 10 - len(where)))
        yield Text.assemble((f"  {entry.count:>5} x ", "bold"), (text, style), where)
        if entry.todo:
            yield Text(f"{'':10}-> {one_line(entry.todo, 300)}", style="dim")
    if others := entries[most:]:
        yield Text(f"  {sum(entry.count for entry in others):>5} x others, of {len(others)} kinds", style="dim")


def _without_folders(text: str) -> str:
    """``text`` in which a line of code has the name of its file only."""
    return _FOLDERS.sub("", text)


def _excerpts(last: RolloutFile | None, width: int) -> Iterator[Text]:
    trajectories = last.trajectories if last else []
    rated = [traj for traj in trajectories if isinstance(traj.get("reward"), int | float)]
    if last is None or not rated:
        return
    hint = "(more: asyncrl show RUN --best, --worst, --step N)"
    yield Text.assemble((f"What it said in step {last.n} ", "bold"), (hint, "dim"))
    best, worst = (choose(rated, key=lambda traj: merit(traj["reward"])) for choose in (max, min))
    for name, traj in (("best", best), ("worst", worst))[: 1 if best is worst else 2]:
        yield Text.assemble((f"  {name}: ", "bold"), _place(traj))
        yield from _excerpt(traj, width)


def _place(traj: Mapping[str, Any]) -> str:
    turns = traj.get("turns")
    turned = f", {turns} turns" if isinstance(turns, int) and turns > 1 else ""
    return f"reward {number(traj['reward'])}, group {traj['group']}, member {traj['member']}{turned}"


def _excerpt(traj: Mapping[str, Any], width: int) -> Iterator[Text]:
    messages = traj["messages"]
    first = next((place for place, message in enumerate(messages) if message.get("role") == "user"), 0)
    for message in [*messages[first : first + 1], *messages[first + 1 :][-_LAST_MESSAGES:]]:
        text = " ".join([*filter(None, [said(message)]), *calls_of(message)])
        role = one_line(str(message.get("role")), 20)
        yield Text.assemble((f"    {role}: ", "dim"), one_line(text, width - len(role) - 6))


def _changes(run: RunFiles, last: RolloutFile | None) -> Iterator[Text]:
    found = advice(run, _best_answers(last))
    if not found:
        if run.steps:
            yield Text.assemble(("What to change ", "bold"), "nothing stands out")
        return
    yield _head("What to change")
    for sentence in found:
        yield Text(f"  - {sentence}")


def _best_answers(last: RolloutFile | None) -> list[str]:
    """The last words of the best member of each group, where rows differ."""
    answers: dict[str, str] = {}
    for traj in last.trajectories if last else ():
        if traj.get("best"):
            words = [said(message) for message in traj["messages"] if message.get("role") == "assistant"]
            answers[repr(traj.get("row"))] = words[-1] if words else ""
    return list(answers.values())
