"""Tests of the environment: a scripted model says what the test wants, on a clock on which waiting takes no time."""

import asyncrl as rl
import httpx
import pytest
from asyncrl.testing import ScriptedModel, run_virtual

from env import ATTEMPTS, Judge, Judged

ROW = {"question": "seven", "answer": "7"}


@pytest.mark.parametrize(("said", "reward"), [("7", 1.0), ("8", 0.0), ("seven", 0.0)])
def test_the_grade_is_the_reward(said, reward):
    traj = run_virtual(ScriptedModel([said]).play, Judged, ROW)
    assert traj.reward == reward


def test_a_judge_that_is_down_is_no_reward(monkeypatch):
    asked = []

    def down(request):
        asked.append(request)
        raise httpx.ConnectError("refused")

    monkeypatch.setattr("env.stand_in", down)
    env = Judged()
    env.judge = Judge("", "judge")
    with pytest.raises(rl.InfrastructureError, match="no grade in 3 attempts: ConnectError: refused"):
        run_virtual(ScriptedModel(["7"]).play, env, ROW)
    assert len(asked) == ATTEMPTS
