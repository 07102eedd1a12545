"""Real parts, small model: the torch learner, the embedded server over its wire, and real publications."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import asyncrl as rl
from asyncrl.events import Events, VersionPublished
from asyncrl.learning.base import ChunkResult, TrainingSequence
from asyncrl.types import SpanKind, Step
from envs.guess_number.env import GuessNumber, build_model, train_rows

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("blocking_calls_are_errors")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, randomly initialised."""
    folder = tmp_path_factory.mktemp("model")
    build_model(folder)
    return folder


class _RecordingTransport(httpx.ASGITransport):
    """Keeps every reply to ``/generate`` as the bytes that were served."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self.served: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        content = await response.aread()
        if request.url.path == "/generate":
            self.served.append({"request": json.loads(request.content), "reply": json.loads(content)})
        return response


class _RecordingLearner(rl.TorchLearner):
    """Keeps every sequence that it was trained on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trained: list[TrainingSequence] = []

    async def forward_backward(
        self, sequences: Sequence[TrainingSequence], loss: Any, *, updates: int = 0
    ) -> ChunkResult:
        self.trained += sequences
        return await super().forward_backward(sequences, loss, updates=updates)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
async def test_what_was_served_is_what_is_trained(model: Path, tmp_path: Path, lora: bool) -> None:
    """Ids and log-probabilities byte for byte over a run; server and learner agree after every publication."""
    from asyncrl.servers.embedded.app import create_app
    from asyncrl.servers.embedded.options import ServerOptions

    app = create_app(ServerOptions(model=model))
    transport = _RecordingTransport(app)
    learner = _RecordingLearner(model, lora=rl.LoraConfig(r=8, alpha=16) if lora else None, threads=1)
    events = Events()
    published: list[VersionPublished] = []
    events.subscribe(lambda event: published.append(event) if isinstance(event, VersionPublished) else None)
    engine = rl.RolloutEngine(
        rl.Policy(learner, sampler=rl.SGLang(["http://embedded"], transport=transport), directory=tmp_path),
        env=GuessNumber,
        announce_tools="none",
        budget=rl.Budget(max_turns=5, max_turn_tokens=1),
        sampling_policy="trajectory" if lora else "segment",
        kv_cache=None if lora else rl.KVCache(on_limit="refill", allow_reprefill=True),
    )
    trainer = rl.AsyncTrainer(
        engine=engine, optimizer=rl.Adam(lr=2e-3), groups_per_step=4, group_size=8, max_staleness=2, events=events
    )
    steps: list[Step] = []
    async with app.router.lifespan_context(app):
        async for step in trainer.run(train_rows(), steps=6):
            steps.append(step)

    assert [event.version for event in published] == list(range(steps[-1].model_step + 1))
    assert max(event.probe_error for event in published) <= 1e-3
    _require_served(steps, learner.trained, transport.served)
    for step in steps:
        assert 0 <= step.metrics["staleness/span_age_p99"] <= 2
        assert abs(step.metrics["loss/ratio"] - 1) < 0.5


def _require_served(steps: Sequence[Step], trained: Sequence[TrainingSequence], served: list[dict[str, Any]]) -> None:
    """Every generated span is what a reply had for exactly that context, and every trained token is of such a span."""
    replies: dict[bytes, set[tuple[bytes, bytes]]] = {}
    for exchange in served:
        entries = exchange["reply"]["meta_info"]["output_token_logprobs"]
        ids = np.array([entry[1] for entry in entries], dtype=np.int32)
        values = np.array([entry[0] for entry in entries], dtype=np.float32)
        context = np.array(exchange["request"]["input_ids"], dtype=np.int32)
        replies.setdefault(context.tobytes(), set()).add((ids.tobytes(), values.tobytes()))
    expected: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for step in steps:
        for traj in step.trajectories:
            tokens, offset = traj.tokens(), 0
            logprobs = np.zeros(len(tokens), dtype=np.float32)
            mask = np.zeros(len(tokens), dtype=np.bool_)
            for span in traj.spans:
                part = slice(offset, offset + len(span.tokens))
                if span.kind is SpanKind.GENERATED:
                    assert span.logprobs is not None
                    assert (span.tokens.tobytes(), span.logprobs.tobytes()) in replies[tokens[:offset].tobytes()]
                    logprobs[part], mask[part] = span.logprobs, True
                offset += len(span.tokens)
            end = int(np.flatnonzero(mask)[-1]) + 1
            found = expected.setdefault(tokens[:end].tobytes(), [])
            found.append((logprobs[:end].tobytes(), mask[:end].tobytes()))
    assert trained
    for sequence in trained:
        assert (sequence.logprobs.tobytes(), sequence.mask.tobytes()) in expected[sequence.tokens.tobytes()]


async def test_synchronous_training_has_an_importance_ratio_of_one(model: Path, tmp_path: Path) -> None:
    """With a bound of 0 the learner's log-probabilities are the sampler's, up to rounding."""
    from asyncrl.servers.embedded.app import create_app
    from asyncrl.servers.embedded.options import ServerOptions

    app = create_app(ServerOptions(model=model))
    sampler = rl.SGLang(["http://embedded"], transport=httpx.ASGITransport(app))
    policy = rl.Policy(rl.TorchLearner(model, threads=1), sampler=sampler, directory=tmp_path)
    budget = rl.Budget(max_turn_tokens=1)
    engine = rl.RolloutEngine(policy, env=GuessNumber, announce_tools="none", budget=budget, temperature=1.3)
    trainer = rl.AsyncTrainer(
        engine=engine, optimizer=rl.Adam(lr=1e-2), groups_per_step=4, group_size=4, max_staleness=0
    )
    async with app.router.lifespan_context(app):
        async for step in trainer.run(train_rows(), steps=3):
            assert step.metrics["loss/kl"] < 1e-6
            assert abs(step.metrics["loss/ratio"] - 1) < 1e-3


@contextmanager
def _demo(run_dir: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "asyncrl", "demo", "--run-dir", str(run_dir), *options]
    environment = {**os.environ, "XDG_CACHE_HOME": str(run_dir.parent / "cache"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        # As a context manager it closes its pipes and waits.
        with process:
            yield process
            process.kill()
    finally:
        process.kill()


def _wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"the process ended without saying {text!r}")


def _children(process: subprocess.Popen[str]) -> list[int]:
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(child) for child in listed.read_text().split()]


@pytest.mark.timeout(240)
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for child processes in /proc")
def test_ctrl_c_stops_the_demo_in_order(tmp_path: Path) -> None:
    """The first signal ends the run with its result line, exit code 0, and no process left."""
    with _demo(tmp_path / "run") as process:
        _wait_for(process, "step_finished")
        children = _children(process)
        assert children
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    result = json.loads(output.strip().splitlines()[-1])
    assert result["stopped"] is True
    assert result["steps"] >= 1
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.timeout(240)
def test_a_killed_run_leaves_no_server_behind(tmp_path: Path) -> None:
    """The embedded server ends by itself when its parent is killed without a chance to clean up."""
    with _demo(tmp_path / "run") as process:
        _wait_for(process, "step_finished")
        [server] = _children(process)
        process.kill()
        process.wait()
        # Ends as soon as it reads the end of its input; waiting for that is the point of this test.
        pidfd = os.pidfd_open(server)
        assert select.select([pidfd], [], [], 60)[0]
        os.close(pidfd)
