"""Environments that a person might break: the command names the cause, the place and the next step, in a few lines.

What shows in the first row is exit code 2: the command looks at it before it trains.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import asyncrl as rl
from asyncrl.cli.main import main
from asyncrl.recipe import compose as composition
from asyncrl.sampling.base import SegmentRequest
from asyncrl.testing import END, ScriptedLearner, ScriptedSampler, scripted_policy
from tests.faults.case import HermesRenderer

RECIPE = """
[model]
path = "model"
[env]
factory = "env.py:Sums"
[data]
train = "env.py:rows"
[rollout]
environment_timeout = 0.3
[failures]
retry_delay = 0.0
[trainer]
steps = 20
groups_per_step = 2
group_size = 4
[optimizer]
lr = 1e-3
[checkpoint]
enabled = false
"""
ENV = '''
"""Adding two numbers, with a calculator."""
import random
import time

import asyncrl as rl


class Sums(rl.Env):
    recovery = "snapshot"

    def __init__(self):
        self.calls = 0

    async def reset(self, row):
        return [{"role": "user", "content": f"{row['a']} + {row['b']} ="}]

    @rl.tool(timeout=0.2)
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    async def on_turn(self, traj):
        return await super().on_turn(traj)

    async def reward(self, traj, row):
        return random.random() * (traj.messages[2]["content"] == "3")

    async def on_truncated(self, traj, row, cause):
        return 0.0

    async def snapshot(self, traj):
        return {}

    async def restore(self, traj, state):
        pass

    async def close(self):
        pass


def rows():
    return [{"a": a, "b": 2, "answer": a + 2} for a in range(8)]
'''
CALL = b'<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def _write(request: SegmentRequest) -> list[int]:
    """Calls the tool once, then answers; every fourth answer never ends."""
    said = request.input_ids.astype(np.uint8).tobytes()
    if CALL not in said:
        return [*CALL, END]
    return [*b"3", END]


@dataclass(frozen=True)
class Broken:
    """One way to break the environment, and what must be said of it."""

    old: str
    new: str
    says: str
    """A regular expression."""
    line: str = ""
    """Of ``env.py``, by what it begins with: the place. Empty: the cause names what is wrong by itself."""
    code: int = 1
    recipe: tuple[str, str] = ("", "")
    advice: str = "mend that line|What to do"
    options: tuple[str, ...] = field(default=())


BROKEN = {
    "__init__ raises": Broken(
        "self.calls = 0", "self.calls = missing", "NameError: name 'missing'", "self.calls", code=2
    ),
    "reset raises": Broken(
        "return [{",
        "assert 0, 'no row'\n        return [{",
        "AssertionError: no row",
        "assert 0",
        code=2,
    ),
    "wrong key in row": Broken("row['b']} =", "row['bb']} =", "KeyError: 'bb'", "return [{", code=2),
    "tool raises": Broken(
        "return str(a + b)",
        "return str(a + c)",
        "NameError: name 'c' is not defined",
        "return str(a + c)",
        recipe=("steps = 20", "steps = 3"),
    ),
    "on_turn raises": Broken(
        "await super().on_turn(traj)",
        "1 / 0",
        "ZeroDivisionError: division by zero",
        "return 1",
    ),
    "reward raises": Broken("random.random()", "float('three')", "ValueError: could not convert", "return float("),
    "on_truncated raises": Broken(
        "return 0.0",
        "raise OSError('disk')",
        "OSError: disk",
        "raise OSError",
        recipe=("[optimizer]", "[budget]\nmax_turns = 1\n[optimizer]"),
    ),
    "snapshot raises": Broken(
        "return {}",
        "raise OSError('no state')",
        "OSError: no state",
        "raise OSError",
        recipe=("enabled = false", ""),
    ),
    "close raises": Broken(
        "        pass\n\n\ndef",
        "        open('x')\n\n\ndef",
        "environment_not_closed",
        "open('x')",
        code=0,
        recipe=("steps = 20", "steps = 3"),
    ),
    "reset gives text": Broken(
        "return [{", 'return "2 + 2"\n        return [{', "the answer is '2 \\+ 2', but must be", code=2
    ),
    "reward gives text": Broken(
        "return random",
        'return "1.0" or random',
        "the reward is '1.0', but must be a number",
    ),
    "reward gives NaN": Broken("random.random()", "float('nan')", "the reward is nan, but must be a finite number"),
    "on_turn gives a message": Broken(
        "await super().on_turn(traj)",
        '{"role": "user", "content": "no"}',
        "the answer is {'role': .*a list of messages",
    ),
    "tool gives a number": Broken(
        "return str(a + b)", "return a + b", "what tool 'add' returned is 3, but must be text"
    ),
    "reward is always 0": Broken("return random", "return 0 * random", "have the reward of their whole group \\(0\\)"),
    "reward is always equal": Broken(
        "return random",
        "return 0.7 or random",
        "reward of their whole group \\(0.7\\)",
    ),
    "tool hangs": Broken(
        "return str(a + b)",
        "time.sleep(2)\n        return ''",
        "tool 'add' ran past its deadline of 0.2 s",
        "time.sleep",
    ),
    "reset hangs": Broken(
        "return [{",
        "await __import__('anyio').sleep(60)\n        return [{",
        "Sums.reset ran past its deadline of 0.3 s",
        "await __import__",
    ),
    "no such file": Broken(
        "", "", "there is no file '.*nowhere.py'", code=2, recipe=("env.py:Sums", "nowhere.py:Sums")
    ),
    "no such class": Broken("", "", "did you mean 'Sums'", code=2, recipe=("env.py:Sums", "env.py:Sum")),
    "wrong recipe key": Broken("", "", "did you mean 'steps'", code=2, recipe=("steps = 20", "stesp = 20")),
    "syntax error": Broken(
        "async def reset(self, row):", "async def reset(self, row)", "SyntaxError", "async def reset(", code=2
    ),
    "import fails": Broken(
        "import time", "import tiem", "ModuleNotFoundError: No module named 'tiem'", "import tiem", code=2
    ),
    "rows raise": Broken(
        "for a in range(8)]",
        "for a in open('rows.txt')]",
        "No such file",
        'return [{"a"',
        code=2,
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe's folder; the model and its servers are scripted."""
    learner: Any = ScriptedLearner()
    policy = scripted_policy(sampler=ScriptedSampler(tokens=_write), learner=learner)

    def make_engine(_: rl.Policy, **options: Any) -> rl.RolloutEngine:
        return rl.RolloutEngine(policy, **options | {"renderer": HermesRenderer()})

    monkeypatch.setattr(composition, "TorchLearner", lambda *args, **options: learner)
    monkeypatch.setattr(composition, "Policy", lambda *args, **options: policy)
    monkeypatch.setattr(composition, "RolloutEngine", make_engine)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text("{}", encoding="utf-8")
    return tmp_path


