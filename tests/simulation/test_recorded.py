from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.simulation.recorded import read_run
from asyncrl.simulation.workload import GroupScript, MemberScript, TurnScript
from tests.simulation.recording import write_lines

Line = dict[str, Any]
STEP: Line = {"event": "step_finished", "time": 100.0, "n": 1, "model_step": 1, "metrics": {}}


def _segment(time: float, *, group: int = 0, member: int = 0, **values: object) -> Line:
    """A request of 2 s that waited 0.5 s for its departure."""
    return {
        "event": "segment_sampled",
        "time": time,
        "group": group,
        "member": member,
        "version": 0,
        "prompt_tokens": 40,
        "cached_tokens": 30,
        "tokens": 8,
        "queue_seconds": 0.5,
        "seconds": 2.0,
        **values,
    }


def _tool(time: float, **values: object) -> Line:
    return {"event": "tool_called", "time": time, "group": 0, "member": 0, "seconds": 0.0, "calls": 1, **values}


def _finished(time: float, *, group: int = 0, member: int = 0, **values: object) -> Line:
    event = {"event": "member_finished", "time": time, "group": group, "member": member, "reward": 0.75}
    return {**event, "turns": 1, "generated_tokens": 8, "truncated": "", **values}


def _group(time: float, group: int = 0) -> Line:
    return {"event": "group_finished", "time": time, "group": group, "seconds": 1.0}


def _scripts(folder: Path, *lines: Line) -> tuple[MemberScript, ...]:
    """The members of the only group."""
    [group] = read_run(write_lines(folder, *lines, _group(50.0), STEP)).workload.groups
    return group.members


def test_a_trajectory_becomes_a_script(tmp_path: Path) -> None:
    """Two turns, the first in two requests; replies last from an answer to the next wish, and to the reward."""
    lines = [
        _segment(10.0),
        _segment(12.0, prompt_tokens=48, cached_tokens=48, tokens=4),
        _tool(15.0),
        _segment(20.0, prompt_tokens=60, cached_tokens=50, tokens=3),
        _tool(20.0),
        _finished(21.25),
    ]
    assert _scripts(tmp_path, *lines) == (
        MemberScript(
            turns=(
                TurnScript(new_tokens=40, uncached_tokens=10, tokens=12, reply_s=5.5),
                TurnScript(new_tokens=8, uncached_tokens=10, tokens=3, reply_s=1.25),
            ),
            reward=0.75,
        ),
    )


def test_a_refilled_prefix_is_not_part_of_the_script(tmp_path: Path) -> None:
    """The simulated run has versions of its own, and decides itself what is computed again."""
    later = _segment(20.0, prompt_tokens=60, cached_tokens=0, refilled=True)
    [member] = _scripts(tmp_path, _segment(10.0), _tool(10.0), later, _tool(20.0), _finished(20.0))
    assert member.turns[1].uncached_tokens == 12


def test_a_failed_attempt_is_load_and_no_script(tmp_path: Path) -> None:
    """The second attempt begins anew."""
    failed = {"event": "member_failed", "time": 11.0, "group": 0, "member": 0, "attempt": 1, "error": "x"}
    [member] = _scripts(tmp_path, _segment(10.0, tokens=99), failed, _segment(13.0), _tool(13.0), _finished(13.0))
    assert [turn.tokens for turn in member.turns] == [8]


def test_members_that_were_cut_off_would_have_gone_on(tmp_path: Path) -> None:
    """By a budget, or by the deadline of their group: then without a reward."""
    discarded = {"event": "member_discarded", "time": 12.0, "group": 0, "member": 1, "generated_tokens": 8}
    lines = [_segment(10.0), _finished(10.0, truncated="context"), _segment(11.0, member=1), discarded]
    first, second = _scripts(tmp_path, *lines)
    assert (first.truncated, first.reward) == (True, 0.75)
    assert (second.truncated, second.reward) == (True, 0.0)


def test_only_whole_groups_are_kept(tmp_path: Path) -> None:
    """Those that were outstanding when the run ended are half a story."""
    lines = [_segment(10.0), _finished(10.0), _group(10.0), _segment(11.0, group=1), _finished(11.0, group=1), STEP]
    assert len(read_run(write_lines(tmp_path, *lines)).workload.groups) == 1


def _steps(count: int) -> Iterator[Line]:
    """Steps of 10 s by a bound of 1: 4 s of training, 2 s of optimizer, 1 s of staging; published 3 s later."""
    for n in range(1, count + 1):
        start = 10.0 * n
        yield {"event": "group_admitted", "time": start - 2.0, "group": n}
        yield {"event": "group_born", "time": start - 1.5, "group": n, "version": n - 1, "due": n}
        yield _segment(start, group=n)
        yield _finished(start, group=n)
        yield _finished(start, group=n, member=1)
        yield _group(start, group=n)
        yield {"event": "batch_taken", "time": start, "n": n, "version": n - 1, "groups": [n]}
        # 0.5 s before the pass itself go into making sequences.
        yield {"event": "chunk_trained", "time": start + 4.0, "n": n, "sequences": 2, "tokens": 16, "seconds": 3.5}
        yield {"event": "learner_stepped", "time": start + 6.0, "n": n, "seconds": 2.0}
        yield {"event": "version_committed", "time": start + 6.0, "version": n}
        yield {**STEP, "time": start + 7.0, "n": n}
        yield {"event": "version_published", "time": start + 9.0, "version": n, "seconds": 3.0, "probe_error": 0.0}


