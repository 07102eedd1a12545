"""What ``asyncrl show`` says of a run directory, whatever is in it."""

from __future__ import annotations

import json
import math
import os
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.cli.main import main
from asyncrl.files import locked
from asyncrl.observe.advice import advice, trend
from asyncrl.observe.conversations import conversation, visible
from asyncrl.observe.report import report, sparkline
from asyncrl.observe.rollouts import RolloutFile, read_rollouts
from asyncrl.observe.runfiles import read_run

STEP: dict[str, float] = {
    "reward/mean": 0.5,
    "reward/zero_variance_group_frac": 0.1,
    "staleness/span_age_p50": 1.0,
    "staleness/span_age_p99": 2.0,
    "staleness/span_age_max": 2.0,
    "length/generated_p50": 50.0,
    "length/generated_p99": 90.0,
    "truncated/generated_tokens": 0.0,
    "sampling/generated_tokens": 100.0,
    "sampling/generated_tokens_per_second": 100.0,
    "train/batch_seconds": 10.0,
    "train/wait_for_samples_seconds": 3.0,
    "train/barrier_seconds": 1.0,
    "train/forward_backward_seconds": 4.0,
    "train/optimizer_seconds": 1.0,
    "train/publication_seconds": 1.0,
    "train/updated": 1.0,
    "train/active_sequences": 16.0,
    "groups/failed_members": 0.0,
    "loss/loss": 0.25,
}
PLAN = {"max_staleness": 2, "loss": "CISPO", "optimizer.lr": 0.001}


def trajectory(**other: Any) -> dict[str, Any]:
    """A line of a file of rollouts."""
    return {
        "n": 3,
        "evaluation": "",
        "version": 2,
        "group": 5,
        "member": 1,
        "best": False,
        "worst": False,
        "reward": 0.5,
        "metrics": {"correct": 1.0},
        "truncated": None,
        "error": None,
        "turns": 2,
        "generated_tokens": 7,
        "context_tokens": 30,
        "seconds": {"sampling": 0.25, "tool search": 2.0},
        "segments": [{"version": 1, "age": 1, "tokens": 3}, {"version": 2, "age": 0, "tokens": 4}],
        "row": {"question": "what?"},
        "messages": [
            {"role": "user", "content": "what?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "function": {"name": "search", "arguments": {"query": "x"}}}],
            },
            {"role": "tool", "name": "search", "content": "found\nit"},
            {"role": "assistant", "content": "\x1b[2J42"},
        ],
        **other,
    }


