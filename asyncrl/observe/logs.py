"""Log lines: what a person wants to read while a run goes on, as event names with keys.

``open_log`` makes a structlog logger without touching structlog's global set-up, so that a program which imports
asyncrl keeps its own. ``LogLines`` turns lifecycle events into lines. Values of the secrets that it is given never
reach the stream, wherever in a line they stand. Failures of one kind are one line, and later a count (``repeats.py``).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

from asyncrl.events import (
    BarrierOpened,
    EvaluationFinished,
    Event,
    Notice,
    StepFinished,
    VersionPublished,
)
from asyncrl.observe.repeats import Repeats

__all__ = ["LogLines", "LogStyle", "open_log"]

LogStyle = Literal["console", "json"]

_STEP_KEYS = {
    "reward": "reward/mean",
    "loss": "loss/loss",
    "max_age": "staleness/span_age_max",
    "wait_seconds": "staleness/wait_seconds",
    "tokens_per_second": "sampling/generated_tokens_per_second",
    "seconds": "sampling/interval_seconds",
}


def open_log(
    stream: TextIO, *, style: LogStyle = "console", debug: bool = False, secrets: Sequence[str] = ()
) -> FilteringBoundLogger:
    """A logger that writes lines to ``stream``: for people (``console``) or one JSON object each (``json``)."""
    if style == "json":
        output: list[Any] = [structlog.processors.TimeStamper(fmt="iso"), structlog.processors.JSONRenderer()]
    else:
        clock = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        output = [clock, structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=20)]
    logger: FilteringBoundLogger = structlog.wrap_logger(
        structlog.PrintLogger(stream),
        processors=[structlog.processors.add_log_level, _Redaction(secrets), *output],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if debug else logging.INFO),
    )
    return logger


class LogLines:
    """Writes the events that a person follows to ``logger``; subscribe ``observe``."""

    def __init__(self, logger: FilteringBoundLogger) -> None:
        self._logger = logger
        self._repeats = Repeats(lambda name, keys: logger.warning(name, **keys))

    def end(self) -> None:
        """Write what has not been told: how many failures were like earlier ones."""
        self._repeats.end()

    def observe(self, event: Event) -> None:
        """Write a line for ``event``, if it deserves one."""
        self._repeats.observe(event)
        match event:
            case StepFinished():
                self._logger.info("step_finished", n=event.n, model_step=event.model_step, **_step_keys(event))
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
                self._logger.log(logging.getLevelNamesMapping()[event.level.upper()], event.name, **event.keys)


def _step_keys(event: StepFinished) -> dict[str, float]:
    return {name: _short(event.metrics[key]) for name, key in _STEP_KEYS.items() if key in event.metrics}


def _short(value: float) -> float:
    """Four significant digits: the files have them all."""
    return float(f"{value:.4g}")


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