def test_costs_and_counts_are_those_of_the_run(tmp_path: Path) -> None:
    """With a trainer that does the same in every step, each cost is what it did."""
    recording = read_run(write_lines(tmp_path, *_steps(6)))
    workload = recording.workload
    assert workload.training.seconds(1, 2, 16) == pytest.approx(4.0)
    assert workload.optimizer.seconds(1) == pytest.approx(2.0)
    assert workload.staging.seconds(1) == pytest.approx(1.0)
    assert sum(workload.publication.parts(1)) == pytest.approx(3.0)
    assert sum(workload.sampling.parts(1, 8, 10)) == pytest.approx(2.0)
    assert workload.reset_s == pytest.approx(0.5)
    # Groups 1 to 6: the first two steps and the last one took those below 2 and from 5 on.
    assert workload.margins == (1, 2)
    assert [step.time for step in recording.steps] == [17.0, 27.0, 37.0, 47.0, 57.0, 67.0]
    assert (recording.max_staleness, recording.groups_per_step, recording.group_size) == (1, 1, 1)


def test_cold_first_steps_are_not_in_the_costs(tmp_path: Path) -> None:
    """They take ten times as long here; with a bound of 1 these are the first two."""
    lines = list(_steps(6))
    for line in lines:
        if line["event"] == "learner_stepped" and line["n"] in (1, 2):
            line["seconds"] = 20.0
    assert read_run(write_lines(tmp_path, *lines)).workload.optimizer.seconds(1) == pytest.approx(2.0)


def test_an_evaluation_is_nobodys_cost(tmp_path: Path) -> None:
    """Neither of staging nor of the step that it follows."""
    lines: list[Line] = []
    for line in _steps(6):
        if line["event"] == "step_finished" and line["n"] == 4:
            lines.append({"event": "evaluation_finished", "time": 0.0, "version": 4, "metrics": {}})
            lines.append({**line, "time": line["time"] + 2.5, "metrics": {"evaluation/seconds": 2.5}})
        else:
            lines.append(line)
    recording = read_run(write_lines(tmp_path, *lines))
    assert recording.workload.staging.seconds(1) == pytest.approx(1.0)
    assert [step.evaluation_s for step in recording.steps] == [0, 0, 0, 2.5, 0, 0]


def test_what_is_unknown_or_cut_short_is_ignored(tmp_path: Path) -> None:
    """A newer version may write more, and a killed run half a line."""
    lines = [_segment(10.0, colour="red"), {"event": "tea_made", "time": 1.0}, _finished(10.0), _group(10.0), STEP]
    assert len(read_run(write_lines(tmp_path, *lines, end='{"event": "step_fin')).workload.groups) == 1


def test_a_long_run_is_thinned_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 groups with room for 4, every eighth is left; every request counts as load."""
    monkeypatch.setattr("asyncrl.simulation.recorded._GROUPS", 4)
    lines = [
        line
        for group in range(20)
        for line in (
            _segment(10.0 * group, group=group),
            _finished(10.0 * group, group=group, reward=float(group)),
            _group(10.0 * group, group=group),
        )
    ]
    groups = read_run(write_lines(tmp_path, *lines, STEP)).workload.groups
    assert [group.members[0].reward for group in groups] == [0.0, 8.0, 16.0]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([_segment(10.0)], "finished no step"),
        ([_segment(10.0), STEP], "finished no group"),
        ([STEP, {"event": "segment_sampled", "time": 1.0}], "line 2 of .* is no event"),
        ([{"name": "something else"}], "line 1 of .* is no event"),
    ],
)
def test_a_run_that_says_too_little_is_refused(tmp_path: Path, lines: list[Line], message: str) -> None:
    """With the key, the folder and what is wrong with it."""
    with pytest.raises(ConfigError, match=f"--from.*{message}"):
        read_run(write_lines(tmp_path, *lines))


def test_a_folder_without_events_is_refused(tmp_path: Path) -> None:
    """It is no run directory."""
    with pytest.raises(ConfigError, match=r"--from is .*events.jsonl cannot be read: No such file"):
        read_run(tmp_path)


def test_a_group_is_a_value(tmp_path: Path) -> None:
    """Two members in their order, whoever ended first."""
    lines = [_segment(10.0), _segment(11.0, member=1), _finished(11.0, member=1, reward=1.0), _finished(12.0)]
    [group] = read_run(write_lines(tmp_path, *lines, _group(12.0), STEP)).workload.groups
    assert isinstance(group, GroupScript)
    assert [member.reward for member in group.members] == [0.75, 1.0]
