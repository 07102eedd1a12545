"""RolloutEngine: rows in, finished groups out.

Usable alone, for data or evaluation (``async for group in engine.rollout(rows, group_size=8)``), and by the trainer,
which brings its own reservations and versions.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from asyncrl.concurrency.endings import LazyCoroutine, keeping_first_error
from asyncrl.concurrency.iteration import Consumer, iterate
from asyncrl.errors import ConfigError, StalenessError, require_choice, require_count
from asyncrl.events import Events, Notice, VersionPublished
from asyncrl.publishing.policy import OpenPolicy, Policy
from asyncrl.rollout.announcement import AnnounceTools
from asyncrl.rollout.border import checked_rows
from asyncrl.rollout.budget import Budget
from asyncrl.rollout.calls import UserCalls, time_of
from asyncrl.rollout.env import Env, EnvFactory, env_factory
from asyncrl.rollout.failures import FailureBudget, Failures
from asyncrl.rollout.group import run_group
from asyncrl.rollout.groupplan import FailedGroup, GroupPlan
from asyncrl.rollout.progress import Activities, GroupProgress
from asyncrl.rollout.renderer import Renderer, open_renderer
from asyncrl.rollout.trajectory import RolloutContext, SamplingSettings
from asyncrl.sampling.backend import SamplingBackend
from asyncrl.sampling.transport import require_open_files
from asyncrl.scheduling.rules import GroupCompletion, KVCache, SamplingPolicy, Schedule
from asyncrl.scheduling.slots import OrderedSlots
from asyncrl.scheduling.versions import PolicyClock
from asyncrl.types import Group, Row

__all__ = ["EngineSession", "RolloutEngine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSession:
    """An engine that is up. It samples once the first version is published; ``clock`` holds what is committed and
    published."""

    policy: OpenPolicy
    clock: PolicyClock
    events: Events
    context: RolloutContext
    """What its trajectories share."""
    _factory: EnvFactory
    _slots: OrderedSlots
    _seed: int
    _prefix: str = ""
    _on_published: Callable[[int], None] = field(default=lambda version: None)

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the environment's tools, as far as they are known."""
        return tuple(tool.name for tool in self._factory.tools)

    async def stage(self, version: int) -> None:
        """Export the learner's parameters as ``version``; the learner may go on once this returns."""
        await self.policy.publisher.stage(version)
        self.clock.stage(version)

    async def publish(self, version: int) -> None:
        """Make ``version`` live on every server and move the clock to it; stage it first, unless that was done.

        The first one is the version that the learner was opened with or brought back to. Emits ``VersionPublished``.
        Raises what ``Publisher.publish`` raises; the clock then stays where it is.
        """
        started = anyio.current_time()
        if version > self.clock.staged:
            await self.stage(version)
        publisher = self.policy.publisher
        if not publisher.pins_versions:
            self.clock.arrive(version)
        difference = await publisher.publish(version)
        self.clock.publish(version)
        self._on_published(version)
        now = anyio.current_time()
        self.events.emit(VersionPublished(time=now, version=version, seconds=now - started, probe_error=difference))

    def for_evaluation(self, *, prefix: str, temperature: float | None, events: Events) -> EngineSession:
        """The same engine for a measurement: every trajectory samples with the version that is published now.

        ``prefix`` begins the trajectories' names, ``events`` is told of them. ``temperature``: None is the engine's.
        """
        settings = self.context.settings
        context = replace(
            self.context,
            settings=replace(
                settings, temperature=settings.temperature if temperature is None else temperature, kv_cache=None
            ),
            versions=PolicyClock(self.clock.published),  # which nobody moves
            events=events,
            keeps_env_state=False,
            on_birth=lambda group, version: None,
        )
        return replace(self, context=context, _prefix=prefix)

    def for_training(
        self, on_birth: Callable[[int, int], None], on_published: Callable[[int], None], *, resumable: bool
    ) -> EngineSession:
        """The same engine for a run: ``on_birth(group, version)`` is called at each dispatch, ``on_published(version)``
        when a version is live and before that is reported.

        ``resumable``: environments are asked for what they need to be brought back.
        """
        context = replace(self.context, on_birth=on_birth, keeps_env_state=resumable)
        return replace(self, context=context, _on_published=on_published)

    async def group(
        self,
        index: int,
        row: Row,
        size: int,
        *,
        completion: GroupCompletion | None = None,
        on_part: Callable[[Group], None] | None = None,
        on_reroll: Callable[[int], None] | None = None,
        progress: GroupProgress | None = None,
    ) -> Group | FailedGroup:
        """Roll out ``size`` trajectories of ``row``; ``index`` is the priority, smaller first.

        ``on_part``, ``on_reroll`` and ``progress``: see ``run_group``. Raises ``StalenessError`` before a version is
        published.
        """
        if self.clock.published < 0:
            raise StalenessError("no version is published yet, so that there is none to sample with")
        plan = GroupPlan(
            index=index,
            row=row,
            size=size,
            seed=self._seed,
            prefix=self._prefix,
            completion=completion or GroupCompletion(),
        )
        return await run_group(
            plan, self._factory, self._slots, self.context, on_part=on_part, on_reroll=on_reroll, progress=progress
        )


