"""What is said of the error that ends a command."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ConfigError, InvalidValue, ServerUnavailable
from asyncrl.observe.lastwords import last_words


def _raised(error: Exception, depth: int) -> Exception:
    def fail(left: int) -> None:
        if left:
            fail(left - 1)
        raise error

    def other(left: int) -> None:
        fail(left)

    with pytest.raises(type(error)) as caught:
        other(depth)
    return caught.value


@given(
    st.text(max_size=300),
    st.integers(0, 30),
    st.lists(st.text(max_size=60), max_size=12),
    st.sampled_from([ValueError, KeyError, ConfigError, InvalidValue, ServerUnavailable]),
    st.booleans(),
)
def test_it_is_never_long(
    text: str, depth: int, notes: list[str], kind: Callable[[str], Exception], begun: bool
) -> None:
    """Fifteen lines, whatever the error says; the place is always in it."""
    error = _raised(kind(text), depth)
    for note in notes:
        error.add_note(note)
    said = last_words(error, refused=isinstance(error, ConfigError) and not begun)
    assert len(said.splitlines()) <= 15
    assert f"{__file__}:" in said
    assert "mend that line" in said


def test_an_error_of_the_machinery_has_no_line_to_mend() -> None:
    """Nobody's code but ours was in it."""
    said = last_words(ServerUnavailable("no server answered"), refused=False)
    assert said.splitlines() == [
        "failed: ServerUnavailable: no server answered",
        "--debug shows the whole traceback",
    ]


def test_a_wrong_option_is_what_it_says() -> None:
    """It has the key, the value and what is allowed; there is nothing to add."""
    assert last_words(ConfigError("trainer.steps is 0, but must be at least 1"), refused=True).count("\n") == 0