def write_run(
    folder: Path,
    *,
    steps: list[dict[str, Any]] | None = None,
    events: list[dict[str, Any]] | None = None,
    rollouts: dict[str, list[dict[str, Any]]] | None = None,
    about: dict[str, Any] | None = None,
) -> Path:
    """A run directory with these lines."""
    folder.mkdir(exist_ok=True)
    whole = {"configuration": {"env": {"factory": "env.py:Env"}}, "steps": 20, "plan": PLAN, **(about or {})}
    (folder / "run.json").write_text(json.dumps(whole))
    for name, lines in (("metrics.jsonl", steps), ("events.jsonl", events)):
        if lines is not None:
            (folder / name).write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    for name, lines in (rollouts or {}).items():
        (folder / "rollouts").mkdir(exist_ok=True)
        (folder / "rollouts" / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def step_lines(count: int, **other: float) -> list[dict[str, Any]]:
    """The metrics of so many equal steps."""
    return [{"n": n, "model_step": n, "time": float(n), **STEP, **other} for n in range(1, count + 1)]


def shown(folder: Path, last: RolloutFile | None = None, width: int = 100) -> str:
    """The report as text."""
    return "\n".join(line.plain for line in report(read_run(folder), last, now=0.0, width=width))


def test_a_run_that_has_just_begun_is_shown(tmp_path: Path) -> None:
    """There is no file but run.json yet."""
    text = shown(write_run(tmp_path))
    assert "after step 0 of 20" in text
    assert "No step is done yet" in text


def test_a_healthy_run_fits_a_screen(tmp_path: Path) -> None:
    """Everything about a run of usual size, in at most 40 lines of the width that is there."""
    events = [
        {"event": "evaluation_finished", "time": 1.0, "version": version, "metrics": {"reward_mean": version / 10}}
        for version in range(6)
    ] + [
        {
            "event": "barrier_opened",
            "time": 1.0,
            "wait": {"seconds": n, "group": n, "member": 0, "doing": "tool search"},
        }
        for n in range(9)
    ]
    steps = [line | {"reward/mean": line["n"] / 20} for line in step_lines(20)]
    rollouts = {"step-000003.jsonl": [trajectory(best=True), trajectory(worst=True, reward=0.0)]}
    folder = write_run(tmp_path, steps=steps, events=events, rollouts=rollouts)
    [last] = read_rollouts(folder)
    text = shown(folder, last)
    assert "finished, 20 steps" in text
    assert "0.05 -> 1" in text and "rising" in text
    assert "8 s for group 8, member 0, which was busy with: tool search" in text
    assert "nothing stands out" in text
    assert "best: reward 0.5, group 5, member 1, 2 turns" in text
    assert len(text.splitlines()) <= 40
    for width in (80, 100, 140):
        assert max(map(len, shown(folder, last, width).splitlines()[1:])) <= width


def test_a_run_that_goes_on_is_told_by_its_lock(tmp_path: Path) -> None:
    """Looking does not take the lock away, nor keep it."""
    folder = write_run(tmp_path, steps=step_lines(2))
    with locked(folder, "run_dir"):
        assert "running, 2 of 20 steps done" in shown(folder)
    assert "not running" in shown(folder)
    with locked(folder, "run_dir"):
        pass


def test_how_a_run_ended_is_said_until_it_goes_on(tmp_path: Path) -> None:
    """With its error; a run that is resumed and then killed has not ended in that way."""
    failed = {"event": "run_ended", "time": 2.0, "reason": "failed", "error": "KeyError: 'x'", "where": "env.py:3"}
    text = shown(write_run(tmp_path, steps=step_lines(2), events=[failed]))
    assert "failed after step 2 of 20" in text
    assert "KeyError: 'x' (env.py:3)" in text
    published = {"event": "version_published", "time": 3.0, "version": 2}
    assert "not running" in shown(write_run(tmp_path, steps=step_lines(2), events=[failed, published]))


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    """A half last line is none of them: it is being written."""
    folder = write_run(tmp_path, steps=step_lines(3), events=[{"event": "barrier_opened", "wait": 3}])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"n": \xff}\n[1]\n{"n":"x"}\n{"n":4')
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"event":"member_failed",\x00\n\n')
    run = read_run(folder)
    assert [step["n"] for step in run.steps] == [1, 2, 3]
    assert run.unreadable == 5
    (folder / "run.json").write_bytes(b"{")
    assert "5 lines of its files cannot be read" in shown(folder)


def test_steps_that_were_made_again_count_once(tmp_path: Path) -> None:
    """A killed run is resumed a few steps before its last one."""
    lines = [*step_lines(5), *[line for line in step_lines(6) if line["n"] > 3]]
    assert [step["n"] for step in read_run(write_run(tmp_path, steps=lines)).steps] == [1, 2, 3, 4, 5, 6]


def test_failures_are_folded_by_kind_and_place(tmp_path: Path) -> None:
    """The numbers in their texts differ."""
    failures = [
        {"event": "member_failed", "group": n, "member": 0, "attempt": 1, "error": f"KeyError: 'k{n}'", "where": place}
        for n, place in enumerate(["env.py:3 in reward"] * 5 + [""] * 3)
    ]
    drops = [{"event": "group_dropped", "group": 1, "reason": reason} for reason in ("failed", "run_ended")]
    notice = {"event": "notice", "name": "loop_held", "level": "warning", "keys": {"function": "reward"}}
    notice |= {"keys": {"function": "Sums.reward (/home/me/long/way/env.py:7)"}, "hint": "make it a plain def"}
    text = shown(write_run(tmp_path, steps=step_lines(3), events=[*failures, *drops, notice]))
    assert "5 x KeyError: 'k4'  (env.py:3 in reward)" in text
    assert "3 x KeyError: 'k7'" in text
    assert "failed 1" in text and "run_ended" not in text
    assert "1 x loop_held: function Sums.reward (env.py:7)\n" in text
    assert "-> make it a plain def" in text


def test_a_reward_that_is_no_float_is_shown(tmp_path: Path) -> None:
    """The line is damaged, and the others are still there."""
    kept = [{"group": 0, "member": n, "messages": [], "reward": reward} for n, reward in enumerate([10**400, 0.5])]
    last = RolloutFile(path=tmp_path, n=1, evaluation="", trajectories=kept, left_out=0, unreadable=0)
    lines = report(read_run(write_run(tmp_path, steps=step_lines(1))), last, now=0.0, width=100)
    assert any("worst: reward 0.5" in line.plain for line in lines)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(st.text(max_size=3), scalars, max_size=2)
names = st.sampled_from(
    ["notice", "barrier_opened", "member_failed", "tool_failed", "group_dropped", "evaluation_finished", "run_ended"]
)
metrics = st.dictionaries(st.sampled_from([*STEP, "n", "time", "rollout/tool_calls/x", "rollout/tool_calls"]), values)
keys = st.sampled_from(
    ["wait", "error", "where", "reason", "name", "level", "keys", "metrics", "seconds", "doing", "tool", "version"]
)
SLOW_FOLDERS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SLOW_FOLDERS
@given(
    steps=st.lists(metrics | metrics.map(lambda line: {**STEP, "n": 1, **line}), max_size=6),
    events=st.lists(st.tuples(names, st.dictionaries(keys, values)).map(lambda pair: {"event": pair[0], **pair[1]})),
    about=st.dictionaries(st.sampled_from(["configuration", "plan", "steps", "started", "origin"]), values),
    width=st.integers(40, 200),
)
def test_no_content_of_the_files_makes_it_raise(
    tmp_path: Path, steps: list[Any], events: list[Any], about: dict[str, Any], width: int
) -> None:
    """Whatever has been written, by any version."""
    assert shown(write_run(tmp_path, steps=steps, events=events, about=about), None, width)


messages = st.lists(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("role", "content", "tool_calls", "name"), values)), max_size=2
)
replaced = st.dictionaries(st.sampled_from(sorted({*trajectory()} - {"group", "member", "messages"})), values)
lines = st.builds(lambda other, said: trajectory(**other, messages=said), replaced, messages)


