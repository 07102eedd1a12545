"""How long is it from a version's commit to the first token that it samples, for each method of publication?

On a real SGLang server on this machine's CPU if one is installed, in two sizes of a random Qwen3; otherwise on the
embedded server, which takes folders only. The learner and the server share the processor, so that the figures say how
the methods compare and not how quick a GPU is.

Run: python -m benchmarks.publication [--repeats 5] [--sizes tiny,large]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np

import asyncrl as rl
from asyncrl.publishing.base import Publisher
from asyncrl.publishing.carriers import DiskCarrier, TensorCarrier
from asyncrl.publishing.distributed import DistributedCarrier
from asyncrl.publishing.full import FullPublisher
from asyncrl.publishing.lora import DiskAdapters, LoraPublisher, TensorAdapters
from asyncrl.publishing.probe import Probe
from asyncrl.sampling.base import SegmentRequest
from asyncrl.sampling.sglang import SGLang
from asyncrl.servers.install import installed_python
from asyncrl.servers.launch import EmbeddedServer
from asyncrl.servers.sglangcommand import SGLangOptions
from asyncrl.servers.sglangserver import SGLangServer
from benchmarks.answer import Answer
from benchmarks.tokenizer import write_tokenizer

__all__ = ["main"]

_SIZES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512},
    "large": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 32_000},
}
_FULL, _LORA = ("disk", "tensors", "distributed"), ("disk", "tensors")
_PHASE_S = 60.0
_TIMES_SLOWER = {"disk": 1.0, "tensors": 20.0, "distributed": 4.0}
# Over publication from disk, whose page cache is quick. On a CPU tensors travel by value, as base64 in JSON, which is
# what SGLang's route takes: a server reads 240 MB of that for seconds. On a GPU they are handles, which this says
# nothing of.
_TOLERANCE = 1e-3


def _write_model(directory: Path, sizes: Mapping[str, Any]) -> int:
    """A random Qwen3; returns how many parameters it has."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        **sizes,
        head_dim=64,
        num_attention_heads=sizes["hidden_size"] // 64,
        num_key_value_heads=sizes["hidden_size"] // 64,
        max_position_embeddings=1024,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    write_tokenizer(directory, sizes["vocab_size"])
    return int(sum(parameter.numel() for parameter in model.parameters()))


@asynccontextmanager
async def _sampler(model: Path) -> AsyncGenerator[SGLang, None]:
    """A server with the model, and a client."""
    async with AsyncExitStack() as stack:
        if await anyio.to_thread.run_sync(installed_python) is None:
            (url,) = await stack.enter_async_context(EmbeddedServer(model).opened())
        else:
            options = SGLangOptions(
                model=model, device="cpu", lora=rl.LoraConfig(r=16), max_total_tokens=4096, context_length=512
            )
            url = await stack.enter_async_context(SGLangServer(options).opened())
        yield await stack.enter_async_context(SGLang([url]).opened())


def _publisher(kind: str, method: str, learner: rl.TorchLearner, sampler: SGLang, directory: Path) -> Publisher:
    probe = Probe.for_model(learner.model_path, tolerance=_TOLERANCE)
    if kind == "LoRA":
        adapters = DiskAdapters(learner, directory) if method == "disk" else TensorAdapters(learner)
        return LoraPublisher(learner, sampler, adapters, f"bench-{method}", probe=probe)
    carriers: Mapping[str, Callable[[], Any]] = {
        "disk": lambda: DiskCarrier(learner, directory),
        "tensors": lambda: TensorCarrier(learner),
        "distributed": lambda: DistributedCarrier(learner, phase_s=_PHASE_S),
    }
    return FullPublisher(learner, sampler, carriers[method](), probe=probe)


async def _first_token_s(publisher: Publisher, sampler: SGLang, version: int) -> float:
    """From the commit of ``version`` to its first token."""
    committed = anyio.current_time()
    await publisher.stage(version)
    await publisher.publish(version)
    ref = publisher.model_ref(version)
    request = SegmentRequest(
        trajectory_id="t",
        input_ids=np.arange(2, 34, dtype=np.int32),
        max_new_tokens=1,
        version=version,
        adapter=ref.adapter,
        extra_key=ref.extra_key,
    )
    segment = await sampler.sample(request)
    assert [span.version for span in segment.versions] == [version]
    return anyio.current_time() - committed


async def _measure(kind: str, methods: tuple[str, ...], sampler: SGLang, model: Path, repeats: int) -> dict[str, float]:
    """Median seconds of each method, the methods by turns, after a round that warms up."""
    lora = rl.LoraConfig(r=16) if kind == "LoRA" else None
    learner = rl.TorchLearner(model, lora=lora, threads=1)
    await learner.open()
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as directory:
        publishers = {
            method: _publisher(kind, method, learner, sampler, Path(directory) / method) for method in methods
        }
        times: dict[str, list[float]] = {method: [] for method in methods}
        for repeat in range(repeats + 1):
            for method, publisher in publishers.items():
                seconds = await _first_token_s(publisher, sampler, repeat)
                if repeat:
                    times[method].append(seconds)
    await learner.close()
    return {method: statistics.median(values) for method, values in times.items()}


def _answers(what: str, server: str, medians: Mapping[str, float]) -> Iterator[Answer]:
    for method, seconds in medians.items():
        yield Answer(
            question=f"commit to first token, {what}, {method}, {server}",
            figure=seconds * 1e3,
            unit="ms",
            anchor="publication from disk, same size, same run",
            anchor_figure=medians["disk"] * 1e3,
            ratio=seconds / medians["disk"],
            goal=f"ratio at most {_TIMES_SLOWER[method]:g}",
            meets_goal=seconds <= _TIMES_SLOWER[method] * medians["disk"],
        )


async def _run(sizes: list[str], repeats: int) -> None:
    real = await anyio.to_thread.run_sync(installed_python) is not None
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="asyncrl-") as directory:
            model = Path(directory)
            parameters = await anyio.to_thread.run_sync(_write_model, model, _SIZES[size])
            async with _sampler(model) as sampler:
                server = "SGLang on this CPU" if real else "embedded server"
                # Adapters first: they are of the base weights, which the others replace.
                for kind, methods in (("LoRA", _LORA), ("all weights", _FULL)):
                    medians = await _measure(kind, methods if real else ("disk",), sampler, model, repeats)
                    what = f"{kind} of {parameters / 1e6:.2g} M parameters"
                    for answer in _answers(what, server, medians):
                        print(answer.line(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sizes", default="tiny,large")
    arguments = parser.parse_args()
    anyio.run(_run, arguments.sizes.split(","), arguments.repeats)


if __name__ == "__main__":
    main()
