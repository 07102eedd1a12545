"""The picture of a simulation: how fast and how old each point trains, and where the trainer's time goes.

Drawn without a display; the fonts are matplotlib's own. Points are numbered alike on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from asyncrl.simulation.report import rate
from asyncrl.simulation.simulate import Outcome

__all__ = ["draw_picture"]

_INK, _FAINT, _OWN = "#24292f", "#8c959f", "#0072b2"
_PHASES = (
    ("training", "#0072b2", "white"),
    ("waiting for samples", "#f0b84b", _INK),
    ("barrier", "#d1495b", "white"),
    ("publication", "#c3cad1", _INK),
)
_COLUMNS = ((-0.53, "max_\nstaleness"), (-0.37, "admit_\nahead"), (-0.22, "concur-\nrency"), (-0.085, "over-\nsample"))
# Left of the bars, in widths of their axes.
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.hashsalt": "asyncrl",
}


def draw_picture(outcomes: Sequence[Outcome], path: Path, *, name: str, measured: float | None = None) -> None:
    """Write ``path`` (svg or png) about the recipe ``name``, whose own point is the first.

    ``measured`` are the steps per hour of the recorded run.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        height = max(4.4, 1.9 + 0.36 * len(outcomes))
        figure = Figure(figsize=(12.0, height), dpi=160, facecolor="white")
        trade_off = figure.add_axes((0.06, 0.13, 0.35, 0.70))
        split = figure.add_axes((0.66, 0.13, 0.27, 0.70))
        figure.text(0.012, 0.95, f"{name}: what other schedules would do", fontsize=13, fontweight="bold", va="center")
        _draw_trade_off(trade_off, outcomes, measured)
        _draw_split(split, outcomes)
        # Without a date the same simulation is the same file.
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_trade_off(axes: Any, outcomes: Sequence[Outcome], measured: float | None) -> None:
    axes.set_title("dot: mean age    line: to the 99th percentile", loc="left", color=_FAINT, fontsize=8.5)
    axes.set_xlabel("age of trained tokens, in policy versions")
    axes.set_ylabel("steps per hour")
    for number, outcome in reversed(list(enumerate(outcomes, start=1))):
        color, rate = _OWN if number == 1 else _INK, outcome.steps_per_hour
        axes.plot([outcome.age_mean, outcome.age_p99], [rate, rate], color=color, lw=1.2, alpha=0.35, zorder=2)
        axes.plot(outcome.age_p99, rate, "|", color=color, ms=7, alpha=0.6, zorder=2)
        axes.plot(
            outcome.age_mean, rate, "o", color=color, ms=9 if number == 1 else 6.5, mec="white", mew=0.8, zorder=3
        )
    if measured is not None:
        own = outcomes[0].age_mean
        axes.plot(own, measured, "D", color="white", ms=6, mec=_OWN, mew=1.4, zorder=4, label="measured in the run")
        axes.legend(loc="lower right", frameon=False, handletextpad=0.2)
    rates = [outcome.steps_per_hour for outcome in outcomes]
    oldest = max(1, *(outcome.age_p99 for outcome in outcomes))
    axes.set_ylim(0, 1.12 * max(rates if measured is None else [*rates, measured]))
    axes.set_xlim(-0.1 * oldest, 1.06 * oldest)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color=_FAINT, alpha=0.25, lw=0.6)
    _label_points(axes, outcomes, measured)


def _label_points(axes: Any, outcomes: Sequence[Outcome], measured: float | None) -> None:
    """A number beside each dot, where the fewest other things are."""
    places = [(outcome.age_mean, outcome.steps_per_hour) for outcome in outcomes]
    dots = _in_points(axes, places)
    taken = [] if measured is None else _in_points(axes, [(outcomes[0].age_mean, measured)])
    for number, (place, (x, y)) in enumerate(zip(places, dots, strict=True), start=1):
        others = [*dots[: number - 1], *dots[number:], *taken]
        right, up = min(_offsets(), key=lambda offset: _crowding((x + offset[0], y + offset[1]), others))
        taken.append((x + right, y + up))
        axes.annotate(
            str(number),
            place,
            xytext=(right, up),
            textcoords="offset points",
            ha="center",
            va="center",
            fontweight="bold",
            color=_OWN if number == 1 else _INK,
        )


def _in_points(axes: Any, places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    scale = 72 / axes.figure.dpi
    return [(x * scale, y * scale) for x, y in axes.transData.transform(places)]


def _offsets() -> Iterator[tuple[float, float]]:
    """Places for a label, in points from its dot; the first of those that are equally free is taken."""
    directions = ((-1.0, 0.0), (0.0, 1.0), (0.0, -1.0), (-0.8, 0.8), (-0.8, -0.8), (0.8, 0.8), (0.8, -0.8))
    for radius, (right, up) in product((11.0, 16.0, 22.0), directions):
        yield radius * right, radius * up


def _crowding(spot: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """How much is within the size of a label around ``spot``."""
    distances = (max(abs(spot[0] - x), abs(spot[1] - y)) for x, y in others)
    return sum(max(0.0, 11.0 - distance) for distance in distances)


def _draw_split(axes: Any, outcomes: Sequence[Outcome]) -> None:
    left = [0.0] * len(outcomes)
    for phase, (name, color, ink) in enumerate(_PHASES):
        widths = [outcome.parts[phase] for outcome in outcomes]
        axes.barh(
            range(len(outcomes)), widths, left=left, color=color, height=0.7, label=name, edgecolor="white", lw=0.6
        )
        for row, width in enumerate(widths):
            if width >= 0.08:
                axes.text(left[row] + width / 2, row, f"{width:.0%}", ha="center", va="center", color=ink, fontsize=7.5)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlim(0, 1)
    axes.set_ylim(len(outcomes) - 0.5, -0.5)
    axes.set_axis_off()
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.4, -0.01), ncols=4, frameon=False, handlelength=1.0, columnspacing=1.4
    )
    _write_rows(axes, outcomes)


def _write_rows(axes: Any, outcomes: Sequence[Outcome]) -> None:
    """The point at the left of each bar, its rate at the right."""
    place = axes.get_yaxis_transform()
    for x, heading in (*_COLUMNS, (1.09, "steps/h")):
        axes.text(x, -0.65, heading, transform=place, ha="center", va="bottom", color=_FAINT, fontsize=8)
    axes.text(0, -0.65, "where the trainer's time goes", transform=place, va="bottom", color=_FAINT, fontsize=8.5)
    for row, outcome in enumerate(outcomes):
        style: dict[str, Any] = {"transform": place, "ha": "center", "va": "center"}
        if row == 0:
            style |= {"color": _OWN, "fontweight": "bold"}
        axes.text(-0.66, row, "recipe 1" if row == 0 else row + 1, **{**style, "ha": "right", "fontweight": "bold"})
        for (x, _), text in zip(_COLUMNS, outcome.point.texts().values(), strict=True):
            axes.text(x, row, text, **style)
        axes.text(1.15, row, rate(outcome.steps_per_hour), **{**style, "ha": "right"})
