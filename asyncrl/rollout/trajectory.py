"""The trajectory coroutine: ``converse`` (reset, sample, reply, ..), then ``grade``.

It holds nothing that its ``Trajectory`` does not hold. Each pass of the loop looks at the value, awaits one thing, and
writes the outcome back without an await in between; stopped anywhere, it goes on from the value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from asyncrl.errors import ProtocolError, ServerUnavailable
from asyncrl.events import Events, MemberFinished, MemberResumed, SegmentSampled, ToolCalled, ToolFailed
from asyncrl.rollout.border import checked_messages, checked_metrics, checked_reward, checked_state, checked_turn
from asyncrl.rollout.budget import Budget, cut_at_stop
from asyncrl.rollout.calls import UserCalls
from asyncrl.rollout.closing import Closing
from asyncrl.rollout.env import Env
from asyncrl.rollout.failures import FailureBudget
from asyncrl.rollout.groupplan import derived_for_request
from asyncrl.rollout.progress import Activities
from asyncrl.rollout.renderer import Renderer
from asyncrl.sampling.base import ModelRef, Sampler, SegmentRequest
from asyncrl.scheduling.rules import KVCache
from asyncrl.scheduling.slots import OrderedSlots
from asyncrl.scheduling.versions import Placement, PolicyClock, place
from asyncrl.types import Segment, Span, SpanKind, StopReason, Trajectory, TruncationCause

__all__ = ["RolloutContext", "SamplingSettings", "converse", "grade", "leave_version", "restored"]

_EMPTY_ABORTS = 16
# An aborted request may come back empty; a server that does nothing else is not one to wait for.


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """The sampling distribution, and when a trajectory moves to a newer version."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    kv_cache: KVCache | None = None
    """None: a trajectory keeps its first version."""

    @property
    def keeps_version(self) -> bool:
        """True if a trajectory may need its version again after a newer one was published."""
        return self.kv_cache is None or self.kv_cache.on_limit == "hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """What every trajectory of a run shares. The functions are the publisher's."""

    sampler: Sampler
    renderer: Renderer
    budget: Budget
    settings: SamplingSettings
    requests: OrderedSlots
    versions: PolicyClock
    """Which policy version a new request uses; an evaluation has one of its own, which nobody moves."""
    model_ref: Callable[[int, int], ModelRef]
    pin: Callable[[int], None]
    unpin: Callable[[int], None]
    events: Events
    failures: FailureBudget
    activities: Activities
    calls: UserCalls
    """Makes the calls of environments."""
    closing: Closing = field(default_factory=Closing)
    """Closes them."""
    trajectory_timeout_s: float = math.inf
    now: Callable[[], float] = anyio.current_time
    """The loop's time."""
    keeps_env_state: bool = False
    """Ask environments with ``recovery="snapshot"`` for their state after each answer."""
    on_birth: Callable[[int, int], None] = field(default=lambda group, version: None)
    """Called with (group, version) at each dispatch, before the request leaves."""


async def converse(
    traj: Trajectory, env: Env, context: RolloutContext, *, allow: Callable[[Trajectory, int], int]
) -> None:
    """Take ``traj`` from wherever it is to the end of its conversation; ``grade`` comes next.

    ``allow(traj, tokens)`` is asked when a request is about to leave how many of these tokens it may be for; 0
    truncates with ``GROUP_DEADLINE``. Whatever the environment or the sampler raises, this raises.
    """
    if not traj.spans:
        await _reset(traj, env, context)
    while traj.truncated is None and not traj.over:
        if traj.awaiting_reply:
            await _reply(traj, env, context)
            continue
        if traj.turn_tokens and context.budget.turn_complete(traj):
            await _read(traj, env, context)
            continue
        wanted = context.budget.next_segment(traj)
        if not isinstance(wanted, int):
            traj.truncated = wanted
            break
        segment = await _sample(traj, wanted, context, allow)
        if segment is None:
            traj.truncated = TruncationCause.GROUP_DEADLINE
        else:
            _extend(traj, segment)


async def _reset(traj: Trajectory, env: Env, context: RolloutContext) -> None:
    messages = checked_messages(await context.calls(env.reset, traj.row), env.reset, least=1)
    ids = await context.renderer.prompt(messages, env.tools)
    traj.env_state = await _env_state(traj, env, context) if context.keeps_env_state else None
    traj.messages.extend(messages)
    traj.append(Span(kind=SpanKind.PROMPT, tokens=ids))


