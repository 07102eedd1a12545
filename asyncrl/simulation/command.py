"""``asyncrl simulate``: a grid of schedules, each a simulated run, and what came of them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from asyncrl.errors import ConfigError
from asyncrl.servers.machine import has_module
from asyncrl.simulation.grid import Admits, Point, RunOptions, default_grid, given_grid
from asyncrl.simulation.options import NO_MATPLOTLIB, SimulationOptions
from asyncrl.simulation.recorded import Recording, read_run
from asyncrl.simulation.report import as_json, describe, print_table, rate
from asyncrl.simulation.simulate import Outcome, Simulation, total_steps
from asyncrl.simulation.workload import Workload, make_workload, steps_per_hour

__all__ = ["default_steps", "run_simulation"]

_WORK = 100_000
# Requests and trajectories in the whole grid, if the user does not say how many steps: some 10 seconds.
_ROUND = 8
# Steps: so often each measured ratio was drawn once (cost.py).
_GROUPS = 512
# Made from distributions.


def run_simulation(run: RunOptions, options: SimulationOptions, say: Callable[[str], None]) -> None:
    """Simulate every point; JSON lines go to stdout, the rest to stderr and ``say``.

    Raises ``ConfigError`` for a run that cannot be read or a recipe that is refused, before anything is simulated.
    """
    points = given_grid(run, options.axes) if options.axes else default_grid(run)
    recording = None if options.run_directory is None else read_run(options.run_directory)
    workload = (
        make_workload(run, options.durations, groups=_GROUPS, seed=options.seed)
        if recording is None
        else recording.workload
    )
    steps = options.steps or default_steps(
        run, workload, points, most=run.steps if recording is None else len(recording.steps)
    )
    source = "made from distributions" if recording is None else f"of {options.run_directory}"
    groups = f"{len(workload.groups):,} groups {source}"
    say(f"simulating {steps} steady steps at each of {len(points)} points, with {groups}")
    outcomes = _simulate_all(run, workload, points, steps=steps, seed=options.seed, say=say)
    measured = _measured(run, recording)
    for place, outcome in enumerate(outcomes):
        own = place == 0
        print(json.dumps(as_json(outcome, recipe=own, measured=measured if own else None)), flush=True)
    print_table(outcomes, sys.stderr)
    if measured is not None:
        simulated = outcomes[0].steps_per_hour
        off = simulated / measured - 1
        say(f"the run itself did {rate(measured)} steps an hour; simulated: {rate(simulated)} ({off:+.1%})")
    if options.picture is not None and not has_module("matplotlib"):
        say(NO_MATPLOTLIB)
    elif options.picture is not None:
        from asyncrl.simulation.picture import draw_picture

        draw_picture(outcomes, options.picture, name=run.name, measured=measured)
        say(f"picture: {options.picture}")


def default_steps(run: RunOptions, workload: Workload, points: Sequence[Point], *, most: int) -> int:
    """Steady steps of each point: whole rounds, at least one, that make about ``_WORK`` in all.

    ``most`` bounds them: more of them would only repeat what the workload has.
    """
    segment = run.budget.segment_tokens
    members = [member for group in workload.groups for member in group.members]
    work = sum(1 + sum(math.ceil(turn.tokens / segment) for turn in member.turns) for member in members)
    _, groups_per_step, group_size = run.shape
    each_step = groups_per_step * group_size * work / len(members)
    around = sum(total_steps(0, point.max_staleness) for point in points)
    steps = min(most, int((_WORK / each_step - around) / len(points)))
    return max(1, steps // _ROUND) * _ROUND


def _simulate_all(
    run: RunOptions,
    workload: Workload,
    points: Sequence[Point],
    *,
    steps: int,
    seed: int,
    say: Callable[[str], None],
) -> list[Outcome]:
    known: dict[Admits, Outcome] = {}
    outcomes: list[Outcome] = []
    for point in points:
        try:
            # Made even if the outcome is known: points that admit the same are not all allowed.
            simulation = Simulation(run, point, workload, steps=steps, seed=seed)
            admits = point.admits(run)
            if admits not in known:
                known[admits] = simulation.run()
        except ConfigError as error:
            if not outcomes:
                raise ConfigError(f"{run.path}: {error}") from error
            say(f"left out {describe(point)}: {error}")
            continue
        outcomes.append(replace(known[admits], point=point))
    return outcomes


def _measured(run: RunOptions, recording: Recording | None) -> float | None:
    """Steps per hour of the recorded run; None if there is none, or one of another shape."""
    bound, *rest = run.shape
    # What a recording shows of the bound is how long a group may wait until its batch starts.
    if recording is None or (bound - (run.updates - 1), *rest) != recording.shape:
        return None
    return steps_per_hour(recording.steps, recording.max_staleness)