@SLOW_FOLDERS
@given(lines=st.lists(lines, max_size=3))
def test_no_conversation_makes_it_raise(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    """Whatever was kept of it; and nothing that acts on a terminal comes through."""
    file = RolloutFile(path=tmp_path, n=1, evaluation="", trajectories=lines, left_out=0, unreadable=0)
    text = "".join(part.plain for line in lines for part in conversation(line))
    text += shown(write_run(tmp_path, steps=step_lines(1)), file)
    assert not any((ord(sign) < 32 and sign not in "\n\t") or 0x7F <= ord(sign) < 0xA0 for sign in text)


def test_a_conversation_is_read_by_role(tmp_path: Path) -> None:
    """Header, numbers, row, then what was said; characters that would act on the terminal are written out."""
    text = [line.plain for line in conversation(trajectory(best=True, truncated="turns"))]
    assert text == [
        "step 3  group 5  member 1 (best of its group)  reward 0.5  cut off: turns",
        "metrics: correct 1",
        "sampled: 7 tokens of 30 in its context, 2 turns, policy version 1 to 2, age 0 to 1 when trained",
        "seconds: tool search 2, sampling 0.25",
        'row: {"question": "what?"}',
        "user: what?",
        'assistant calls search(query="x")',
        "tool search: found",
        "    it",
        "assistant: \\x1b[2J42",
    ]


@given(st.text())
def test_visible_text_is_harmless_and_readable(text: str) -> None:
    """What can be seen stays as it is."""
    assert visible(text).isprintable() or any(sign.isspace() or not sign.isprintable() for sign in text)
    if all(sign in string.ascii_letters + " \n\t" for sign in text):
        assert visible(text) == text


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)), st.integers(1, 60))
def test_sparklines_have_their_width(values: list[float], width: int) -> None:
    """Any numbers."""
    assert len(sparkline(values, width)) == min(len(values), width)
    assert trend(values) in ("rising", "falling", "level", "no clear trend", "too few to tell")


