"""The first error is the one that is raised, wherever a run is when it fails and whatever fails while it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import asyncrl as rl
from asyncrl import events as kinds
from asyncrl.concurrency.endings import FirstError, FirstErrorStack, first_error, keeping_first_error, noting_on
from asyncrl.concurrency.iteration import Consumer, iterate
from asyncrl.errors import ConfigError, NonFiniteError, ObserverError
from asyncrl.events import Event, Events
from asyncrl.rollout.calls import call_user
from asyncrl.testing import ScriptedLearner, ScriptedPublisher, ScriptedSampler, run_virtual
from asyncrl.training.saving import RunSaver
from tests.faults.case import Case, One


class _Boom(Exception):
    """What the test raises, named after where."""


_FIRST: dict[str, Callable[[], BaseException]] = {
    "nothing": _Boom,  # not raised
    "an error": lambda: _Boom("first"),
    "a learner's": lambda: NonFiniteError("first"),
    "a group": lambda: ExceptionGroup("", [ExceptionGroup("", [_Boom("first")])]),
    "the user's end": lambda: KeyboardInterrupt("first"),
    "a cancellation": lambda: asyncio.CancelledError("first"),
}
_LATER: dict[str, Callable[[], BaseException]] = {
    "nothing": _Boom,  # not raised
    "an option": lambda: ConfigError("later"),
    "the disk's": lambda: OSError("later"),
    "a group": lambda: ExceptionGroup("", [KeyError("later"), ExceptionGroup("", [ValueError("later")])]),
}


@contextlib.contextmanager
def _replacing(error: Callable[[], BaseException] | None) -> Iterator[None]:
    try:
        yield
    finally:
        if error is not None:
            raise error()


@contextlib.asynccontextmanager
async def _failing(error: Callable[[], BaseException] | None) -> AsyncGenerator[None, None]:
    with _replacing(error):
        yield


async def _in_kept(first: Callable[[], BaseException] | None, later: Callable[[], BaseException] | None) -> None:
    async with keeping_first_error(_failing(later)):
        if first is not None:
            raise first()


async def _in_two_kept(first: Callable[[], BaseException] | None, later: Callable[[], BaseException] | None) -> None:
    async with keeping_first_error(_failing(later)), keeping_first_error(_failing(later)):
        if first is not None:
            raise first()


async def _in_a_stack(first: Callable[[], BaseException] | None, later: Callable[[], BaseException] | None) -> None:
    def fail() -> None:
        if later is not None:
            raise later()

    async def fail_soon() -> None:
        await asyncio.sleep(0)
        fail()

    async with FirstErrorStack() as end:
        await end.enter_async_context(_failing(later))
        end.callback(fail)
        end.push_async_callback(fail_soon)
        if first is not None:
            raise first()


async def _in_an_except_block(
    first: Callable[[], BaseException] | None, later: Callable[[], BaseException] | None
) -> None:
    try:
        if first is not None:
            raise first()
    except BaseException as error:
        with noting_on(error):
            if later is not None:
                raise later() from None
        raise
    if later is not None:
        raise later()


@pytest.mark.virtual_clock
@pytest.mark.parametrize("place", [_in_kept, _in_two_kept, _in_a_stack, _in_an_except_block])
@pytest.mark.parametrize(("first", "later"), list(itertools.product(_FIRST, _LATER)))
async def test_an_error_while_ending_never_hides_the_first(
    place: Callable[..., Awaitable[None]], first: str, later: str
) -> None:
    """First error x error of each exit: the first is raised, the other is a note; after a cancellation it is raised."""
    begun, ended = (None if name == "nothing" else made[name] for made, name in ((_FIRST, first), (_LATER, later)))
    raised: BaseException | None = None
    try:
        await place(begun, ended)
    except BaseException as error:  # noqa: BLE001  looked at below
        raised = first_error(error)
    if first == "nothing" or (first == "a cancellation" and later != "nothing"):
        wanted = [type(leaf) for leaf in _leaves(ended)]
    else:
        wanted = [type(leaf) for leaf in _leaves(begun)]
    if not wanted:
        assert raised is None
        return
    assert type(raised) is wanted[0]
    notes = "\n".join(getattr(raised, "__notes__", ()))
    if first not in ("nothing", "a cancellation"):
        assert str(raised) == "first"
        assert all(f"{type(leaf).__name__}: {leaf}" in notes for leaf in _leaves(ended))
        seen, context = {id(raised)}, raised.__context__
        while context is not None:
            assert id(context) not in seen
            seen.add(id(context))
            context = context.__context__


def _leaves(make: Callable[[], BaseException] | None) -> list[BaseException]:
    def leaves(error: BaseException) -> list[BaseException]:
        if isinstance(error, BaseExceptionGroup):
            return [leaf for inner in error.exceptions for leaf in leaves(inner)]
        return [error]

    return [] if make is None else leaves(make())


@pytest.mark.virtual_clock
@pytest.mark.parametrize("slow", [0, 1, 2])
async def test_of_several_tasks_the_one_that_failed_first_counts(slow: int) -> None:
    """Not the one whose task group was closed first: one of them has much to clean up."""
    watch = FirstError()

    async def task(number: int) -> None:
        try:
            with watch.watched():
                await anyio.sleep(1 + number)
                raise _Boom(number)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(100.0 if number == slow else 0.0)

    async def run() -> None:
        with watch.raised():
            async with anyio.create_task_group() as tasks:
                for number in range(3):
                    tasks.start_soon(task, number)

    with pytest.raises(_Boom, match="0") as caught:
        await run()
    assert getattr(caught.value, "__notes__", []) == (["and also _Boom: 1"] if slow == 0 else [])


# How a caller may leave its loop. ---------------------------------------------------------------------------------


async def _to_the_end(items: AsyncGenerator[int, None]) -> None:
    async with contextlib.aclosing(items):
        async for _ in items:
            pass


async def _by_break(items: AsyncGenerator[int, None]) -> None:
    async with contextlib.aclosing(items):
        async for _ in items:
            break


async def _by_an_error(items: AsyncGenerator[int, None]) -> None:
    async with contextlib.aclosing(items):
        async for _ in items:
            raise _Boom("the caller's")


async def _late_by_an_error(items: AsyncGenerator[int, None]) -> None:
    async with contextlib.aclosing(items):
        async for _ in items:
            await anyio.sleep(10)
            raise _Boom("the caller's")


async def _by_a_deadline(items: AsyncGenerator[int, None]) -> None:
    with anyio.move_on_after(5):
        async with contextlib.aclosing(items):
            async for _ in items:
                await anyio.sleep(100)


@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("leave", "fails", "raised", "noted_too"),
    [
        (_to_the_end, "at the end", "the work's", ""),
        (_by_break, "at the end", "the work's", ""),
        (_by_a_deadline, "at the end", "the work's", ""),
        (_by_an_error, "at the end", "the caller's", "the work's"),
        (_late_by_an_error, "at the end", "the caller's", "the work's"),
        (_to_the_end, "meanwhile", "the work's", ""),
        (_by_break, "meanwhile", "", ""),
        (_by_a_deadline, "meanwhile", "the work's", ""),
        (_by_an_error, "meanwhile", "the caller's", ""),
        (_late_by_an_error, "meanwhile", "the work's", "the caller's"),
    ],
)
async def test_errors_of_the_work_reach_a_caller_that_leaves_its_loop(
    leave: Callable[[AsyncGenerator[int, None]], Awaitable[None]], fails: str, raised: str, noted_too: str
) -> None:
    """By its end, a break, an error of its own or a deadline; which of two errors is raised is decided by time."""

    async def background() -> None:
        await anyio.sleep(2)
        raise _Boom("the work's")

    async def produce(consumer: Consumer[int]) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                if fails == "meanwhile":
                    tasks.start_soon(background)
                for number in range(3):
                    await consumer.wanted()
                    await anyio.sleep(1)
                    await consumer.give(number)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(1)
            if fails == "at the end":
                raise _Boom("the work's")

    for around in (False, True):
        caught: BaseException | None = None
        try:
            if around:
                try:
                    raise KeyError("none of our business")
                except KeyError:
                    await leave(iterate(produce))
            else:
                await leave(iterate(produce))
        except _Boom as error:
            caught = error
        assert str(caught or "") == raised
        assert getattr(caught, "__notes__", []) == ([f"and also _Boom: {noted_too}"] if noted_too else [])


@pytest.mark.parametrize("loop_goes_on", [False, True])
def test_after_a_break_asyncio_is_told_of_the_error(loop_goes_on: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody can raise it any more, whether the event loop ends at once or not."""

    async def produce(consumer: Consumer[int]) -> None:
        try:
            await consumer.wanted()
            await consumer.give(0)
            await anyio.sleep_forever()
        finally:
            raise _Boom("while ending")

    async def main() -> None:
        async for _ in iterate(produce):
            break
        for _ in range(5 if loop_goes_on else 0):
            await asyncio.sleep(0)

    asyncio.run(main())
    gc.collect()
    assert "while ending" in caplog.text


