"""A group: the members of one row, each in its own task, each with its own fresh environment.

A member that fails is a value with its error. If the machinery failed (``InfrastructureError``, a timeout, the
sampling servers) it is tried again with a fresh environment, within a budget, and then the run stops with that error.
If user code failed (a reward that raises), the member is dropped and never becomes reward 0; a group without any
member left stops the run with its first error.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from asyncrl.errors import EnvironmentFailure, LearnerError, PublicationError, SamplingError, StalenessError
from asyncrl.events import GroupFinished, MemberFailed
from asyncrl.rollout.env import EnvFactory, call_user
from asyncrl.rollout.trajectory import RolloutContext, run_trajectory
from asyncrl.scheduling.slots import OrderedSlots
from asyncrl.types import DropReason, Group, Row, Trajectory

__all__ = ["GroupPlan", "run_group"]

_CLOSE_S = 10.0
# close() runs even when the run is being cancelled, but must not keep it from ending.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What to run: ``size`` trajectories of ``row``; ``index`` is the admission order, and the priority."""

    index: int
    row: Row
    size: int
    seed: int
    retries: int = 1
    """Further attempts of a member whose machinery failed."""
    prefix: str = ""
    """Sets apart the trajectory ids of an evaluation."""

    def member(self, member: int) -> Trajectory:
        """A fresh trajectory for that place in the group. Seeds never repeat within a group."""
        return Trajectory(
            id=f"{self.prefix}{self.index:06d}-{member:03d}",
            group=self.index,
            member=member,
            row=self.row,
            seed=(self.seed + self.index * 1_000_003 + member) % 2**31,
        )


async def run_group(plan: GroupPlan, factory: EnvFactory, slots: OrderedSlots, context: RolloutContext) -> Group:
    """Run all members of a group and return it whole. Cancelling it cancels them; their environments are closed."""
    started = anyio.current_time()
    members: list[Trajectory | None] = [None] * plan.size

    async def run(member: int) -> None:
        await slots.acquire((plan.index, member))
        try:
            members[member] = await _run_member(plan, member, factory, context)
        finally:
            slots.release()

    async with anyio.create_task_group() as tasks:
        for member in range(plan.size):
            tasks.start_soon(run, member)
    ended = [member for member in members if member is not None]
    errors = [member.error for member in ended if member.error is not None]
    if len(errors) == plan.size:
        raise errors[0]
    seconds = anyio.current_time() - started
    context.events.emit(GroupFinished(time=anyio.current_time(), group=plan.index, seconds=seconds))
    return Group(index=plan.index, row=plan.row, members_G=ended, seconds=seconds)


async def _run_member(plan: GroupPlan, member: int, factory: EnvFactory, context: RolloutContext) -> Trajectory:
    for attempt in range(1, plan.retries + 2):
        traj = plan.member(member)
        try:
            await _run_attempt(traj, factory, context)
        except (StalenessError, PublicationError, LearnerError):
            raise
        except (EnvironmentFailure, SamplingError) as error:
            _report(traj, attempt, error, context)
            if attempt > plan.retries:
                raise
        except Exception as error:  # noqa: BLE001  a member's boundary: user code may raise anything
            traj.error = error
            traj.dropped = DropReason.FAILED
            _report(traj, attempt, error, context)
            return traj
        else:
            return traj
    raise AssertionError("the last attempt returns or raises")


async def _run_attempt(traj: Trajectory, factory: EnvFactory, context: RolloutContext) -> None:
    env = factory.create()
    try:
        await run_trajectory(traj, env, context)
    finally:
        if traj.version is not None:
            context.release(traj.version)
        if factory.owned:
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await call_user(env.close, timeout=_CLOSE_S)


def _report(traj: Trajectory, attempt: int, error: Exception, context: RolloutContext) -> None:
    context.events.emit(
        MemberFailed(
            time=anyio.current_time(),
            group=traj.group,
            member=traj.member,
            attempt=attempt,
            error=f"{type(error).__name__}: {error}",
        )
    )
