"""What ``asyncrl show --tokens`` says of a conversation."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observe.conversations import token_line

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)


def test_sampled_tokens_have_their_log_probability() -> None:
    """The others came from the prompt or from tools."""
    assert token_line({"tokens": [1, 7, 9], "logprobs": [None, -0.25, -1.5]}).plain == "tokens: 1 7(-0.25) 9(-1.5)"


def test_what_was_not_kept_says_which_option_keeps_it() -> None:
    """Or that there was no room for it."""
    assert "run.rollout_tokens" in token_line({}).plain
    assert "left out" in token_line({"tokens": None, "shortened": True}).plain


@given(st.dictionaries(st.sampled_from(["tokens", "logprobs", "shortened"]), scalars | st.lists(scalars, max_size=4)))
def test_no_content_makes_it_raise(traj: dict[str, Any]) -> None:
    """Whatever is in the line."""
    assert token_line(traj).plain.startswith("tokens: ")