# Whole runs. --------------------------------------------------------------------------------------------------------


class _Learner(ScriptedLearner):
    def __init__(self, *at: str, seconds: float = 1.0) -> None:
        super().__init__(train_s=seconds, step_s=seconds)
        self._at = at

    def _fail(self, where: str) -> None:
        if where in self._at:
            raise _Boom(where)

    async def open(self) -> None:
        self._fail("open")

    async def close(self) -> None:
        self._fail("close")

    async def forward_backward(self, *args: Any, **options: Any) -> Any:
        result = await super().forward_backward(*args, **options)
        self._fail("forward_backward")
        return result

    async def optimizer_step(self, *args: Any, **options: Any) -> Any:
        self._fail("optimizer_step")
        return await super().optimizer_step(*args, **options)

    async def discard_gradients(self) -> None:
        await super().discard_gradients()
        self._fail("discard_gradients")


class _Publisher(ScriptedPublisher):
    def __init__(self, at: str) -> None:
        super().__init__(seconds=lambda: 1.0)
        self._at = at

    async def stage(self, version: int) -> None:
        if version and self._at == "stage":
            raise _Boom("stage")
        await super().stage(version)

    async def publish(self, version: int) -> float:
        if version and self._at == "publish":
            raise _Boom("publish")
        return await super().publish(version)