def _extend(traj: Trajectory, segment: Segment) -> None:
    """Append a segment. Raises ``ServerUnavailable`` if too many in a row were aborted without a token."""
    traj.append_segment(segment)
    if not len(segment.tokens):
        if segment.stop is StopReason.STOP:
            traj.truncated = TruncationCause.EMPTY_SAMPLE
        traj.empty_aborts += 1
        if traj.empty_aborts > _EMPTY_ABORTS:
            raise ServerUnavailable(f"{_EMPTY_ABORTS} requests in a row were aborted without a token")
        return
    traj.empty_aborts = 0


async def _read(traj: Trajectory, env: Env, context: RolloutContext) -> None:
    """Read the message of the open turn: it is complete, or as far as it came before the conversation was truncated.

    Calls in a truncated one are not run.
    """
    parsed = context.budget.limit_calls(await context.renderer.parse(traj.turn_ids(), env.tools))
    traj.messages.append(parsed.message)
    if traj.truncated is not None:
        traj.cut = True
        return
    traj.tool_calls = list(parsed.tool_calls)
    traj.turns += 1
    traj.awaiting_reply = True


async def _sample(
    traj: Trajectory, wanted: int, context: RolloutContext, allow: Callable[[Trajectory, int], int]
) -> Segment | None:
    """Sample at most ``wanted`` tokens, as many as are allowed; None if none are.

    Raises ``ProtocolError`` for tokens of a version that this run has not given to its servers.
    """
    queued = dispatched = context.now()
    if not context.requests.acquire_nowait():
        context.activities[traj.id] = (traj, "queue", queued)
        await context.requests.acquire((traj.group, traj.member))
        dispatched = context.now()
    try:
        # From here to the request's departure there is no await: the stamp is the version at dispatch.
        allowed = allow(traj, wanted)
        if not allowed:
            return None
        placed, refilled = _move(traj, context)
        version = placed.version
        context.pin(version)
        try:
            context.on_birth(traj.group, version)
            ref = context.model_ref(version, placed.anchor)
            context.activities[traj.id] = (traj, "sampling", dispatched)
            served = await context.sampler.sample(_request(traj, allowed, placed, ref, context))
        finally:
            context.unpin(version)
    finally:
        context.requests.release()
    newest = context.versions.arriving
    for span in served.versions:
        if not 0 <= span.version <= newest:
            raise ProtocolError(
                f"{served.server or 'the sampler'} has answered with version {span.version}, but the newest of this "
                f"run is {newest}"
            )
    segment = cut_at_stop(served, traj, context.renderer)
    now = context.now()
    seconds = traj.seconds
    seconds["queue"] = seconds.get("queue", 0.0) + (dispatched - queued)
    seconds["sampling"] = seconds.get("sampling", 0.0) + (now - dispatched)
    context.events.emit(
        SegmentSampled(
            time=now,
            group=traj.group,
            member=traj.member,
            version=segment.oldest_version if segment.versions else version,
            prompt_tokens=traj.context_tokens,
            cached_tokens=segment.cached_tokens,
            tokens=len(served.tokens),
            cut_tokens=0 if segment is served else len(served.tokens) - len(segment.tokens),
            queue_seconds=dispatched - queued,
            seconds=now - dispatched,
            refilled=refilled,
        )
    )
    return segment


def _request(
    traj: Trajectory, tokens: int, placed: Placement, ref: ModelRef, context: RolloutContext
) -> SegmentRequest:
    settings = context.settings
    return SegmentRequest(
        trajectory_id=traj.id,
        input_ids=traj.tokens(),
        max_new_tokens=tokens,
        version=placed.version,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop=context.renderer.stop,
        stop_token_ids=context.renderer.stop_token_ids,
        seed=derived_for_request(traj.seed, traj.group, traj.member, traj.attempt, traj.segments),
        adapter=ref.adapter,
        extra_key=ref.extra_key,
        anchor=placed.anchor,
        replica=ref.replica,
    )


def _move(traj: Trajectory, context: RolloutContext) -> tuple[Placement, bool]:
    """Where the next segment is sampled, and whether that computes the prefix anew."""
    current, settings, versions = None, context.settings, context.versions
    if traj.version is not None and traj.anchor is not None:
        current = Placement(version=traj.version, anchor=traj.anchor)
        if settings.kv_cache is None:
            return current, False
    target = place(current, versions.published, settings.kv_cache, arriving=versions.arriving)
    if target is current or target == current:
        return target, False
    if settings.keeps_version:
        context.pin(target.version)
        leave_version(traj, context)
    traj.version, traj.anchor = target.version, target.anchor
    return target, current is not None and target.anchor != current.anchor


