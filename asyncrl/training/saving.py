"""Saving a run: the owner of a run directory while its run goes on, and one that keeps nothing.

What is written when, and how it is put together again, is here; what the files look like is in the modules beside this
one. File work is done in threads of its own and never on the event loop: one for steps, so that a commit does not wait
for a snapshot, and one for everything else.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup

from asyncrl.checkpoint.directory import RunDirectory
from asyncrl.checkpoint.fingerprint import described, rows_digest
from asyncrl.checkpoint.options import Checkpointing
from asyncrl.checkpoint.state import JournalEntry, RunState
from asyncrl.concurrency.endings import FirstErrorStack, LazyCoroutine, keeping_first_error, note, noting_on
from asyncrl.concurrency.signals import cancelled_by
from asyncrl.errors import CheckpointError, ConfigError, LearnerError
from asyncrl.events import Event, MemberResumed, Notice, Underway
from asyncrl.files import locked
from asyncrl.learning.base import Learner, distinct_sequences
from asyncrl.learning.losses import Loss
from asyncrl.observe.sinks import last_logged_step
from asyncrl.publishing.policy import OpenPolicy
from asyncrl.training.options import TrainingOptions
from asyncrl.training.resume import ReplayCost, find_versions
from asyncrl.types import Row

__all__ = ["NothingSaved", "RunSaver", "Saver"]

T = TypeVar("T")
_COUNTED = (
    "recovery/steps_replayed",
    "recovery/groups_begun_anew",
    "recovery/trajectories_recovered",
    "recovery/trajectories_dropped_on_resume",
)
# What was done again because the run was resumed; the keys are always the same.
_GRACE_S = 30.0
# The longest that a save at the end of a run may take. What it would have saved is then as old as the save before it.


class RunSaver:
    """Owns ``options.directory``. Enter ``opened`` first; then ``state`` is where the run goes on."""

    resumable = True
    """Environments are asked for what they need to be brought back."""

    def __init__(
        self,
        options: Checkpointing,
        training: TrainingOptions,
        rows: Sequence[Row],
        steps: int,
    ) -> None:
        self.versions_in: Path | None = options.directory / "adapters"
        """For published versions: those that trajectories keep have to be there when the run is resumed."""
        self._counts = dict.fromkeys(_COUNTED, 0.0)
        self._options = options
        self._training = training
        self._rows = rows
        self._steps = steps
        self._events = training.events
        self._files = RunDirectory(options.directory)
        self._step_thread = anyio.CapacityLimiter(1)
        self._thread = anyio.CapacityLimiter(1)
        self._saved = (0, 0)
        # Step and version of the newest saved weights.
        self._cost = ReplayCost()

    @property
    def state(self) -> RunState:
        """As it was found; empty for a new run."""
        return self._files.state

    @property
    def evaluated(self) -> int:
        """The newest step after which the policy was measured; -1 if it never was."""
        return self._files.evaluated

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None, None]:
        """Lock the directory and read what is in it; signals cancel the block.

        ``ConfigError`` if the state in the directory is of another run, if another process uses it, or in a thread that
        no signal reaches; ``CheckpointError`` if something that is needed is missing or damaged.
        """
        signals = self._options.signals
        if signals and threading.current_thread() is not threading.main_thread():
            allowed = "() outside of the main thread, which is the only one that gets signals: run there, or stop by"
            raise ConfigError.for_value("checkpointing.on_signal", self._options.on_signal, f"{allowed} cancelling")
        async with (
            keeping_first_error(cancelled_by(signals, on_first=self._say_that_it_stops)),
            FirstErrorStack() as stack,
        ):
            lock = locked(self._files.path, "checkpointing.run_dir")
            await self._off_loop(lock.__enter__)
            stack.callback(lock.__exit__, None, None, None)
            await self._off_loop(self._read)
            stack.callback(self._files.close)
            stack.callback(self._events.subscribe(self._count_member, kinds=(MemberResumed,)))
            stack.callback(self._events.subscribe(self._cost.observe, kinds=ReplayCost.KINDS))
            yield

    async def restore(self, policy: OpenPolicy) -> int:
        """Bring a policy that has just been opened to where ``state`` is; returns the version to publish first."""
        training, steps, steps_before = self._training, self._steps, self._files.steps_before
        version = await self._restore_learner(policy.learner, training.loss_object)
        for name, error in self._files.damaged.items():
            self._notice(name, {"reason": str(error)})
        if steps_before is None:
            return version
        self.state.require_versions()
        self.state.renew_unsampled()
        if training.stale_rule.bounded:
            for late in self.state.begin_late_anew(groups_per_step=training.groups_per_step, updates=training.updates):
                self._counts["recovery/groups_begun_anew"] += 1
                self._notice("group_begun_anew", late)
        pins = training.engine.sampling_policy == "trajectory"
        await find_versions(self.state, policy.publisher, pins=pins, events=self._events)
        self.state.renew_unsampled()  # of versions that nobody can load again
        resumed: dict[str, object] = {
            "directory": str(self._files.path),
            "step": self.state.n,
            "version": version,
            "groups": len(self.state.groups),
            "replayed": int(self._counts["recovery/steps_replayed"]),
        }
        self._notice("resumed", resumed, level="info")
        if training.optimizer.schedule is not None and steps != steps_before and self.state.n < steps:
            before, now = (training.optimizer.settings(self.state.n, most).lr for most in (steps_before, steps))
            changed = {"steps": steps, "steps_before": steps_before, "lr": now, "lr_before": before}
            self._notice("schedule_stretched", changed)
        return version

    async def _restore_learner(self, learner: Learner, loss: Loss) -> int:
        """Bring a learner that has just been opened to the committed parameters; returns their version."""
        journal, weights, run = self._files.journal, self._files.weights, self._files.run
        newest = await self._off_loop(lambda: weights.newest(self.state.n, journal.steps(), run))
        if newest is not None:
            n, version, folder = newest
            if n > self.state.n:
                raise CheckpointError(
                    f"{folder} is of step {n}, but state and journal beside it end with step {self.state.n}; put back "
                    "a copy of what is missing, or use another folder"
                )
            self._say("loading the saved weights")
            await learner.load_state(folder)
            self._saved = (n, version)
        elif learner.lora_rank is not None:
            # A fresh adapter is random, and who knows whether another release draws the same. The model is on disk.
            if self.state.n > 0:
                raise CheckpointError(
                    f"{self._files.path / 'weights'} is empty: the adapter of step 0 is missing; put back a copy of "
                    "it, or begin the run anew in another folder"
                )
            await self._write_weights(learner, n=0, version=0)
        n, version = self._saved
        started = anyio.current_time()
        for step in range(n + 1, self.state.n + 1):
            self._say("replaying steps since the last saved weights", done=step - n, total=self.state.n - n)
            entry = await self._off_loop(partial(journal.read, step, run=run))
            if entry.version != version:
                path = journal.path(step)
                raise CheckpointError(f"{path} is a step of version {entry.version}, but the one before made {version}")
            await self._replay(entry, learner, loss)
            version = entry.version_after
        self._cost.replayed(anyio.current_time() - started)
        if version != self.state.version:
            raise CheckpointError(
                f"the parameters in {self._files.path} are of version {version}, but its state is of "
                f"{self.state.version}; put back a copy of what is missing, or use another folder"
            )
        return int(version)

    async def _replay(self, entry: JournalEntry, learner: Learner, loss: Loss) -> None:
        if len(entry.updates) > 1:
            await learner.prepare_step(distinct_sequences(entry.updates), loss)
        for number, update in enumerate(entry.updates):
            for chunk in update.chunks:
                if len(entry.updates) == 1:
                    await learner.prepare_step(chunk, loss)
                await learner.forward_backward(chunk, loss, updates=number)
            if update.settings is not None:
                await learner.optimizer_step(update.settings, divisor=update.divisor)
                self._counts["recovery/steps_replayed"] += 1
        await learner.end_step()

    @asynccontextmanager
    async def step(self, entry: JournalEntry) -> AsyncGenerator[None, None]:
        """The block makes the step happen. Its entry is written meanwhile, and when both are done, it is committed.

        Cancellation waits for all that. If the learner refuses the step, its batch is kept for inspection.
        """
        entry = replace(entry, run=self._files.run)
        with anyio.CancelScope(shield=True):
            failure: LearnerError | None = None
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(partial(self._off_loop, self._files.journal.draft, entry, for_step=True))
                    try:
                        yield
                    except LearnerError as error:
                        failure = error
            except Exception as error:
                if failure is None:
                    raise
                note(failure, error)
            if failure is not None:
                with noting_on(failure):
                    path = await self._off_loop(self._files.journal.refuse, entry.n, for_step=True)
                    failure.add_note(f"its batch is in {path}")
                raise failure
            await self._off_loop(self._files.commit, entry.n, for_step=True)

    async def save_weights(self, learner: Learner, *, n: int, version: int, at_once: bool = False) -> None:
        """Save the parameters, which are those after step ``n``, if that is due or wanted ``at_once``."""
        steps = version - self._saved[1]
        if steps >= self._options.weights_every or (steps > 0 and at_once):
            await self._write_weights(learner, n=n, version=version)

    def save_regularly(self, tasks: TaskGroup, capture: Callable[[], RunState]) -> None:
        """Save what is being sampled every now and then, in ``tasks``, until they are cancelled."""
        tasks.start_soon(LazyCoroutine, self._save_regularly, capture)

    async def save_at_end(self, capture: Callable[[], RunState], learner: Learner | None) -> None:
        """Save once more, however the run ends. It must not hide how: a save that fails is a notice.

        The parameters of ``learner``, which are the committed ones, are saved too if repeating the updates since the
        last save would take longer; None: they cannot be had any more.
        """
        ends = anyio.current_time() + _GRACE_S
        state = capture()
        await self._save_in_time("state_not_saved", partial(self._off_loop, self._save, state, abandon=True), ends)
        if learner is not None and self._cost.is_larger:
            write = partial(self.save_weights, learner, n=state.n, version=state.version, at_once=True)
            await self._save_in_time("weights_not_saved", write, ends)

    async def _save_in_time(self, notice: str, save: Callable[[], Awaitable[None]], ends: float) -> None:
        reason = f"it took longer than {_GRACE_S:g} s"
        try:
            with anyio.CancelScope(shield=True, deadline=ends):
                await save()
                return
        except (OSError, LearnerError) as error:
            reason = str(error)
        keys = {"directory": str(self._files.path), "reason": reason}
        self._notice(notice, keys, level="error" if notice == "state_not_saved" else "warning")

    def metrics(self) -> Mapping[str, float]:
        """What was done again because the run was resumed, since this process began."""
        return dict(self._counts)

    async def note_evaluated(self, n: int) -> None:
        """The policy after step ``n`` was measured, and need not be again."""
        await self._off_loop(self._files.note_evaluated, n)

    def _notice(self, name: str, keys: Mapping[str, object], *, level: str = "warning") -> None:
        self._events.emit(Notice(time=anyio.current_time(), name=name, level=level, keys=keys))

    def _say(self, what: str, *, done: int = 0, total: int = 0) -> None:
        self._events.emit(Underway(time=anyio.current_time(), what=what, done=done, total=total))

    def _say_that_it_stops(self, number: signal.Signals) -> None:
        self._notice("stopping", {"signal": number.name}, level="info")

    async def _write_weights(self, learner: Learner, *, n: int, version: int) -> None:
        weights, started = self._files.weights, anyio.current_time()
        await learner.save_state(await self._off_loop(weights.draft, version))
        await self._off_loop(partial(weights.commit, n=n, version=version, run=self._files.run))
        self._saved = (n, version)
        self._cost.written(anyio.current_time() - started)

    async def _save_regularly(self, capture: Callable[[], RunState]) -> None:
        while True:
            await anyio.sleep(self._options.rollout_every)
            await self._off_loop(self._save, capture())

    def _count_member(self, event: Event) -> None:
        if isinstance(event, MemberResumed):
            name = "trajectories_recovered" if event.recovered else "trajectories_dropped_on_resume"
            self._counts[f"recovery/{name}"] += 1

    def _row(self, group: int) -> Row:
        return self._rows[group % len(self._rows)]

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that was stopped. Takes time for many rows."""
        return described({**self._training.identity(), "rows": rows_digest(self._rows)})

    def _read(self) -> None:
        self._files.read(self._identity(), self._row, self._steps, last_logged_step(self._files.path))

    def _save(self, state: RunState) -> None:
        self._files.save(state, weights_step=self._saved[0])

    async def _off_loop(
        self, function: Callable[..., T], *arguments: Any, for_step: bool = False, abandon: bool = False
    ) -> T:
        """Call ``function`` in the thread for everything, or in the one ``for_step``; ``abandon`` it if cancelled."""
        if getattr(asyncio.get_running_loop(), "virtual", False):
            # Where time is virtual, a thread would take none, or all there is.
            await anyio.lowlevel.checkpoint()
            return function(*arguments)
        limiter = self._step_thread if for_step else self._thread
        return await anyio.to_thread.run_sync(function, *arguments, limiter=limiter, abandon_on_cancel=abandon)


