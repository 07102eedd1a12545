"""AsyncTrainer: the options of a run, checked, and what is open during it. The run itself is a ``TrainingRun``."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from typing import Literal

from asyncrl.checkpoint.options import Checkpointing
from asyncrl.concurrency.endings import kept
from asyncrl.concurrency.iteration import Consumer, iterate
from asyncrl.errors import ConfigError, require_count
from asyncrl.events import Events
from asyncrl.learning.advantages import Advantage, GroupCentered
from asyncrl.learning.losses import Loss, Normalize, loss_from
from asyncrl.learning.optimizer import Adam
from asyncrl.rollout.border import checked_rows
from asyncrl.rollout.engine import RolloutEngine
from asyncrl.rollout.worker import refuse_in_worker
from asyncrl.scheduling.rules import BatchOrder, ForwardBackwardBatch, GroupCompletion, StalePolicy, Truncation
from asyncrl.training.evaluation import Evaluator
from asyncrl.training.plan import TrainingPlan, check_acknowledged, check_plan, check_versions
from asyncrl.training.run import TrainingRun
from asyncrl.training.saving import NothingSaved, RunSaver, Saver
from asyncrl.types import Row, Step

__all__ = ["AsyncTrainer"]


class AsyncTrainer:
    """Trains the engine's policy.

    ``groups_per_step`` groups of ``group_size`` trajectories make a batch; each batch with a gradient makes a version.
    ``max_staleness``: the largest age, in versions, of any trained token; 0 is synchronous training.
    ``loss``: a loss object of ``asyncrl.learning.losses``, or its name, such as "cispo".
    ``normalize``: what the sum over tokens is divided by: token, sequence, prompt, batch or sum.
    ``stale_policy``: ``wait`` keeps the bound by a barrier on the commit. ``mask_span`` trains without waiting and
    masks spans older than the bound (``allow_trajectory_loss=True``); ``keep`` has no bound
    (``allow_unbounded_staleness=True``).
    ``forward_backward_batch``: "auto" overlaps sampling and training in synchronous runs; a ``ForwardBackwardBatch``
    sets its chunk size; None turns it off.
    ``checkpointing``: keep the run's state on disk, and go on from what is there; None keeps nothing.
    ``events``: the stream that reports everything that happens.
    """

    def __init__(  # noqa: PLR0913  the options of a run; everything in here only composes them
        self,
        *,
        engine: RolloutEngine,
        groups_per_step: int,
        optimizer: Adam,
        group_size: int = 16,
        max_staleness: int = 2,
        advantage: Advantage | None = None,
        completion: GroupCompletion | None = None,
        loss: str | Loss = "cispo",
        normalize: Normalize = "token",
        stale_policy: StalePolicy = "wait",
        batch_order: BatchOrder = "completion",
        repeat_dataset: bool = True,
        truncation: Truncation | None = None,
        forward_backward_batch: ForwardBackwardBatch | Literal["auto"] | None = "auto",
        evaluator: Evaluator | None = None,
        allow_trajectory_loss: bool = False,
        allow_unbounded_staleness: bool = False,
        checkpointing: Checkpointing | None = None,
        events: Events | None = None,
    ) -> None:
        self.engine = engine
        self.evaluator = evaluator
        self.events = events or Events()
        self.checkpointing = checkpointing
        self._plan = TrainingPlan(
            optimizer=optimizer,
            advantage=advantage or GroupCentered(),
            completion=completion or GroupCompletion(),
            loss=loss_from(loss),
            normalize=normalize,
            groups_per_step=groups_per_step,
            group_size=group_size,
            max_staleness=max_staleness,
            stale_policy=stale_policy,
            sampling_policy=engine.sampling_policy,
            batch_order=batch_order,
            repeat_dataset=repeat_dataset,
            truncation=truncation or Truncation(),
            forward_backward_batch=forward_backward_batch,
        )
        check_plan(self._plan, engine)
        check_acknowledged(self._plan, trajectory_loss=allow_trajectory_loss, unbounded=allow_unbounded_staleness)

    def run(self, rows: Sequence[Row], *, steps: int) -> AsyncGenerator[Step, None]:
        """Train for ``steps`` batches and yield a ``Step`` after each.

        Rows are used in order, again from the start when they end (``repeat_dataset``). If rows are dropped because
        their groups fail, others take their place; finite data then ends with smaller or fewer batches. Leaving the
        loop stops the run: rollouts are cancelled and servers that the policy started are ended.

        With ``checkpointing`` a run that was stopped or killed goes on, and the first ``Step`` is the one after the
        last that was committed. ``steps`` counts from the run's beginning; it may be another number than before.
        """
        refuse_in_worker("AsyncTrainer.run")
        require_count("steps", steps, least=1)
        self._plan.optimizer.check_schedule(steps)
        rows = checked_rows(rows)
        batches = math.ceil(len(rows) / self._plan.groups_per_step)
        if not self._plan.repeat_dataset and steps > batches:
            raise ConfigError.for_value("steps", steps, f"at most {batches}: repeat_dataset=False and {len(rows)} rows")

        async def produce(consumer: Consumer[Step]) -> None:
            saver: Saver = NothingSaved()
            if self.checkpointing is not None:
                saver = RunSaver(self.checkpointing, self._plan, self.engine, rows, steps, self.events)
            async with (
                kept(saver.opened()),
                kept(self.engine.opened(self.events, versions_in=saver.versions_in)) as session,
            ):
                # How many servers there are may be seen only now; nothing is live on them yet.
                check_versions(self._plan, kept=session.policy.publisher.pins_versions, settings=self.engine.settings)
                await session.publish(await saver.restore(session.policy))
                training = TrainingRun(self._plan, session, self.engine, rows, steps, self.evaluator, saver)
                await training.run(consumer)

        return iterate(produce)
