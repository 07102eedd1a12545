"""What counts as one failure, as failures in a row, and as one too many."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError
from asyncrl.rollout.failures import FailureBudget, Failures


def _fail(budget: FailureBudget, name: str, mark: int | None = None) -> BaseException | None:
    return budget.attempt_failed(budget.attempt_begins() if mark is None else mark, LookupError(name))


def test_failures_in_a_row_end_the_run_with_the_first_of_them() -> None:
    """The third of three; an attempt that ends well starts the count again."""
    budget = FailureBudget(Failures(consecutive=3))
    assert [_fail(budget, name) for name in "ab"] == [None, None]
    budget.attempt_ended()
    assert [_fail(budget, name) for name in "cd"] == [None, None]
    final = _fail(budget, "e")
    assert str(final) == "c"
    assert isinstance(final, LookupError)
    assert final.__notes__ == ["3 attempts in a row failed, as this one did (failures.consecutive)"]
    assert budget.failed_attempts == 5


def test_what_had_begun_before_the_last_failure_is_of_the_same_outage() -> None:
    """A hundred in flight fail together: that is one; their next attempts are another."""
    budget = FailureBudget(Failures(consecutive=3))
    for _ in range(2):
        marks = [budget.attempt_begins() for _ in range(100)]
        assert [_fail(budget, "outage", mark) for mark in marks] == [None] * 100
    assert _fail(budget, "again") is not None


def test_all_failures_of_a_run_can_be_bounded() -> None:
    """However many end well in between; the error is the first of the run."""
    budget = FailureBudget(Failures(per_run=3))
    for name in "ab":
        assert _fail(budget, name) is None
        budget.attempt_ended()
    assert str(_fail(budget, "c")) == "a"


def test_dropped_groups_in_a_row_end_the_run_although_members_end_well() -> None:
    """Every group has a member that fails for good: nothing would ever be trained."""
    budget = FailureBudget(Failures(consecutive=3))
    for name in "ab":
        budget.attempt_ended()
        assert budget.group_dropped(budget.group_begins(), LookupError(name)) is None
    final = budget.group_dropped(budget.group_begins(), LookupError("c"))
    assert str(final) == "a"
    budget.group_ended()
    assert budget.group_dropped(budget.group_begins(), LookupError("d")) is None


def test_the_delay_doubles_up_to_a_minute() -> None:
    """Of the failures in a row, so that one that is alone is tried again soon."""
    budget = FailureBudget(Failures(consecutive=100, retry_delay=1.0))
    delays = []
    for _ in range(9):
        _fail(budget, "again")
        delays.append(budget.delay_s)
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    budget.attempt_ended()
    assert budget.delay_s == 1.0


@given(st.lists(st.lists(st.booleans(), max_size=6), max_size=40), st.integers(0, 5))
def test_a_function_that_fails_most_calls_of_several_steps_ends_the_run(steps: list[list[bool]], most: int) -> None:
    """An independent count; a step without a call changes nothing, and the error is the first of these steps."""
    budget, row, first = FailureBudget(Failures(user_error_steps=most)), 0, ""
    for number, calls in enumerate(steps):
        for index, sound in enumerate(calls):
            error = None if sound else LookupError(f"{number}.{index}")
            budget.hooks_called({"reward": sound, "reset": True}, error)
            if not sound and not first:
                first = f"{number}.{index}"
        if calls:
            row = row + 1 if calls.count(False) > calls.count(True) else 0
            first = first if row else ""
        final = budget.step_ended()
        assert (final is not None) == (most > 0 and row >= most)
        if final is not None:
            assert str(final) == first
            assert "reward failed most of its calls" in final.__notes__[-1]
            assert "failures.user_error_steps" in final.__notes__[-1]
            return


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("member_retries", -1),
        ("group_rerolls", True),
        ("consecutive", 0),
        ("per_run", 0),
        ("user_error_steps", -1),
        ("retry_delay", -0.1),
        ("retry_delay", float("nan")),
    ],
)
def test_options_are_checked(option: str, value: Any) -> None:
    """With their key."""
    with pytest.raises(ConfigError, match=f"failures.{option} is {value}"):
        Failures(**{option: value})
