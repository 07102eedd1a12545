"""Real servers that a run starts: with the model's training, through a crash, and to the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import numpy as np
import pytest

import asyncrl as rl
from asyncrl.events import Event, Events, Notice
from asyncrl.publishing.policy import OpenPolicy
from asyncrl.sampling.base import SegmentRequest
from asyncrl.types import Segment
from tests.tinymodels import CLOSE

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


def _scheduler_of(url: str) -> int:
    """The process that computes for the server at ``url``: it takes another name, so it is found by its parent."""
    port = url.rsplit(":", 1)[1]
    mains = [pid for pid, line in _processes() if "sglang.launch_server" in line and f"--port {port} " in line]
    (found,) = (pid for pid, line in _processes() if line.startswith("sglang::scheduler") and _parent(pid) in mains)
    return found


def _processes() -> list[tuple[int, str]]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found.append((int(folder.name), line))
    return found


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


async def _publish(policy: OpenPolicy, version: int) -> float:
    await policy.publisher.stage(version)
    return await policy.publisher.publish(version)


async def _sample(policy: OpenPolicy, version: int, name: str) -> Segment:
    ref = policy.publisher.model_ref(version)
    return await policy.sampler.sample(
        SegmentRequest(
            trajectory_id=name,
            input_ids=np.array([5, 6, 7], dtype=np.int32),
            max_new_tokens=8,
            version=version,
            adapter=ref.adapter,
            extra_key=ref.extra_key,
        )
    )


async def test_a_server_that_crashes_comes_back_with_the_current_adapter(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Its process that computes is killed; the same URL answers again, with the version that was published.

    Learner and server agree about the probe at every publication, before and after.
    """
    model, lora = tiny_model("qwen3"), rl.LoraConfig(r=4, alpha=8)
    sampler = rl.SGLang.launch(
        rl.SGLangOptions(model=model, device="cpu", context_length=512, max_total_tokens=4096),
        lora=lora,
        log_directory=tmp_path,
    )
    policy = rl.Policy(rl.TorchLearner(model, lora=lora, device="cpu", threads=1), sampler=sampler)
    notices: list[Notice] = []
    returned = anyio.Event()
    events = Events()

    def observe(event: Event) -> None:
        assert isinstance(event, Notice)
        notices.append(event)
        if event.name == "server_returned":
            returned.set()

    events.subscribe(observe, kinds=(Notice,))
    async with policy.opened(events) as opened:
        assert await _publish(opened, 0) < CLOSE
        assert len((await _sample(opened, 0, "before")).tokens)
        os.kill(_scheduler_of(sampler.urls[0]), signal.SIGKILL)
        # It waits for the server, and gets its answer from the one that was started again.
        segment = await _sample(opened, 0, "after")
        assert segment.server == sampler.urls[0]
        await returned.wait()
        assert await _publish(opened, 1) < CLOSE
        assert len((await _sample(opened, 1, "later")).tokens)
    names = [notice.name for notice in notices]
    assert names.count("server_started") == 2
    assert names.index("server_exited") < names.index("server_returned")
    assert "launch_server" not in " ".join(line for _, line in _processes() if str(model) in line)
