"""AsyncTrainer: sample, wait for the barrier, train, commit, publish, again.

Four loops run beside each other in one task group; their only shared state is the owners in ``scheduling``::

    loop        consumes              produces            waits for                       unblocked by
    admission   rows                  groups (tasks)      a slot                          publication, a dropped group
    group       a reservation         a finished group    its members                     sampler and environment
    trainer     a batch of groups     a version           enough groups, and the barrier  a finished group
    publisher   a staged version      a published one     the servers                     their acknowledgement

The trainer's steps are in lock-step with the caller's loop: the next one starts when the caller asks for it. Sampling
does not wait for the caller. ``max_staleness=0`` needs no mode: its slots admit the current batch only.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from asyncrl.concurrency.endings import LazyCoroutine, keeping_first_error
from asyncrl.concurrency.iteration import Consumer, iterate
from asyncrl.errors import ConfigError, require_count
from asyncrl.events import GroupAdmitted, Underway
from asyncrl.rollout.border import checked_rows
from asyncrl.rollout.worker import refuse_in_worker
from asyncrl.training.options import TrainingOptions
from asyncrl.training.run import TrainingRun
from asyncrl.training.saving import NothingSaved, RunSaver, Saver
from asyncrl.training.step import TrainerStep
from asyncrl.types import Row, Step

__all__ = ["AsyncTrainer"]


async def _loops(run: TrainingRun, consumer: Consumer[Step]) -> None:
    # As many batches may wait for the publication of their version as the bound allows the trainer to be ahead.
    staged, versions = anyio.create_memory_object_stream[int](max(1, run.options.batches_ahead))
    with staged, versions:
        async with run.opened() as tasks:
            tasks.start_soon(LazyCoroutine, _publish, run, versions)
            tasks.start_soon(LazyCoroutine, _admit, run)
            await _train(run, consumer, staged)


async def _admit(run: TrainingRun) -> None:
    """Start a group whenever a slot is free. The end of the run ends it: a group that fails may have to be replaced."""
    async with anyio.create_task_group() as groups:
        for group in run.record.unfinished:  # an earlier process had admitted it
            groups.start_soon(LazyCoroutine, run.roll_out, group)
            await anyio.lowlevel.checkpoint()
        while True:
            group = await run.admission.admit()
            run.events.emit(GroupAdmitted(time=anyio.current_time(), group=group))
            groups.start_soon(LazyCoroutine, run.roll_out, group)
            # One group in a turn of the loop: a publication frees slots for hundreds, and their members starting
            # all at once would keep every tool and sample waiting.
            await anyio.lowlevel.checkpoint()


async def _train(run: TrainingRun, consumer: Consumer[Step], staged: MemoryObjectSendStream[int]) -> None:
    """Take step after step, each when the caller asks for it, until the last one or until no rows are left."""
    n = run.record.n
    await run.evaluate(n)
    while n < run.steps:
        await consumer.wanted()
        async with TrainerStep(run, n + 1) as step:
            while step.wants_groups:
                groups = await step.take()  # waits for finished groups, and for the barrier
                await step.forward_backward(groups)
            if not step.groups:
                break  # the rows that were left failed
            version = await step.commit()
            if version is not None:
                await run.session.stage(version)
                await staged.send(version)
                step.times.end("publication")
                await run.save_weights()
                step.times.end("optimizer")  # and what keeps its result
            evaluation_s = await run.evaluate(step.n)
        n = step.n
        await consumer.give(step.finish(evaluation_s))
        run.require_sense()
    await run.end(n)


async def _publish(run: TrainingRun, versions: MemoryObjectReceiveStream[int]) -> None:
    """Publish what the trainer has staged, in order, while it goes on."""
    with run.first_error.watched():
        async for version in versions:
            await run.session.publish(version)


class AsyncTrainer(TrainingOptions):
    """Trains the engine's policy. Raises ``ConfigError`` for what cannot run, with what to change.

    ``engine``: what samples: the policy, its environment and their budget.
    ``groups_per_step``: groups of a batch, which is what one step trains; each update with a gradient makes a version.
    ``minibatches``: parts that a batch is divided into, whole groups each; every part is an update (an optimizer step)
    and makes a version. Only the last version of a batch is published.
    ``epochs``: how often a batch is trained, each time in ``minibatches`` updates. The bound on staleness holds at each
    of them, so ``max_staleness`` has to be at least ``minibatches * epochs - 1``.
    ``group_size``: trajectories of a group, all of the same row; their rewards are compared with each other.
    ``optimizer``: the learner's, with its learning rate.
    ``max_staleness``: the largest age, in versions, of any trained token; 0 is synchronous training.
    ``advantage``: from the rewards of groups to one number for each trajectory.
    ``completion``: when a group is complete: with all of its members, or at a deadline for the slowest.
    ``loss``: a loss object of ``asyncrl.learning.losses``, or its name, such as "cispo".
    ``correction``: masks or weighs tokens and sequences that another policy sampled, beside any loss.
    ``kl``: a penalty on the distance to the model that training began from.
    ``normalize``: what the sum of the loss over tokens is divided by: "token" by all trained tokens, so that each token
    counts the same; "sequence" or "prompt" make each trajectory or each group count the same; "batch" divides by the
    trajectories, "sum" by nothing.
    ``stale_policy``: ``wait`` keeps the bound by a barrier on the commit. ``mask_span`` trains without waiting and
    masks spans older than the bound (``allow_trajectory_loss=True``); ``keep`` has no bound
    (``allow_unbounded_staleness=True``).
    ``batch_order``: ``completion`` trains the ready groups that are due first, ``admission`` all in the order of rows.
    ``repeat_dataset``: rows are used again from the start when they end.
    ``truncation``: what is trained of trajectories that a budget or a deadline has ended.
    ``overlong``: a penalty for answers near a length, in the reward that is trained with.
    ``forward_backward_batch``: "auto" overlaps sampling and training in synchronous runs; a ``ForwardBackwardBatch``
    sets its chunk size; None turns it off.
    ``evaluator``: measures the policy on rows of its own while it is trained; None measures nothing.
    ``allow_trajectory_loss``, ``allow_unbounded_staleness``: acknowledge options that lose training data, or the bound.
    ``checkpointing``: keep the run's state on disk, and go on from what is there; None keeps nothing.
    ``events``: the stream that reports everything that happens.
    """

    def run(self, rows: Sequence[Row], *, steps: int) -> AsyncGenerator[Step, None]:
        """Train for ``steps`` batches and yield a ``Step`` after each.

        ``steps``: batches to train, counted from the run's beginning; each takes ``groups_per_step`` rows.

        Rows are used in order, again from the start when they end (``repeat_dataset``). If rows are dropped because
        their groups fail, others take their place; finite data then ends with smaller or fewer batches. Leaving the
        loop stops the run: rollouts are cancelled and servers that the policy started are ended.

        With ``checkpointing`` a run that was stopped or killed goes on, and the first ``Step`` is the one after the
        last that was committed. ``steps`` counts from the run's beginning; it may be another number than before.
        """
        refuse_in_worker("AsyncTrainer.run")
        require_count("steps", steps, least=1)
        self.optimizer.check_schedule(steps)
        rows = checked_rows(rows)
        batches = math.ceil(len(rows) / self.groups_per_step)
        if not self.repeat_dataset and steps > batches:
            raise ConfigError.for_value("steps", steps, f"at most {batches}: repeat_dataset=False and {len(rows)} rows")

        async def produce(consumer: Consumer[Step]) -> None:
            saver: Saver = NothingSaved()
            if self.checkpointing is not None:
                saver = RunSaver(self.checkpointing, self, rows, steps)
            async with (
                keeping_first_error(saver.opened()),
                keeping_first_error(self.engine.opened(self.events, versions_in=saver.versions_in)) as session,
            ):
                # How many servers there are may be seen only now; nothing is live on them yet.
                self.require_versions(kept=session.policy.publisher.pins_versions)
                version = await saver.restore(session.policy)
                what = f"bringing version {version} to the servers"
                self.events.emit(Underway(time=anyio.current_time(), what=what))
                await session.publish(version)
                await _loops(TrainingRun(self, session, rows, steps, saver), consumer)

        return iterate(produce)
