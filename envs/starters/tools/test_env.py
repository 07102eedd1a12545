"""Tests of the environment: a scripted model says what the test wants it to say, and everything else is real."""

from asyncrl.testing import ScriptedModel, call, run_virtual

from env import Shop

ROW = {"item": "apple", "price": 3}


def play(*turns):
    """The conversation in which the model says ``turns``; pytest shows it if a test fails."""
    model = ScriptedModel(turns)
    traj = run_virtual(model.play, Shop, ROW)
    print(model.transcript)
    return traj


def test_a_price_that_was_looked_up_is_rewarded():
    traj = play(["let me see", call("price", item="apple")], "3")
    assert traj.reward == 1.0
    assert [message["content"] for message in traj.messages if message["role"] == "tool"] == ["3"]


def test_a_price_that_was_guessed_is_not():
    assert play("3").reward == 0.0


def test_each_part_of_the_way_earns_a_little():
    assert play(call("price", item="apple"), "4").reward == 0.3
    assert play(call("price", item="tea"), "4").reward == 0.01


def test_a_wrong_call_is_told_to_the_model():
    traj = play(call("price", item="tea"), call("price", item="apple"), "3")
    assert traj.reward == 1.0
    assert "sold out" in traj.messages[2]["content"]