def test_trends_are_told_from_noise() -> None:
    """A few typical curves."""
    assert trend([1, 2, 3, 4, 5, 6]) == "rising"
    assert trend([6, 5, 4, 3, 2.5, 2]) == "falling"
    assert trend([3, 3, 3, 3, 3]) == "level"
    assert trend([1, 5, 2, 4, 1, 5, 2, 4, 1.5]) == "no clear trend"
    assert trend([1, math.nan, 2]) == "too few to tell"


WAIT = {"event": "barrier_opened", "wait": {"seconds": 9.0, "group": 1, "member": 0, "doing": "tool search"}}
FAILED = {"event": "member_failed", "group": 1, "member": 0, "error": "KeyError: 'x'", "where": "env.py:3 in reward"}


def rising(count: int) -> list[dict[str, Any]]:
    """Steps whose reward rises."""
    return [line | {"reward/mean": line["n"] / count} for line in step_lines(count)]


def shrinking(count: int) -> list[dict[str, Any]]:
    """Steps whose reward rises and whose answers get short."""
    return [line | {"length/generated_p50": 100.0 / line["n"]} for line in rising(count)]


def evaluations(*rewards: float) -> list[dict[str, Any]]:
    """Events of evaluations."""
    return [
        {"event": "evaluation_finished", "version": n, "metrics": {"reward_mean": reward}}
        for n, reward in enumerate(rewards)
    ]


ADVICE: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = [
    ("Most members fail", step_lines(5, **{"groups/failed_members": 30.0}), [FAILED]),
    ("Most members fail", [], [FAILED]),
    ("20% of the members fail", step_lines(5, **{"groups/failed_members": 4.0}), [FAILED]),
    ("changed nothing", step_lines(4, **{"train/updated": 0.0}), []),
    ("trainer.group_size", step_lines(5, **{"reward/zero_variance_group_frac": 0.9}), []),
    ("schedule.concurrency", step_lines(5, **{"train/wait_for_samples_seconds": 8.0}), []),
    ("(longest: tool search)", step_lines(5, **{"train/barrier_seconds": 5.0}), [WAIT]),
    ("lower trainer.max_staleness", step_lines(5, **{"train/forward_backward_seconds": 8.0}), []),
    ("publishing weights", step_lines(5, **{"train/publication_seconds": 5.0}), []),
    ("budget.max_generated_tokens", step_lines(5, **{"truncated/generated_tokens": 0.4}), []),
    ("budget.max_context_tokens", step_lines(5, **{"truncated/context": 0.4}), []),
    ("budget.max_turns", step_lines(5, **{"truncated/turns": 0.4}), []),
    ("calls no tool", step_lines(5, **{"rollout/tool_calls": 0.0, "rollout/tool_calls/search": 0.0}), []),
    ("tool calls end with an error", step_lines(5, **{"rollout/tool_calls": 9.0, "rollout/tool_errors": 8.0}), []),
    ("answers get shorter", shrinking(20), []),
    ("falls on held-out rows", rising(20), evaluations(0.9, 0.8, 0.7, 0.6, 0.5)),
    ("the reward does not rise", step_lines(60), []),
    ("too old to be trained", step_lines(5, **{"staleness/frac_masked": 0.5}), []),
    ("worth 10% of as many", step_lines(5, **{"ratio/effective_sample_frac": 0.1}), []),
    ("never trained", step_lines(5, **{"sampling/wasted_tokens": 50.0}), []),
    ("held all conversations up for 3.0 s", step_lines(5, **{"loop/lag_max_seconds": 3.0}), []),
]


@pytest.mark.parametrize(("said", "steps", "events"), ADVICE, ids=[case[0] for case in ADVICE])
def test_each_rule_fires_where_it_fits(
    tmp_path: Path, said: str, steps: list[dict[str, Any]], events: list[dict[str, Any]]
) -> None:
    """One sentence with the option to change, and none of a run that is well."""
    [sentence] = advice(read_run(write_run(tmp_path / "ill", steps=steps, events=events)))
    assert said in sentence
    healthy = read_run(write_run(tmp_path / "well", steps=rising(20), events=evaluations(0.1, 0.2, 0.3, 0.4, 0.5)))
    assert advice(healthy) == []


