"""The probe and the staging of versions."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import ConfigError, ProbeMismatch, ProtocolError
from asyncrl.learning.base import model_vocab_size
from asyncrl.publishing.probe import Probe
from asyncrl.publishing.staging import Copies, Folders, Staging
from asyncrl.sampling.control import ServerControl
from asyncrl.sampling.sglang import SGLang
from asyncrl.testing.server import Fault, ScriptedServer, network
from asyncrl.testing.theta import ThetaLearner, read_theta, theta_logprobs

URL = "http://one:30000"
TOKENS = np.array([5, 6, 7, 8], dtype=np.int32)
REFERENCE = theta_logprobs(TOKENS[1:], 0.0)


@asynccontextmanager
async def _control(server: ScriptedServer) -> AsyncGenerator[ServerControl, None]:
    async with SGLang([URL], transport=network({URL: server})).opened() as sampler:
        yield sampler.live[0]


async def test_the_largest_difference_is_returned_and_bounded() -> None:
    """Within the tolerance it is a number, beyond it an error with both values and the token's place."""
    reference = REFERENCE + np.array([0.0, 0.25, 0.125], dtype=np.float32)
    async with _control(ScriptedServer()) as control:
        tolerant = Probe(tokens=TOKENS, tolerance=0.3)
        assert await tolerant.check(control, reference, version=3) == pytest.approx(0.25)
        strict = Probe(tokens=TOKENS, tolerance=0.2)
        values = f"{REFERENCE[1]:.6g}, the learner {reference[1]:.6g}"
        with pytest.raises(ProbeMismatch, match=rf"version 3.*probe token 2 .* {re.escape(values)}.*0\.2"):
            await strict.check(control, reference, version=3)


async def test_nan_is_a_mismatch() -> None:
    """No comparison with NaN is true, and none may let it pass."""
    reference = REFERENCE.copy()
    reference[1] = np.nan
    async with _control(ScriptedServer()) as control:
        with pytest.raises(ProbeMismatch, match="nan"):
            await Probe(tokens=TOKENS).check(control, reference, version=3)


def _drop_scores(reply: dict[str, Any]) -> None:
    del reply["meta_info"]["input_token_logprobs"]


def _null_score(reply: dict[str, Any]) -> None:
    reply["meta_info"]["input_token_logprobs"][1][0] = None


def _other_tokens(reply: dict[str, Any]) -> None:
    reply["meta_info"]["input_token_logprobs"][1][1] += 1


def _short(reply: dict[str, Any]) -> None:
    reply["meta_info"]["input_token_logprobs"].pop()


@pytest.mark.parametrize("edit", [_drop_scores, _null_score, _other_tokens, _short])
async def test_an_answer_that_is_no_score_of_the_probe_is_an_error(edit: Callable[[dict[str, Any]], None]) -> None:
    """A server that cannot score must not pass for one that agrees."""
    server = ScriptedServer()
    server.fault("/generate", Fault(edit=edit))
    async with _control(server) as control:
        with pytest.raises((ProtocolError, ProbeMismatch), match=URL):
            await Probe(tokens=TOKENS).check(control, REFERENCE, version=3)


async def test_no_probe_can_hit_what_an_earlier_one_cached() -> None:
    """Each has a cache namespace of its own."""
    server = ScriptedServer()
    async with _control(server) as control:
        for _ in range(3):
            await Probe(tokens=TOKENS).check(control, REFERENCE, version=3)
    assert len({call.extra_key for call in server.probes}) == 3


def test_a_probe_for_a_model_fits_its_vocabulary_and_is_always_the_same(tmp_path: Path) -> None:
    """Also the last id is left out, which some servers report wrongly in prompts."""
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    probe = Probe.for_model(tmp_path)
    assert set(probe.tokens.tolist()) == set(range(6))
    assert np.array_equal(probe.tokens, Probe.for_model(tmp_path).tokens)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    """The error has the path of what is missing."""
    with pytest.raises(ConfigError, match=str(tmp_path / "config.json")):
        model_vocab_size(tmp_path)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_version_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    """While the learner writes there is no folder of that name, and a failed export leaves none."""
    seen: list[bool] = []

    class Learner(ThetaLearner):
        async def export(self, directory: Path) -> None:
            await super().export(directory)
            seen.append((tmp_path / "v000003").exists())
            if self.theta < 0:
                raise OSError("disk full")

    learner = Learner(theta=-1.0)
    folders = Folders(learner, tmp_path)
    staging = Staging(learner, folders, Probe(tokens=TOKENS))
    with pytest.raises(OSError, match="disk full"):
        await staging.stage(3)
    assert not (tmp_path / "v000003").exists()
    learner.theta = 1.0
    staged = await staging.stage(3)
    assert seen == [False, False]
    assert _names(tmp_path) == ["v000003"]
    assert read_theta(folders.folder(3)) == 1.0
    assert staged.reference is not None
    assert np.array_equal(staged.reference, theta_logprobs(TOKENS[1:], 1.0))


async def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    """Neither its unfinished folder nor its version that was never recorded ends up in ours."""
    for name in ("v000003", ".v000003.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").touch()
    await Folders(ThetaLearner(theta=2.0), tmp_path).stage(3)
    assert _names(tmp_path / "v000003") == ["theta.json"]


async def test_without_a_probe_one_is_made_for_the_learners_model(tmp_path: Path) -> None:
    """The vocabulary is the model's."""
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    learner = ThetaLearner()
    learner.model_path = tmp_path
    staged = await Staging(learner, Folders(learner, tmp_path / "published"), None).stage(0)
    assert staged.reference is not None and len(staged.reference) == 23


class _Fake:
    """A tensor that says where it is, and counts those on the GPU."""

    on_gpu = 0
    most_on_gpu = 0

    def __init__(self, *, is_cuda: bool) -> None:
        self.is_cuda = is_cuda
        self.device = "cuda:1" if is_cuda else "cpu"
        _Fake.on_gpu += is_cuda
        _Fake.most_on_gpu = max(_Fake.most_on_gpu, _Fake.on_gpu)

    def __del__(self) -> None:
        _Fake.on_gpu -= self.is_cuda

    def cpu(self) -> _Fake:
        return _Fake(is_cuda=False)


class _OnGPU(ThetaLearner):
    async def weights(self) -> Any:
        return {name: _Fake(is_cuda=True) for name in "abcdefgh"}


async def test_a_gpu_holds_one_copy_of_the_weights_whatever_waits() -> None:
    """Older versions move to the host's memory, tensor by tensor, before the next one is copied."""
    copies = Copies(_OnGPU())
    for version in range(5):
        await copies.stage(version)
        assert _Fake.on_gpu == 8
        assert copies.device == "cuda:1"
        newest = [tensor.is_cuda for older in range(version + 1) for tensor in copies.weights(older).values()]
        assert newest == [False] * 8 * version + [True] * 8
    assert _Fake.most_on_gpu == 8
