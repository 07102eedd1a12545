"""The other side of the comparison: river-client 0.16.0 with a model that samples and trains at once.

Its API is untyped here because it is installed in the measuring process only. What a stub must provide is what its
engine and trainer call: one sampling call for a list of prompts, and the training calls.
"""

from __future__ import annotations

import importlib
import uuid
import warnings
from collections.abc import Sequence
from typing import Any

from benchmarks.rollouts import ANSWER, CALL, GROUP_SIZE, OBSERVATION, PROMPT, Load

__all__ = ["train"]

river: Any = importlib.import_module("river_client.rl")
types: Any = importlib.import_module("river_client.types")
renderers: Any = importlib.import_module("river_client.renderers.base")

_STOP = chr(ANSWER[-1])


class _Tokenizer:
    """A token a byte."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode("latin-1"))

    def decode(self, ids: Sequence[int], **options: object) -> str:
        return bytes(ids).decode("latin-1")


class _Renderer:
    """Contents as they are; a turn that begins with T calls the tool."""

    tokenizer = _Tokenizer()

    def get_stop_strings(self) -> list[str]:
        return [_STOP]

    def build_sample_prompt(self, messages: Sequence[Any], *, tools: object = None) -> Any:
        return renderers.SamplePrompt("".join(message["content"] for message in messages))

    def build_continuation_prompt(self, messages: Sequence[Any], *, last_stop: object) -> Any:
        return renderers.SamplePrompt("".join(message["content"] for message in messages))

    def parse_response(self, text: str, *, tools: object = None) -> Any:
        message: dict[str, Any] = {"role": "assistant", "content": text.removesuffix(_STOP)}
        if text[0] == chr(CALL[0]):
            call = {"name": "lookup", "arguments": {"key": 7}}
            message["tool_calls"] = [{"type": "function", "id": "0", "function": call}]
        return renderers.ParsedResponse(message, stop_found=text.endswith(_STOP))


@river.tool  # type: ignore[untyped-decorator]  # river_client is Any here
async def lookup(key: int) -> str:
    """Return what is known about the key."""
    return OBSERVATION


class _Chat(river.Env):  # type: ignore[misc]  # river_client is Any here
    """Looks something up in every turn but the last."""

    recovery = "stateless"
    tools = (lookup,)

    async def reset(self, row: object) -> list[dict[str, str]]:
        return [{"role": "user", "content": PROMPT}]

    async def reward(self, traj: Any, row: object) -> float:
        return float(int(traj.id[:2], 16) % 2)


class _Model:
    """Answers every call at once; each optimizer step makes a policy version."""

    base_model = "stub"

    def __init__(self, turns: int) -> None:
        self.segments = 0
        self._turns = turns
        self._lineage = uuid.uuid4().hex
        self._versions: dict[str, Any] = {}
        self._newest = self._version(0, None)

    @property
    def step(self) -> int:
        step: int = self._newest.step
        return step

    async def get_policy_version(self) -> Any:
        return self._newest

    async def sample(self, *, model_input: Sequence[Any], pinned_policy_id: str | None = None, **options: Any) -> Any:
        version = self._versions[pinned_policy_id] if pinned_policy_id else self._newest
        return [[self._sample(len(chunks), version)] for chunks in model_input]

    async def forward_backward(self, data: Any, **options: Any) -> Any:
        return types.ForwardResult(metrics={"loss": 0.0})

    async def optim_step(self, **options: Any) -> Any:
        self._newest = self._version(self.step + 1, self._newest.id)
        return types.OptimStepResult(metrics={"grad_norm": 1.0}, policy_version=self._newest)

    def _sample(self, chunks: int, version: Any) -> Any:
        """``chunks`` of the context: the prompt, then a turn and an answer of the tool for each turn."""
        tokens = ANSWER if chunks // 2 >= self._turns - 1 else CALL
        self.segments += 1
        return types.Sample(
            tokens=list(tokens),
            text="",
            logprobs=[-0.5] * len(tokens),
            stop_reason="stop",
            model_step=version.step,
            policy_version=version,
            prompt_tokens=0,
        )

    def _version(self, step: int, parent: str | None) -> Any:
        version = types.PolicyVersion(uuid.uuid4().hex, self._lineage, step, parent)
        self._versions[version.id] = version
        return version


async def train(load: Load) -> int:
    """Train the load with river-client's defaults, and return how many segments were sampled."""
    warnings.simplefilter("ignore")
    model = _Model(load.turns)
    engine = river.RolloutEngine(
        model,
        env=_Chat,
        renderer=_Renderer(),
        budget=river.Budget(max_turns=load.turns + 1),
        schedule=river.Schedule(concurrency=load.concurrency),
        seed=0,
    )
    trainer = river.AsyncTrainer(
        engine=engine,
        optimizer=river.Adam(lr=1e-5),
        completion=river.GroupCompletion(mode="wait"),
        loss=river.CISPO(normalize="token"),
        groups_per_step=load.groups_per_step,
        group_size=GROUP_SIZE,
        max_staleness=load.max_staleness,
    )
    async for _ in trainer.run([{"id": index} for index in range(4096)], steps=load.steps):
        pass
    return model.segments