class _Sampler(ScriptedSampler):
    def __init__(self, *, closing: bool = False, failing: bool = False) -> None:
        super().__init__(seconds=lambda request: 1.0)
        self._closing, self._failing = closing, failing

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            if self._closing:
                raise ConfigError("the sampler's end")

    async def sample(self, request: Any) -> Any:
        if self._failing:
            raise _Boom("sample")
        return await super().sample(request)


def _env(method: str) -> type[One]:
    async def fail(self: One, *args: Any) -> Any:
        raise _Boom(method)

    return type("Failing", (One,), {method: fail, "open": 0})


def _observed(kind: type[Event]) -> Case:
    case = Case(sampler=_Sampler())

    def observe(event: Event) -> None:
        if isinstance(event, kind):
            raise _Boom(kind.__name__)

    case.bus.subscribe(observe)
    return case


_OBSERVED = (
    *(kinds.GroupAdmitted, kinds.GroupBorn, kinds.SegmentSampled, kinds.GroupFinished, kinds.BatchTaken),
    *(kinds.ChunkTrained, kinds.LearnerStepped, kinds.VersionCommitted, kinds.GroupConsumed, kinds.VersionPublished),
    kinds.StepFinished,
)


def _in_the_environment(method: str) -> Case:
    return Case(_env(method))


def _in_the_learner(where: str) -> Case:
    return Case(learner=_Learner(where, "discard_gradients", "close"))


def _in_the_publisher(where: str) -> Case:
    return Case(publisher=_Publisher(where), max_staleness=2)


_STAGES: dict[str, Callable[[], Case]] = {
    "sample": lambda: Case(sampler=_Sampler(failing=True)),
    **{method: partial(_in_the_environment, method) for method in ("reset", "on_turn", "reward")},
    **{where: partial(_in_the_publisher, where) for where in ("stage", "publish")},
    **{where: partial(_in_the_learner, where) for where in ("open", "forward_backward", "optimizer_step")},
    **{kind.__name__: partial(_observed, kind) for kind in _OBSERVED},
}


@pytest.mark.parametrize("stage", _STAGES)
def test_a_run_that_fails_at_any_stage_raises_that_error(stage: str) -> None:
    """Whatever else fails at its end; and no coroutine is left unawaited, which would be a warning and so an error."""
    case = _STAGES[stage]()
    with pytest.raises((_Boom, ObserverError)) as caught:
        run_virtual(_drain, case.start(4, 4))
    assert stage in f"{caught.value} {caught.value.__cause__}"
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    if stage in ("forward_backward", "optimizer_step"):
        assert "and also _Boom: discard_gradients" in notes
        assert "and also _Boom: close" in notes
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("left", ["break", "raise", "cancel"])
@pytest.mark.parametrize("closing", [False, True])
def test_leaving_the_loop_of_a_run_leaves_no_coroutine_behind(left: str, closing: bool) -> None:
    """On a real event loop that ends at once, without ``aclosing``; the error of the end is reported."""
    case = Case(sampler=ScriptedSampler(), learner=_Learner(*(["close"] if closing else []), seconds=0.0))
    told: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context.get("exception")))
        with anyio.move_on_after(0.0 if left == "cancel" else 30.0):
            async for _ in case.start(50, 4):
                if left == "break":
                    return
                raise KeyError("the caller's")

    with contextlib.suppress(KeyError, _Boom):
        asyncio.run(main())
    gc.collect()
    assert [str(error) for error in told] in ([], ["close"])


_SAVING: dict[str, Callable[[], BaseException]] = {
    "an option": lambda: ConfigError("a message of trajectory 7 cannot be saved"),
    "a type": lambda: TypeError("not JSON"),
    "the disk's": lambda: OSError("full"),
}


