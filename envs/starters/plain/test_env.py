"""Tests of the environment: a scripted model says what the test wants it to say, and everything else is real."""

import pytest
from asyncrl.testing import ScriptedModel, run_virtual

from env import Digits

ROW = {"question": "seven", "answer": "7"}


@pytest.mark.parametrize(("said", "reward"), [("7", 1.0), (" 7\n", 1.0), ("8", 0.0), ("seven", 0.0), ("", 0.0)])
def test_the_right_digit_is_rewarded(said, reward):
    model = ScriptedModel([said])
    traj = run_virtual(model.play, Digits, ROW)
    assert traj.reward == reward, model.transcript