def leave_version(traj: Trajectory, context: RolloutContext) -> None:
    """Unpin the version of ``traj``, which will not sample with it again."""
    if traj.version is not None and context.settings.keeps_version:
        context.unpin(traj.version)


async def _env_state(traj: Trajectory, env: Env, context: RolloutContext) -> bytes | None:
    """The environment's snapshot, None if it has none. At once as JSON, for it may go on with the same objects."""
    if env.recovery != "snapshot":
        return None
    state = await context.calls(env.snapshot, traj)
    checked_metrics(traj, env.snapshot)
    return checked_state(state, env.snapshot)


async def restored(traj: Trajectory, env: Env, context: RolloutContext) -> bool:
    """Bring the new ``env`` to where ``traj`` was cut off in an earlier process.

    False if it cannot be: ``traj``, which has left its version then, has to begin anew.
    """
    recovered = env.recovery == "stateless" or (env.recovery == "snapshot" and traj.env_state is not None)
    if not recovered:
        leave_version(traj, context)
    elif env.recovery == "stateless":
        await context.calls(env.reset, traj.row)
    else:
        await context.calls(env.restore, traj, json.loads(traj.env_state or b"null"))
        checked_metrics(traj, env.restore)
    if tokens := traj.generated_tokens:
        context.events.emit(
            MemberResumed(
                time=context.now(), group=traj.group, member=traj.member, recovered=recovered, generated_tokens=tokens
            )
        )
    return recovered


async def _reply(traj: Trajectory, env: Env, context: RolloutContext) -> None:
    """Append the environment's answer to the turn, or end the conversation with it."""
    started = context.now()
    context.activities[traj.id] = (traj, "on_turn", started)
    before = traj.metrics
    known = len(traj.tool_failures)
    errors, tool_seconds = before.get("tool_errors", 0.0), before.get("tool_seconds", 0.0)
    answer = await context.calls(env.on_turn, traj)
    checked_metrics(traj, env.on_turn)
    reply = checked_turn(answer, env.on_turn)
    now = context.now()
    in_tools = traj.metrics.get("tool_seconds", 0.0) - tool_seconds
    in_environment = now - started - in_tools
    traj.add_seconds("environment", in_environment if in_environment > 0.0 else 0.0)
    if context.events.wants(ToolCalled):
        called = ToolCalled(
            time=now,
            group=traj.group,
            member=traj.member,
            seconds=now - started,
            calls=len(traj.tool_calls),
            errors=int(traj.metrics.get("tool_errors", 0.0) - errors),
        )
        context.events.emit(called)
    for tool, error, where in traj.tool_failures[known:]:
        failed = ToolFailed(time=now, group=traj.group, member=traj.member, tool=tool, error=error, where=where)
        context.events.emit(failed)
    state = await _env_state(traj, env, context) if context.keeps_env_state else None
    cause = context.budget.after_turn(traj)
    if reply is None or cause is not None:
        traj.env_state = state
        traj.over = reply is None
        traj.truncated = None if reply is None else cause
        return
    said, max_turn_tokens = reply
    messages = await context.renderer.shortened(said, context.budget.tool_output_tokens)
    framing = await context.renderer.continuation(traj.messages, messages, traj.turn_ids(), env.tools)
    traj.env_state = state
    traj.messages.extend(messages)
    traj.append(Span(kind=SpanKind.FRAMING, tokens=framing))
    traj.turn_cap = max_turn_tokens
    traj.turn_tokens = 0
    traj.awaiting_reply = False


async def grade(traj: Trajectory, env: Env, context: RolloutContext) -> None:
    """Give the conversation its reward: ``reward``'s, or ``on_truncated``'s. Raises if it is no finite number."""
    started = context.now()
    context.activities[traj.id] = (traj, "reward", started)
    cause = traj.truncated
    if cause is not None and traj.turn_tokens and not traj.awaiting_reply and not traj.cut:
        await _read(traj, env, context)
    rates: Callable[..., object] = env.reward if cause is None else env.on_truncated
    value = await context.calls(rates, traj, traj.row, *(() if cause is None else (cause,)))
    checked_metrics(traj, rates)
    traj.reward = checked_reward(value, rates)
    now = context.now()
    traj.add_seconds("reward", now - started)
    if context.events.wants(MemberFinished):
        finished = MemberFinished(
            time=now,
            group=traj.group,
            member=traj.member,
            reward=traj.reward,
            turns=traj.turns,
            generated_tokens=traj.generated_tokens,
            truncated=traj.truncated.value if traj.truncated else "",
        )
        context.events.emit(finished)
