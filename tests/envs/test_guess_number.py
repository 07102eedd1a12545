"""The demo's game."""

from __future__ import annotations

import json

import pytest

from asyncrl.types import ToolCall, Trajectory
from envs.guess_number.env import GuessNumber, train_rows


async def _play(number: int, guesses: list[int | None]) -> tuple[GuessNumber, Trajectory, list[str]]:
    """Play until the game or the guesses end; None is a message without a call."""
    env = GuessNumber()
    traj = Trajectory(id="t", group=0, member=0, row=None, seed=0)
    await env.reset({"number": number, "seed": 0})
    hints: list[str] = []
    for guess in guesses:
        traj.turns += 1
        traj.tool_calls = [] if guess is None else [ToolCall(name="guess", arguments={"number": guess})]
        messages = await env.on_turn(traj)
        if messages is None:
            break
        assert isinstance(messages, list)
        hints.append(messages[0]["content"])
    return env, traj, hints


@pytest.mark.parametrize(
    ("number", "guesses", "hints", "reward"),
    [
        (4, [4], [], 1.0),
        (7, [4, 8, 6, 7], ["higher", "lower", "higher"], 0.7),
        (7, [4, 3], ["higher"], 0.1),
        (7, [9, 9], ["lower"], 0.1),
        (0, [9, 8, 7, 6, 5], ["lower"] * 4, 0.5),
        (3, [None], [], 0.0),
        (3, [1, None], ["higher"], 0.1),
    ],
)
async def test_hints_end_and_reward(number: int, guesses: list[int | None], hints: list[str], reward: float) -> None:
    """Right early is best; a guess that is ruled out, and a message without a guess, end the game."""
    env, traj, seen = await _play(number, guesses)
    assert seen == hints
    assert await env.reward(traj, None) == pytest.approx(reward)


async def test_a_game_that_is_brought_back_goes_on() -> None:
    """A hint that was given before counts after it, and so does a win."""
    env, traj, _ = await _play(7, [4])
    traj.row = {"number": 7, "seed": 0}
    again = GuessNumber()
    await again.restore(traj, json.loads(json.dumps(await env.snapshot(traj))))
    traj.tool_calls, traj.turns = [ToolCall(name="guess", arguments={"number": 3})], 2
    assert await again.on_turn(traj) is None
    assert await again.reward(traj, None) == pytest.approx(0.1)
    won, traj, _ = await _play(7, [7])
    traj.row = {"number": 7, "seed": 0}
    await again.restore(traj, await won.snapshot(traj))
    assert await again.reward(traj, None) == 1.0


def test_rows_are_balanced() -> None:
    """Each number once in every ten, which is a batch of the recipe, in an order that is not always the same."""
    rows = train_rows()
    tens = [[row["number"] for row in rows[i : i + 10]] for i in range(0, len(rows), 10)]
    assert all(sorted(ten) == list(range(10)) for ten in tens)
    assert len({tuple(ten) for ten in tens}) > 90
    assert len({row["seed"] for row in rows}) == len(rows)