def test_synchronous_runs_are_told_of_staleness(tmp_path: Path) -> None:
    """Where the trainer waits, sampling could go on."""
    steps = step_lines(5, **{"train/wait_for_samples_seconds": 8.0, "train/forward_backward_seconds": 7.0})
    run = read_run(write_run(tmp_path, steps=steps, about={"plan": {"max_staleness": 0}}))
    [sentence] = advice(run)
    assert "trainer.max_staleness = 1" in sentence
    plan = {"max_staleness": 3, "minibatches": 2, "epochs": 2}
    [sentence] = advice(read_run(write_run(tmp_path / "updates", steps=steps, about={"plan": plan})))
    assert "trainer.max_staleness = 7" in sentence


def test_equal_answers_are_pointed_out(tmp_path: Path) -> None:
    """To one row they may well be the same, and different ones are no reason."""
    run = read_run(write_run(tmp_path, steps=step_lines(3)))
    assert "word for word" in advice(run, ["yes"] * 4)[0]
    assert advice(run, ["yes", "no", "yes", "yes"]) == []
    assert advice(run, ["yes"] * 3) == []


def run_command(*arguments: str | Path) -> int:
    """Run ``asyncrl show``."""
    return main(["show", *map(str, arguments)])


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A run with conversations of the steps 3 and 8 and of an evaluation."""
    rollouts = {
        "step-000003.jsonl": [trajectory()],
        "step-000008.jsonl": [
            trajectory(n=8, group=group, member=member, best=member == 0, worst=member == 1, reward=group - member / 2)
            for group in (1, 2)
            for member in (0, 1)
        ],
        "eval-000008-heldout.jsonl": [trajectory(n=8, evaluation="heldout", best=True, row="Über alles")],
    }
    return write_run(tmp_path, steps=step_lines(8), events=[], rollouts=rollouts)


def test_conversations_are_chosen(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By step, group, rank, kind and text."""

    def heads(*arguments: str) -> list[str]:
        assert run_command(kept, *arguments) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        return [line.partition("  reward")[0] for line in out.splitlines() if "  reward" in line]

    assert heads("--step", "3") == ["step 3  group 5  member 1"]
    best = "member 0 (best of its group)"
    worst = "member 1 (worst of its group)"
    assert heads("--best") == [f"step 8  group 2  {best}", f"step 8  group 1  {best}"]
    assert heads("--worst") == [f"step 8  group 1  {worst}", f"step 8  group 2  {worst}"]
    assert heads("--group", "2") == [f"step 8  group 2  {best}", f"step 8  group 2  {worst}"]
    assert heads("--evaluation") == ["evaluation heldout after step 8  group 5  member 1 (best of its group)"]
    assert heads("--evaluation", "--grep", "über")
    assert heads("--grep", "nowhere") == []
    assert len(heads("--grep", "SEARCH(")) == 5
    assert len(heads("--limit", "1")) == 1
    assert len(heads("--limit", "0")) == 4
    assert heads("--group", "0") == []


def test_lines_are_printed_as_json(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For other programs."""
    assert run_command(kept, "--json", "--step", "3") == 0
    assert json.loads(capsys.readouterr().out) == trajectory()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "6"], "--step is 6, but must be a step of which conversations are kept: the nearest are 3 and 8"),
        (["--limit", "-1"], "--limit is -1"),
        (["--step", "3", "--evaluation"], "an evaluation followed"),
    ],
)
def test_what_is_not_there_is_refused(
    kept: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """With what is."""
    assert run_command(kept, *arguments) == 2
    assert said in capsys.readouterr().err


def test_folders_without_a_run_or_conversations_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The option that keeps them is named; the report needs none."""
    assert run_command(tmp_path) == 2
    assert "run.json" in capsys.readouterr().err
    folder = write_run(tmp_path / "old", steps=step_lines(2))
    assert run_command(folder, "--best") == 2
    assert "run.rollouts" in capsys.readouterr().err
    assert run_command(folder) == 0
    assert "Where a step's time goes" in capsys.readouterr().out


@pytest.mark.slow
def test_a_closed_pipe_is_no_error_and_torch_is_not_loaded(kept: Path) -> None:
    """As with ``asyncrl show RUN --grep x | head``."""
    read, write = os.pipe()
    os.close(read)
    code = (
        "import sys; from asyncrl.cli.main import main; code = main(sys.argv[1:]);"
        "sys.exit(code or 10 * bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    for arguments in ([], ["--limit", "0"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "show", str(kept), *arguments],
            stdout=write,
            stderr=subprocess.PIPE,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
    os.close(write)
