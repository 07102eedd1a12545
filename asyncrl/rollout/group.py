"""A group: the members of one row, each in its own task, each with its own fresh environment.

A member that fails is a value with its error, and so is a group. If the machinery failed (``InfrastructureError``, a
timeout, the sampling servers) the member is tried again with a fresh environment, then the whole group is, and then the
group is given up. If user code failed (a reward that raises) or a server refused the request for good, the member is
dropped and never becomes reward 0; a group without any member left is given up. ``failures.py`` is the rule, and says
when a run ends for its failures.

With a deadline the conversations of stragglers are cancelled where they are, in a tool or a request; a reward that is
being computed is not, because its conversation is complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from asyncrl.concurrency.endings import WhenBegun
from asyncrl.errors import (
    LearnerError,
    ObserverError,
    PublicationError,
    StalenessError,
)
from asyncrl.events import (
    DeadlinePassed,
    GroupFinished,
    GroupRerolled,
    MemberDiscarded,
    MemberFailed,
)
from asyncrl.plain import error_text
from asyncrl.rollout.border import raised_at
from asyncrl.rollout.calls import Deadline
from asyncrl.rollout.env import Env, EnvFactory
from asyncrl.rollout.failures import is_accident
from asyncrl.rollout.groupplan import FailedGroup, GroupPlan, unsampled
from asyncrl.rollout.progress import GroupProgress
from asyncrl.rollout.trajectory import RolloutContext, converse, go_on, grade, leave_version
from asyncrl.scheduling.slots import OrderedSlots
from asyncrl.types import DropReason, Group, Trajectory, TruncationCause

__all__ = ["run_group"]


async def run_group(
    plan: GroupPlan,
    factory: EnvFactory,
    slots: OrderedSlots,
    context: RolloutContext,
    *,
    on_part: Callable[[Group], None] | None = None,
    on_reroll: Callable[[int], None] | None = None,
    progress: GroupProgress | None = None,
) -> Group | FailedGroup:
    """Run all members of a group and return it. Cancelling it cancels them; their environments are closed.

    ``progress`` is kept up to date, and is where the group goes on if it is not empty; None begins from the start.

    If stragglers are carried over, ``on_part`` gets the members that were done at the deadline, and the others are
    returned. If they are discarded, they are not in the result. ``on_reroll(index)`` is called when the group starts
    afresh and nothing of it is left. Raises the run's first error once ``context.failures`` has had enough.
    """
    budget = context.failures
    progress = progress or GroupProgress()
    mark = budget.group_begins()
    while True:
        run = _GroupRun(plan, factory, slots, context, on_part, progress)
        group = await run.run()
        if isinstance(group, Group):
            budget.group_ended()
            if not progress.left and (notice := unsampled(group)) is not None:
                context.events.emit(notice)
            return group
        if not run.may_be_tried_again or progress.rerolls >= budget.rules.group_rerolls:
            break
        progress.reset()
        progress.rerolls += 1
        if on_reroll is not None:
            on_reroll(plan.index)
        context.events.emit(
            GroupRerolled(
                time=anyio.current_time(),
                group=plan.index,
                error=error_text(group.error),
                generated_tokens=group.generated_tokens,
            )
        )
        await anyio.sleep(budget.delay_s)
    final = budget.group_dropped(mark, group.error)
    if final is not None:
        raise final
    return group


class _GroupRun:
    """Owns who is done, and whether the deadline has passed. One start of a group; a reroll is another."""

    def __init__(
        self,
        plan: GroupPlan,
        factory: EnvFactory,
        slots: OrderedSlots,
        context: RolloutContext,
        on_part: Callable[[Group], None] | None,
        progress: GroupProgress,
    ) -> None:
        self._plan = plan
        self._factory = factory
        self._slots = slots
        self._context = context
        self._on_part = on_part
        self._progress = progress
        progress.started = anyio.current_time()
        self._conversations: set[anyio.CancelScope] = set()
        self._tasks = anyio.create_task_group()

    @property
    def may_be_tried_again(self) -> bool:
        """True if the machinery failed; user code would raise again."""
        return self._progress.lost is not None

    async def run(self) -> Group | FailedGroup:
        over = self._progress.over
        name = f"group {self._plan.index}"
        async with self._tasks as tasks:
            if self._progress.lost is None:
                for member in range(self._plan.size):
                    if member not in over:
                        tasks.start_soon(WhenBegun, self._run, member, name=name)
        error = self._progress.lost
        if error is None and len(self._progress.errors) == self._plan.size:
            error = self._progress.errors[0]
        if error is not None:
            return FailedGroup(
                index=self._plan.index,
                row=self._plan.row,
                error=error,
                generated_tokens=sum(
                    traj.generated_tokens
                    for traj in (*self._progress.ended, *self._progress.active.values())
                    if traj.error is None
                ),
            )
        group = self._part(final=True)
        self._context.events.emit(
            GroupFinished(
                time=anyio.current_time(),
                group=group.index,
                seconds=group.seconds,
                closed_by_deadline=self._progress.passed,
            )
        )
        return group

    async def _run(self, member: int) -> None:
        if not self._slots.acquire_nowait():
            begun = self._progress.active.get(member)
            if begun is not None:
                await self._take_slot(begun)
            else:
                # A member that waits for its slot when the deadline passes does not begin.
                with self._until_deadline() as scope:
                    await self._slots.acquire((self._plan.index, member))
                if scope.cancelled_caught:
                    self._end(self._cut(self._plan.member(member)))
                    return
        try:
            self._end(await self._attempts(member))
        finally:
            self._slots.release()

    async def _take_slot(self, begun: Trajectory) -> None:
        try:
            await self._slots.acquire((begun.group, begun.member))
        except BaseException:
            leave_version(begun, self._context)
            raise

    def _next(self, member: int) -> Trajectory:
        """The member's trajectory that was cut off in an earlier process, else its next attempt from the start."""
        traj = self._progress.active.get(member)
        if traj is None or traj.error is not None:
            self._progress.attempts[member] += 1
            traj = self._plan.member(member, self._progress.attempts[member])
            self._begin(traj)
        return traj

    async def _attempts(self, member: int) -> Trajectory:
        budget = self._context.failures
        while True:
            traj = self._next(member)
            mark = budget.attempt_begins()
            try:
                await self._attempt(traj)
            except (StalenessError, PublicationError, LearnerError, ObserverError):
                raise
            except Exception as error:  # noqa: BLE001  a member's boundary: user code may raise anything
                traj.error = error
                final = budget.attempt_failed(mark, error)
            else:
                budget.attempt_ended()
                return traj
            self._report(traj)
            if final is not None:
                raise final  # outside of the handler, so that it keeps its own cause
            again = is_accident(traj.error)
            if again and self._progress.retries[member] < budget.rules.member_retries:
                self._progress.retries[member] += 1
                await anyio.sleep(budget.delay_s)
                continue
            traj.dropped = DropReason.FAILED
            if again and not self._progress.parted:
                self._lose(traj.error)
            return traj

    def _lose(self, error: BaseException | None) -> None:
        """A member failed for good: the others are not worth going on."""
        if self._progress.lost is None:
            self._progress.lost = error
            self._tasks.cancel_scope.cancel()

    async def _attempt(self, traj: Trajectory) -> None:
        if traj.reward is not None or traj.dropped is not None:
            return  # it had ended, and an earlier process was closing its environment
        activities, now = self._context.activities, self._context.now
        env = self._factory.create()
        activities[traj.id] = (traj, "reset", now())
        try:
            if self._context.trajectory_timeout_s == math.inf:
                await self._play(traj, env)
            else:  # a scope and its timer for each trajectory only where they are wanted
                with Deadline(f"trajectory {traj.id}", self._context.trajectory_timeout_s):
                    await self._play(traj, env)
        finally:
            leave_version(traj, self._context)
            if self._factory.owned and type(env).close is not Env.close:
                activities[traj.id] = (traj, "close", now())
                await self._context.closing.close(env, traj.id, self._context.events)
            del activities[traj.id]

    async def _play(self, traj: Trajectory, env: Env) -> None:
        if traj.spans:
            await go_on(traj, env, self._context, fresh=self._plan.member(traj.member, traj.attempt))
            if not traj.spans and self._progress.at_quorum is not None:
                self._progress.at_quorum[traj.member] = 0
        if self._plan.completion.stragglers is None:
            await converse(traj, env, self._context, allow=self._allow)
        else:
            with self._until_deadline() as scope:
                await converse(traj, env, self._context, allow=self._allow)
            if scope.cancelled_caught or traj.truncated is TruncationCause.GROUP_DEADLINE:
                self._cut(traj)
        if traj.dropped is None:
            await grade(traj, env, self._context)

    def _begin(self, traj: Trajectory) -> None:
        self._progress.active[traj.member] = traj
        if self._progress.at_quorum is not None:
            self._progress.at_quorum[traj.member] = 0

    def _allow(self, traj: Trajectory, wanted: int) -> int:
        """How many of the ``wanted`` tokens a member may sample; 0 if the deadline passes with this."""
        limit = self._plan.completion.max_straggler_tokens
        if self._progress.at_quorum is None or limit is None or self._progress.lost is not None:
            return wanted  # of a group that is lost no part may leave, and who asks is about to be cancelled
        left = limit - (traj.generated_tokens - self._progress.at_quorum[traj.member])
        if left > 0 and not self._progress.passed:
            return min(wanted, left)
        if not self._progress.passed:
            self._pass_deadline()
        return 0 if self._cuts else wanted

    def _pass_deadline(self) -> None:
        self._progress.passed = True
        stragglers = self._plan.size - len(self._progress.ended)
        self._context.events.emit(
            DeadlinePassed(
                time=anyio.current_time(),
                group=self._plan.index,
                finished=len(self._progress.ended),
                stragglers=stragglers,
            )
        )
        if self._cuts:
            for scope in self._conversations:
                scope.cancel()
        elif self._on_part is not None:
            self._progress.parted = True
            part = self._part(final=False)
            self._progress.left.update(traj.member for traj in part.members_G)
            self._on_part(part)

    @property
    def _cuts(self) -> bool:
        """True if the deadline ends conversations."""
        return self._plan.completion.stragglers != "carry_over"

    @contextmanager
    def _until_deadline(self) -> Iterator[anyio.CancelScope]:
        """A block that the deadline cancels, unless stragglers are carried over."""
        with anyio.CancelScope() as scope:
            if self._progress.passed and self._cuts:
                scope.cancel()
            self._conversations.add(scope)
            try:
                yield scope
            finally:
                self._conversations.discard(scope)

    def _cut(self, traj: Trajectory) -> Trajectory:
        """The deadline ended ``traj`` here."""
        traj.truncated = TruncationCause.GROUP_DEADLINE
        if self._plan.completion.stragglers == "discard" or not traj.spans:
            traj.dropped = DropReason.STRAGGLER
            self._context.events.emit(
                MemberDiscarded(
                    time=anyio.current_time(),
                    group=traj.group,
                    member=traj.member,
                    generated_tokens=traj.generated_tokens,
                )
            )
        return traj

    def _end(self, traj: Trajectory) -> None:
        self._progress.active.pop(traj.member, None)
        if traj.error is not None:
            self._progress.errors.append(traj.error)
        if traj.dropped is DropReason.STRAGGLER and self._plan.completion.stragglers == "discard":
            self._progress.left.add(traj.member)
            return
        self._progress.ended.append(traj)
        self._progress.rewarded += traj.reward is not None
        completion = self._plan.completion
        if (
            completion.mode == "deadline"
            and self._progress.at_quorum is None
            and self._progress.rewarded >= completion.min_members
        ):
            self._progress.at_quorum = {
                member: active.generated_tokens for member, active in self._progress.active.items()
            }

    def _part(self, *, final: bool) -> Group:
        """The members that ended since the last part, in their order in the group."""
        last = self._progress.ended[-1].member
        members = sorted(self._progress.ended, key=lambda traj: traj.member)
        self._progress.ended = []
        return Group(
            index=self._plan.index,
            row=self._plan.row,
            members_G=members,
            seconds=self._progress.seconds + anyio.current_time() - self._progress.started,
            closed_by_deadline=self._progress.passed,
            final=final,
            last_member=last,
        )

    def _report(self, traj: Trajectory) -> None:
        self._context.events.emit(
            MemberFailed(
                time=anyio.current_time(),
                group=traj.group,
                member=traj.member,
                attempt=traj.attempt,
                error=error_text(traj.error),
                where=raised_at(traj.error),
                generated_tokens=traj.generated_tokens,
            )
        )
