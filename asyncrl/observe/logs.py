"""Log lines: what a person wants to read while a run goes on, as event names with keys.

``open_log`` makes a structlog logger without touching structlog's global set-up, so that a program which imports
asyncrl keeps its own. ``LogLines`` turns lifecycle events into lines. Values of the secrets that it is given never
reach the stream, wherever in a line they stand. Failures of one kind are one line, and later a count (``repeats.py``).
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from asyncrl.events import (
    BarrierOpened,
    EvaluationFinished,
    Event,
    Notice,
    StepFinished,
    Underway,
    VersionPublished,
)
from asyncrl.observe.hints import HINTS
from asyncrl.observe.repeats import Repeats

__all__ = ["LogLines", "LogStyle", "open_log"]

LogStyle = Literal["console", "json"]

_STEP_KEYS = {
    "reward": "reward/mean",
    "age": "staleness/span_age_max",
    "seconds": "sampling/interval_seconds",
}
_MORE_STEP_KEYS = {
    "loss": "loss/loss",
    "wait_seconds": "staleness/wait_seconds",
    "tokens_per_second": "sampling/generated_tokens_per_second",
}
# Behind what is said of the whole run.
_LATELY = 16
# Steps that the time left is worked out from.
_PATIENCE_S = 5.0
# Between two lines about the same that is under way.


def open_log(
    stream: TextIO, *, style: LogStyle = "console", debug: bool = False, secrets: Sequence[str] = ()
) -> FilteringBoundLogger:
    """A logger that writes lines to ``stream``: for people (``console``) or one JSON object each (``json``)."""
    if style == "json":
        output: list[Any] = [structlog.processors.TimeStamper(fmt="iso"), structlog.processors.JSONRenderer()]
    else:
        clock = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        output = [clock, structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=20, sort_keys=False)]
    logger: FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(stream),
        processors=[structlog.processors.add_log_level, _Redaction(secrets), *output],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if debug else logging.INFO),
    )
    return logger


class LogLines:
    """Writes the events that a person follows to ``logger``; subscribe ``observe``.

    ``steps`` of the whole run; 0: nobody knows, or there are none.
    """

    def __init__(self, logger: FilteringBoundLogger, *, steps: int = 0) -> None:
        self._logger = logger
        self._repeats = Repeats(lambda name, keys: logger.warning(name, **keys))
        self._steps = steps
        self._step_seconds: deque[float] = deque(maxlen=_LATELY)
        self._hinted: set[str] = set()
        # Notices whose hint was shown.
        self._several = False
        # Batches make more than one version.
        self._underway = Underway(time=0.0, what="")
        # The last one that has a line.

    def end(self) -> None:
        """Write what has not been told: how many failures were like earlier ones."""
        self._repeats.end()

    def observe(self, event: Event) -> None:
        """Write a line for ``event``, if it deserves one."""
        self._repeats.observe(event)
        match event:
            case StepFinished():
                self._logger.info("step_finished", **self._step(event))
            case Underway():
                self._say_what_is_under_way(event)
            case VersionPublished():
                self._logger.debug(
                    "version_published",
                    version=event.version,
                    seconds=_short(event.seconds),
                    probe_error=_short(event.probe_error),
                )
            case EvaluationFinished():
                metrics = {key: _short(value) for key, value in event.metrics.items()}
                self._logger.info("evaluation_finished", version=event.version, **metrics)
            case BarrierOpened():
                wait = dataclasses.asdict(event.wait) | {"seconds": _short(event.wait.seconds)}
                self._logger.debug("barrier_opened", **wait)
            case Notice():
                self._logger.log(logging.getLevelNamesMapping()[event.level.upper()], event.name, **self._notice(event))

    def _step(self, event: StepFinished) -> dict[str, object]:
        """The step's keys, in the order in which a person reads them."""
        if "sampling/interval_seconds" in event.metrics:
            self._step_seconds.append(event.metrics["sampling/interval_seconds"])
        keys: dict[str, object] = {"step": f"{event.n}/{self._steps}" if self._steps else event.n}
        keys |= _chosen(_STEP_KEYS, event.metrics)
        if self._steps > event.n and self._step_seconds:
            keys["left"] = _duration((self._steps - event.n) * statistics.fmean(self._step_seconds))
        keys["version"] = event.model_step
        self._several = self._several or event.metrics.get("train/updated", 0.0) > 1
        if event.n != event.model_step and not self._several:
            # Steps count batches, versions count updates: these batches had nothing to learn from.
            keys["steps_without_gradient"] = event.n - event.model_step
        return keys | _chosen(_MORE_STEP_KEYS, event.metrics)

    def _notice(self, event: Notice) -> Mapping[str, object]:
        if event.name not in HINTS or event.name in self._hinted:
            return event.keys
        self._hinted.add(event.name)
        return {**event.keys, "hint": HINTS[event.name]}

    def _say_what_is_under_way(self, event: Underway) -> None:
        last = self._underway
        if event.what == last.what and event.time < last.time + _PATIENCE_S and event.done < event.total:
            return
        self._underway = event
        done = {"done": f"{event.done}/{event.total}"} if event.total else {}
        self._logger.info("under_way", what=event.what, **done)


def _chosen(keys: Mapping[str, str], metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: _short(metrics[key]) for name, key in keys.items() if key in metrics}


def _short(value: float) -> float:
    """Four significant digits, and no point behind a whole number: the files have them all."""
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() else short


def _duration(seconds: float) -> str:
    """In the two largest units: 3m20s."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{left:02}s" if minutes else f"{left}s"


class _Redaction:
    """A structlog processor that hides known secret values in every text of a line."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = [secret for secret in secrets if secret]

    def __call__(self, logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
        if not self._secrets:
            return event
        return {key: self._hide(value) for key, value in event.items()}

    def _hide(self, value: object) -> object:
        text = str(value)
        if not any(secret in text for secret in self._secrets):
            return value
        for secret in self._secrets:
            text = text.replace(secret, "[secret]")
        return text