class NothingSaved:
    """Stands for a ``RunSaver`` where nothing is kept: each run begins at its start, and saving does nothing."""

    resumable = False
    evaluated = -1
    versions_in: Path | None = None

    def __init__(self) -> None:
        self.state = RunState()

    def opened(self) -> AbstractAsyncContextManager[None]:
        """There is nothing to open."""
        return nullcontext()

    async def restore(self, policy: OpenPolicy) -> int:
        """The policy is as it was opened: version 0."""
        return 0

    def step(self, entry: JournalEntry) -> AbstractAsyncContextManager[None]:
        """The block makes the step happen."""
        return nullcontext()

    async def save_weights(self, learner: Learner, *, n: int, version: int, at_once: bool = False) -> None:
        """Does nothing."""

    def save_regularly(self, tasks: TaskGroup, capture: Callable[[], RunState]) -> None:
        """Does nothing."""

    async def save_at_end(self, capture: Callable[[], RunState], learner: Learner | None) -> None:
        """Does nothing."""

    async def note_evaluated(self, n: int) -> None:
        """Does nothing."""

    def metrics(self) -> Mapping[str, float]:
        """Zeros."""
        return dict.fromkeys(_COUNTED, 0.0)


Saver: TypeAlias = RunSaver | NothingSaved
"""What a run talks to about saving."""
