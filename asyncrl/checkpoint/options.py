"""What users say about checkpoints."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from asyncrl.errors import ConfigError, require_count

__all__ = ["Checkpointing", "StopSignal"]

StopSignal: TypeAlias = Literal["SIGINT", "SIGTERM"]


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Keep the state of a run in the folder ``run_dir``, so that it can be stopped or killed and goes on.

    A run whose folder has state resumes it. Every optimizer step is on disk before its version is published or its
    ``Step`` is yielded: a kill loses no committed step and repeats none. What was being sampled goes on from the last
    save, and what began after it is sampled again with the same seeds. One process uses the folder at a time.

    Example::

        trainer = rl.AsyncTrainer(engine=engine, .., checkpointing=rl.Checkpointing("runs/first"))
    """

    run_dir: Path | str
    weights_every: int = 20
    """Optimizer steps between two saves of weights and optimizer. Resuming repeats the updates since the last one."""
    rollout_every: float = 60.0
    """Seconds between two saves of what is being sampled."""
    on_signal: tuple[StopSignal, ...] = ()
    """Signals that stop a run in order: the loop over its steps ends, the state is saved. A second one exits the
    process at once. The ``asyncrl`` command handles signals by itself."""

    def __post_init__(self) -> None:
        require_count("checkpoint.weights_every", self.weights_every, least=1)
        if not 0 < self.rollout_every < math.inf:
            raise ConfigError.for_value("checkpoint.rollout_every", self.rollout_every, "more than 0 seconds")
        for name in self.on_signal:
            if name not in get_args(StopSignal):
                raise ConfigError.for_value("checkpointing.on_signal", name, f"one of {get_args(StopSignal)}")

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.run_dir)

    @property
    def signals(self) -> tuple[signal.Signals, ...]:
        """``on_signal`` as the system's numbers."""
        return tuple(signal.Signals[name] for name in self.on_signal)