@pytest.mark.parametrize("saving", _SAVING)
@pytest.mark.parametrize("stage", ["forward_backward", "optimizer_step", "nothing", "break"])
def test_a_save_that_fails_at_the_end_does_not_hide_why_the_run_ended(
    stage: str, saving: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its class, and not its text. After a run that ended well it is the error, but for a disk's, a notice."""
    case = Case(
        learner=_Learner(stage), sampler=_Sampler(closing=True), checkpointing=rl.Checkpointing(tmp_path / "run")
    )

    def save(self: RunSaver, state: object) -> None:
        raise _SAVING[saving]()

    monkeypatch.setattr(RunSaver, "_save", save)
    with pytest.raises(Exception) as caught:
        run_virtual(_drain, case.start(3, 4), 1 if stage == "break" else None)
    notes = "\n".join(getattr(caught.value, "__notes__", ()))
    if stage in ("forward_backward", "optimizer_step"):
        assert (type(caught.value), str(caught.value)) == (_Boom, stage)
        assert ("cannot be saved" in notes or "not JSON" in notes) == (saving != "the disk's")
        assert "the sampler's end" in notes
    elif saving == "the disk's":
        assert str(caught.value) == "the sampler's end"
        assert case.notices("state_not_saved")
    else:
        assert type(caught.value) is type(_SAVING[saving]())
        assert "the sampler's end" in notes


@pytest.mark.parametrize("disk", ["draft", "refuse"])
def test_a_journal_that_fails_does_not_hide_a_refused_step(
    disk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner found a gradient that is not finite; that its batch could not be written is a note on that."""
    from asyncrl.checkpoint.journal import Journal

    def fail(self: Journal, *args: object) -> None:
        raise OSError("full")

    case = Case(checkpointing=rl.Checkpointing(tmp_path / "run"))
    case.learner.fail_at = 1
    monkeypatch.setattr(Journal, disk, fail)
    with pytest.raises((NonFiniteError, OSError)) as caught:
        run_virtual(_drain, case.start(3, 4))
    if disk == "refuse":
        assert isinstance(caught.value, NonFiniteError)
        assert "and also OSError: full" in "\n".join(caught.value.__notes__)


async def _drain(steps: AsyncGenerator[Any, None], most: int | None = None) -> None:
    async with contextlib.aclosing(steps):
        taken = 0
        async for _ in steps:
            taken += 1
            if taken == most:
                break


def test_an_error_in_a_function_of_the_caller_ends_the_run_with_that() -> None:
    """``rl.run``: what fails while the run then ends is a note on it."""
    case = Case(learner=ScriptedLearner(), sampler=_Sampler(closing=True))
    case.sampler._seconds = lambda request: 0.0

    def on_step(step: rl.Step) -> None:
        raise KeyError("on_step")

    with pytest.raises(KeyError, match="on_step") as caught:
        rl.run(case.trainer, list(range(4)), steps=3, on_step=on_step, keep=False)
    assert caught.value.__notes__ == ["and also ConfigError: the sampler's end"]


@pytest.mark.parametrize("abandoned", [False, True])
def test_a_coroutine_that_an_abandoned_thread_returns_is_closed(
    abandoned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain function may return one; after its caller was cancelled nobody awaits it, and Python would warn."""
    monkeypatch.setattr("asyncrl.concurrency.threads._IDLE_S", 0.001)
    go, begun = threading.Event(), threading.Event()
    made: list[Any] = []
    threads: list[threading.Thread] = []

    async def answer() -> str:
        return "answer"

    def plain() -> Any:
        threads.append(threading.current_thread())
        made.append(answer())
        begun.set()
        go.wait()
        return made[0]

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(call_user, plain))
            await anyio.to_thread.run_sync(begun.wait)
            if abandoned:
                tasks.cancel_scope.cancel()
            else:
                go.set()
        go.set()

    anyio.run(main)
    threads[0].join(60)
    assert inspect.getcoroutinestate(made[0]) == inspect.CORO_CLOSED


def test_what_observers_raise_at_the_end_is_a_note() -> None:
    """The notice of a save that failed meets an observer that raises."""
    events = Events()

    def observe(event: Event) -> None:
        raise _Boom("observer")

    events.subscribe(observe)

    async def end() -> None:
        async with FirstErrorStack() as stack:
            stack.callback(events.emit, kinds.Notice(time=0.0, name="state_not_saved", keys={}))
            raise NonFiniteError("first")

    with pytest.raises(NonFiniteError, match="first") as caught:
        run_virtual(end)
    assert "ObserverError" in caught.value.__notes__[0]