class RolloutEngine:
    """Rolls out environments against a policy.

    ``env``: an ``Env`` instance that all trajectories share, or a class or zero-argument factory for one each.
    ``sampling_policy``: ``trajectory`` keeps the version that a trajectory started with, ``segment`` uses the newest
    published version for each request, as far as ``kv_cache`` lets it.
    ``kv_cache``: how old a conversation's cached prefix may be under newer weights, with ``segment`` only.
    ``temperature``: of sampling; 1 samples from the model as it is, which is what losses assume.
    ``top_p``: sample among the likeliest tokens that have this probability together; 1 is all, as losses assume.
    ``top_k``: sample among this many of the likeliest tokens; -1 is all of them, as losses assume.
    ``seed``: of everything that is drawn; the same seed draws the same for the same row.
    ``renderer``: ``chat`` (the tokenizer's chat template), ``text`` (contents as they are), ``auto`` (chat if there
    is a template) or your own.
    ``template_options``: variables of the chat template, such as ``enable_thinking``.
    ``announce_tools``: who tells the model of the environment's tools: the chat "template", a system message in plain
    "text", or "none" beside the environment's own messages.
    ``stop``: strings that end a turn, beside the renderer's own terminators.
    ``failures``: how often what fails is tried again, and how many failures end the run.
    ``environment_timeout``: seconds for each call into the environment; what takes longer fails and is tried again.
    ``trajectory_timeout``: seconds for a whole trajectory, from its reset to its reward; what takes longer fails and is
    tried again. None: no bound.
    """

    def __init__(  # noqa: PLR0913  the options of rollouts; each is one sentence above
        self,
        policy: Policy,
        *,
        env: Env | Callable[[], Env],
        budget: Budget | None = None,
        schedule: Schedule | None = None,
        sampling_policy: SamplingPolicy = "trajectory",
        kv_cache: KVCache | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        seed: int = 0,
        renderer: Literal["auto", "chat", "text"] | Renderer = "chat",
        template_options: Mapping[str, Any] | None = None,
        announce_tools: AnnounceTools = "template",
        stop: Sequence[str] = (),
        failures: Failures | None = None,
        environment_timeout: float = 600.0,
        trajectory_timeout: float | None = None,
    ) -> None:
        self.policy = policy
        self.schedule = schedule or Schedule()
        self.sampling_policy = sampling_policy
        self.settings = SamplingSettings(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            kv_cache=_checked_kv_cache(sampling_policy, kv_cache or KVCache()),
        )
        self._env = env
        self.factory = env_factory(env)
        """Where its trajectories get their environments."""
        self._budget = budget or Budget()
        self._seed = seed
        self._renderer = renderer
        self._template_options = dict(template_options or {})
        self._announce_tools = announce_tools
        self._stop = tuple(stop)
        self.failures = failures or Failures()
        self._environment_timeout_s = environment_timeout
        self._trajectory_timeout_s = math.inf if trajectory_timeout is None else trajectory_timeout
        if isinstance(stop, str) or not all(isinstance(end, str) and end for end in self._stop):
            raise ConfigError.for_value("stop", stop, "a sequence of texts that are not empty")
        _check_sampling(self.settings)
        require_choice("announce_tools", announce_tools, AnnounceTools)
        if type(seed) is not int or not abs(seed) < 2**63:
            raise ConfigError.for_value("seed", seed, "an integer of at most 64 bits")
        policy.check_kv_cache(self.settings.kv_cache)
        if not environment_timeout > 0:
            raise ConfigError.for_value("environment_timeout", environment_timeout, "more than 0 seconds")
        if not self._trajectory_timeout_s > 0:
            raise ConfigError.for_value("trajectory_timeout", trajectory_timeout, "more than 0 seconds, or None")

    def identity(self) -> Mapping[str, object]:
        """What decides what is sampled, by the names of the options. How much at once does not."""
        return {
            "env": self._env,
            "budget": self._budget,
            **{name: getattr(self.settings, name) for name in ("temperature", "top_p", "top_k", "kv_cache")},
            "seed": self._seed,
            "renderer": self._renderer if isinstance(self._renderer, str) else type(self._renderer),
            "template_options": self._template_options,
            "announce_tools": self._announce_tools,
            "stop": self._stop,
            "lora_rank": self.policy.learner.lora_rank,
        }

    @asynccontextmanager
    async def opened(
        self, events: Events | None = None, *, versions_in: Path | None = None
    ) -> AsyncGenerator[EngineSession, None]:
        """Bring up the policy. Nothing is published yet: ``publish`` version 0, or what the learner is brought back to.

        ``versions_in``: see ``Policy.opened``.
        """
        events = events or Events()
        if self.policy.opens_connections:
            require_open_files(self.schedule.sample_requests)
        async with self.policy.opened(events, kv_cache=self.settings.kv_cache, versions_in=versions_in) as policy:
            budget = self._budget_within(policy.sampler, events)
            renderer = await self.open_renderer(events)
            clock = PolicyClock(-1)
            context = RolloutContext(
                sampler=policy.sampler,
                renderer=renderer,
                budget=budget,
                settings=self.settings,
                requests=OrderedSlots(self.schedule.sample_requests),
                versions=clock,
                model_ref=policy.publisher.model_ref,
                pin=policy.publisher.pin,
                unpin=policy.publisher.unpin,
                events=events,
                failures=FailureBudget(self.failures),
                activities=Activities(),
                calls=UserCalls(self._environment_timeout_s),
                trajectory_timeout_s=self._trajectory_timeout_s,
                now=time_of(asyncio.get_running_loop()),
            )
            with context.calls, ExitStack() as stack:
                stack.callback(_follow_capacity(policy.sampler, context.requests))
                yield EngineSession(
                    policy=policy,
                    clock=clock,
                    events=events,
                    context=context,
                    _factory=self.factory,
                    _slots=OrderedSlots(self.schedule.concurrency),
                    _seed=self._seed,
                )

    def _budget_within(self, sampler: SamplingBackend, events: Events) -> Budget:
        """The budget, as far as the servers have room for it."""
        budget = self._budget.within(sampler.context_tokens)
        if budget is not self._budget:
            keys = {"budget": self._budget.max_context_tokens, "servers": budget.max_context_tokens}
            events.emit(Notice(time=anyio.current_time(), name="context_limited_by_servers", keys=keys))
        return budget

    async def open_renderer(self, events: Events) -> Renderer:
        """What its trajectories are rendered with, tried with the environment's tools; see ``open_renderer``."""
        how = {"template_options": self._template_options, "announce_tools": self._announce_tools}
        if isinstance(self._renderer, str):
            model = self.policy.learner.model_path
            return await open_renderer(model, self._renderer, self.factory, events, stop=self._stop, **how)
        for key, value in how.items():
            if value not in ({}, "template"):
                raise ConfigError.for_value(key, value, "left out for a renderer of your own")
        return self._renderer

    def rollout(
        self, rows: Sequence[Row], *, group_size: int, events: Events | None = None
    ) -> AsyncGenerator[Group, None]:
        """Roll out each row once and yield its group when it is finished, in the order of finishing.

        A group that fails for good is not yielded, but reported as ``GroupDropped``. As many groups are in flight as
        the concurrency has room for. Leaving the loop cancels them.
        """
        require_count("group_size", group_size, least=1)
        checked = checked_rows(rows)
        width = max(1, self.schedule.concurrency // group_size)

        async def produce(consumer: Consumer[Group]) -> None:
            # Bounded by the workers: each has at most one finished group that nobody has asked for.
            finished, groups = anyio.create_memory_object_stream[Group](width)
            numbered = iter(enumerate(checked))
            async with keeping_first_error(self.opened(events)) as session, groups, anyio.create_task_group() as tasks:
                with finished:
                    await session.publish(0)
                    for _ in range(width):
                        tasks.start_soon(LazyCoroutine, _work, session, numbered, group_size, finished.clone())
                async for group in groups:
                    await consumer.wanted()
                    await consumer.give(group)

        return iterate(produce)


def _follow_capacity(sampler: SamplingBackend, requests: OrderedSlots) -> Callable[[], None]:
    """Let no more requests out than the servers can take, for one that waits here is not born yet and does not age.

    Returns what ends that.
    """
    most = requests.limit
    return sampler.on_capacity(lambda capacity: requests.set_limit(min(most, capacity)))


async def _work(
    session: EngineSession,
    numbered: Iterator[tuple[int, Row]],
    group_size: int,
    finished: MemoryObjectSendStream[Group],
) -> None:
    with finished:
        for index, row in numbered:
            group = await session.group(index, row, group_size)
            if isinstance(group, Group):
                await finished.send(group)
            else:
                session.events.emit(group.event())


def _check_sampling(settings: SamplingSettings) -> None:
    if not 0 <= settings.temperature < math.inf:
        raise ConfigError.for_value("temperature", settings.temperature, "a finite number of at least 0")
    if not 0 < settings.top_p <= 1:
        raise ConfigError.for_value("top_p", settings.top_p, "more than 0 and at most 1")
    if settings.top_k != -1 and settings.top_k < 1:
        raise ConfigError.for_value("top_k", settings.top_k, "-1 (all tokens) or at least 1")


def _checked_kv_cache(sampling_policy: SamplingPolicy, kv_cache: KVCache) -> KVCache | None:
    """The rule by which trajectories move to newer weights; None if they never do."""
    require_choice("sampling_policy", sampling_policy, SamplingPolicy)
    if sampling_policy == "trajectory":
        if kv_cache != KVCache():
            raise ConfigError(
                f"kv_cache is {kv_cache}, but sampling_policy='trajectory' never moves a trajectory to other weights: "
                "leave kv_cache out, or use sampling_policy='segment'"
            )
        return None
    if kv_cache.on_limit == "refill" and not kv_cache.allow_reprefill:
        raise ConfigError(
            "kv_cache.on_limit='refill' computes the whole context again when a trajectory moves to newer weights: "
            "acknowledge it with kv_cache=KVCache(on_limit='refill', allow_reprefill=True)"
        )
    if kv_cache.on_limit == "hold" and kv_cache.max_staleness == 0:
        raise ConfigError(
            "sampling_policy is 'segment' and kv_cache is KVCache(max_staleness=0, on_limit='hold'): no trajectory "
            "could ever move to newer weights; allow older prefixes with kv_cache=KVCache(max_staleness=1), or "
            "computing them again with kv_cache=KVCache(on_limit='refill', allow_reprefill=True)"
        )
    return kv_cache
