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

from asyncrl.concurrency.endings import LazyCoroutine
from asyncrl.errors import LearnerError, ObserverError, PublicationError, StalenessError
from asyncrl.events import DeadlinePassed, Event, GroupFinished, GroupRerolled, MemberDiscarded, MemberFailed
from asyncrl.plain import error_text
from asyncrl.rollout.calls import Deadline
from asyncrl.rollout.env import Env, EnvFactory
from asyncrl.rollout.failures import is_accident
from asyncrl.rollout.groupplan import FailedGroup, GroupPlan, unsampled
from asyncrl.rollout.hooks import called_hooks, note_origin
from asyncrl.rollout.progress import GroupProgress
from asyncrl.rollout.trajectory import RolloutContext, converse, grade, leave_version, restored
from asyncrl.rollout.usercode import place_of
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
        group = await run.start()
        if isinstance(group, Group):
            budget.group_ended()
            if not progress.removed and (notice := unsampled(group)) is not None:
                context.events.emit(notice)
            return group
        # What user code raised it would raise again.
        if progress.failure is None or progress.rerolls >= budget.rules.group_rerolls:
            break
        progress.reset()
        progress.rerolls += 1
        if on_reroll is not None:
            on_reroll(plan.index)
        run.emit(
            GroupRerolled,
            error=error_text(group.error),
            where=place_of(group.error),
            generated_tokens=group.generated_tokens,
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

    def emit(self, event: Callable[..., Event], **values: object) -> None:
        """Report an event of this group."""
        self._context.events.emit(event(time=anyio.current_time(), group=self._plan.index, **values))

    async def start(self) -> Group | FailedGroup:
        """Run the members that are not done. It fails if one member failed for good, or if all raised."""
        plan, progress = self._plan, self._progress
        done = progress.done
        async with self._tasks as tasks:
            for member in range(plan.size) if progress.failure is None else ():
                if member not in done:
                    tasks.start_soon(LazyCoroutine, self._run, member, name=f"group {plan.index}")
        errors = [traj.error for traj in progress.ended if traj.error is not None]
        error = errors[0] if progress.failure is None and len(errors) == plan.size else progress.failure
        if error is not None:
            sound = [traj for traj in (*progress.ended, *progress.active.values()) if traj.error is None]
            tokens = sum(traj.generated_tokens for traj in sound)
            return FailedGroup(index=plan.index, row=plan.row, error=error, generated_tokens=tokens)
        group = self._part(final=True)
        self.emit(GroupFinished, seconds=group.seconds, closed_by_deadline=progress.deadline_passed)
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

    async def _attempts(self, member: int) -> Trajectory:
        """Run a member until an attempt ends or fails for good, first the one that an earlier process had begun."""
        budget, progress = self._context.failures, self._progress
        while True:
            if member not in progress.active or progress.active[member].error is not None:
                progress.attempts[member] += 1
                self._begin(self._plan.member(member, progress.attempts[member]))
            mark = budget.attempt_begins()
            try:
                await self._attempt(member)
            except (StalenessError, PublicationError, LearnerError, ObserverError):
                raise
            except Exception as raised:  # noqa: BLE001  a member's boundary: user code may raise anything
                error = raised
            else:
                budget.attempt_ended()
                budget.hooks_called(called_hooks(progress.active[member]), None)
                return progress.active[member]
            traj = progress.active[member]
            traj.error = error
            note_origin(traj)
            budget.hooks_called(called_hooks(traj), error)
            final = budget.attempt_failed(mark, error)
            self.emit(
                MemberFailed,
                member=member,
                attempt=traj.attempt,
                error=error_text(error),
                where=place_of(error),
                generated_tokens=traj.generated_tokens,
            )
            if final is not None:
                raise final  # outside of the handler, so that it keeps its own cause
            again = is_accident(error)
            if again and progress.retries[member] < budget.rules.member_retries:
                progress.retries[member] += 1
                await anyio.sleep(budget.delay_s)
                continue
            traj.dropped = DropReason.FAILED
            if again and not progress.part_handed_over and progress.failure is None:
                progress.failure = error
                self._tasks.cancel_scope.cancel()  # the others are not worth going on
            return traj

    def _begin(self, traj: Trajectory) -> None:
        """Make ``traj``, which has not begun, the one of its member."""
        self._progress.active[traj.member] = traj
        if self._progress.at_quorum is not None:
            self._progress.at_quorum[traj.member] = 0

    async def _attempt(self, member: int) -> None:
        traj = self._progress.active[member]
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
            leave_version(self._progress.active[member], self._context)
            if self._factory.owned and type(env).close is not Env.close:
                activities[traj.id] = (traj, "close", now())
                await self._context.closing.close(env, traj.id, self._context.events)
            del activities[traj.id]

    async def _play(self, traj: Trajectory, env: Env) -> None:
        if traj.spans and not await restored(traj, env, self._context):
            traj = self._plan.member(traj.member, traj.attempt)
            self._begin(traj)
        if self._plan.completion.stragglers is None:
            await converse(traj, env, self._context, allow=self._allow)
        else:
            with self._until_deadline() as scope:
                await converse(traj, env, self._context, allow=self._allow)
            if scope.cancelled_caught or traj.truncated is TruncationCause.GROUP_DEADLINE:
                self._cut(traj)
        if traj.dropped is None:
            await grade(traj, env, self._context)

    def _allow(self, traj: Trajectory, wanted: int) -> int:
        """How many of the ``wanted`` tokens a member may sample; 0 if the deadline passes with this."""
        progress, limit = self._progress, self._plan.completion.max_straggler_tokens
        if progress.at_quorum is None or limit is None or progress.failure is not None:
            return wanted  # of a group that has failed no part may leave, and who asks is about to be cancelled
        left = limit - (traj.generated_tokens - progress.at_quorum[traj.member])
        if left > 0 and not progress.deadline_passed:
            return min(wanted, left)
        if not progress.deadline_passed:
            self._pass_deadline()
        return 0 if self._cuts else wanted

    def _pass_deadline(self) -> None:
        progress = self._progress
        progress.deadline_passed = True
        ended = len(progress.ended)
        self.emit(DeadlinePassed, finished=ended, stragglers=self._plan.size - ended)
        if self._cuts:
            for scope in self._conversations:
                scope.cancel()
        elif self._on_part is not None:
            progress.part_handed_over = True
            part = self._part(final=False)
            progress.removed.update(traj.member for traj in part.members_G)
            self._on_part(part)

    @property
    def _cuts(self) -> bool:
        """True if the deadline ends conversations."""
        return self._plan.completion.stragglers != "carry_over"

    @contextmanager
    def _until_deadline(self) -> Iterator[anyio.CancelScope]:
        """A block that the deadline cancels, unless stragglers are carried over."""
        with anyio.CancelScope() as scope:
            if self._progress.deadline_passed and self._cuts:
                scope.cancel()
            self._conversations.add(scope)
            try:
                yield scope
            finally:
                self._conversations.discard(scope)

    def _cut(self, traj: Trajectory) -> Trajectory:
        """Truncate ``traj`` at the deadline, and drop it if stragglers are discarded or it has not begun."""
        traj.truncated = TruncationCause.GROUP_DEADLINE
        if self._plan.completion.stragglers == "discard" or not traj.spans:
            traj.dropped = DropReason.STRAGGLER
            self.emit(MemberDiscarded, member=traj.member, generated_tokens=traj.generated_tokens)
        return traj

    def _end(self, traj: Trajectory) -> None:
        progress, completion = self._progress, self._plan.completion
        progress.active.pop(traj.member, None)
        if traj.dropped is DropReason.STRAGGLER and completion.stragglers == "discard":
            progress.removed.add(traj.member)
            return
        progress.ended.append(traj)
        if completion.mode == "deadline" and progress.at_quorum is None and progress.rewarded >= completion.min_members:
            progress.at_quorum = {member: active.generated_tokens for member, active in progress.active.items()}

    def _part(self, *, final: bool) -> Group:
        """The members that ended since the last part, in their order in the group."""
        ended, self._progress.ended = self._progress.ended, []
        return Group(
            index=self._plan.index,
            row=self._plan.row,
            members_G=sorted(ended, key=lambda traj: traj.member),
            seconds=self._progress.seconds + anyio.current_time() - self._progress.started,
            closed_by_deadline=self._progress.deadline_passed,
            final=final,
            last_member=ended[-1].member,
        )