def _run(folder: Path, broken: Broken, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    assert broken.old in ENV
    assert broken.recipe[0] in RECIPE
    (folder / "env.py").write_text(ENV.replace(broken.old, broken.new, 1) if broken.old else ENV, encoding="utf-8")
    text = RECIPE.replace(*broken.recipe, 1) if broken.recipe[0] else RECIPE
    (folder / "recipe.toml").write_text(text, encoding="utf-8")
    code = main(["train", str(folder / "recipe.toml"), "--run-dir", str(folder / "run"), *broken.options])
    return code, *capsys.readouterr()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_environment_is_explained(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By its cause, the user's file and line, and the next step, in at most fifteen lines; it is no success."""
    broken = BROKEN[name]
    code, out, said = _run(folder, broken, capsys)
    assert (code, bool(out)) == (broken.code, not broken.code), said
    last = said[said.rindex("asyncrl: ") :]
    assert len(last.splitlines()) <= 15, last
    assert len(said.splitlines()) <= 40, said
    assert re.search(broken.says, said), said
    if broken.line:
        source = (folder / "env.py").read_text(encoding="utf-8").splitlines()
        number = next(number for number, text in enumerate(source, 1) if text.strip().startswith(broken.line))
        assert f"{folder}/env.py:{number}" in said, said
    if code == 1:
        assert re.search(broken.advice, last), last
    assert "Traceback (most recent call last)" not in said
    assert said.count("member_failed") <= 8, said


def test_the_sound_environment_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that each of the cases is broken by what it changes."""
    code, out, said = _run(folder, Broken("", "", ""), capsys)
    assert code == 0, said
    assert json.loads(out)["versions"] == 20
