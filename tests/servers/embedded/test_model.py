"""What the embedded engine samples has the log-probabilities that transformers and peft give it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from asyncrl.errors import ConfigError
from tests.tinymodels import CLOSE

if TYPE_CHECKING:
    import torch

    from asyncrl.servers.adapters import LoadedAdapter
    from asyncrl.servers.embedded.engine import Engine
    from asyncrl.servers.embedded.model import Adapter
    from asyncrl.servers.embedded.request import Request

FAMILIES = ("llama", "qwen2", "qwen3")


def prompts(count: int, *, seed: int = 0) -> list[list[int]]:
    """Random prompts of different lengths."""
    source = random.Random(seed)
    return [[source.randrange(2, 64) for _ in range(source.randrange(1, 24))] for _ in range(count)]


def finish(engine: Engine, requests: Sequence[Request]) -> None:
    """Run ``requests`` to their ends."""
    engine.waiting.extend(requests)
    while not engine.idle:
        engine.step()


def loaded(engine: Engine, path: Path, uid: int) -> LoadedAdapter[Adapter]:
    """An adapter in the engine's model."""
    from asyncrl.servers.adapters import LoadedAdapter

    adapter = engine.model.load_adapter(path)
    return LoadedAdapter(weights=adapter, path=str(path), uid=uid)


def largest_difference(request: Request, logits: torch.Tensor) -> float:
    """Between the log-probabilities of the request's output and those of (T, V) ``logits``."""
    import torch

    output = torch.tensor(request.tokens[request.prompt_tokens :])
    scored = torch.log_softmax(logits[request.prompt_tokens - 1 : -1] / request.wire.temperature, dim=-1)
    expected = scored.gather(-1, output[:, None]).squeeze(-1)
    return float((expected - torch.tensor(request.logprobs)).abs().max())


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers(
    family: str,
    temperature: float,
    tiny_model: Callable[..., Path],
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    reference: Callable[..., torch.Tensor],
) -> None:
    """Rows of different lengths in one batch, each at its temperature."""
    engine = make_engine(family)
    requests = [make_request(prompt, max_new_tokens=12, temperature=temperature) for prompt in prompts(5)]
    requests.append(make_request([7, 8], max_new_tokens=3, temperature=2 * temperature))
    finish(engine, requests)
    for request in requests:
        assert request.output_tokens == request.wire.max_new_tokens
        assert largest_difference(request, reference(tiny_model(family), request.tokens)) < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_applied_by_row(
    family: str,
    tiny_model: Callable[..., Path],
    tiny_adapter: Callable[..., Path],
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    reference: Callable[..., torch.Tensor],
) -> None:
    """Two adapters and the base model in one batch give what peft gives for each."""
    engine = make_engine(family)
    paths = [tiny_adapter(family, seed=1), tiny_adapter(family, seed=2), None]
    adapters = [None if path is None else loaded(engine, path, uid) for uid, path in enumerate(paths, 1)]
    prompt = prompts(1)[0]
    requests = [
        make_request([*prompt, *[5] * i], adapter=adapters[i % 3], max_new_tokens=8, temperature=0.6) for i in range(6)
    ]
    finish(engine, requests)
    for i, request in enumerate(requests):
        logits = reference(tiny_model(family), request.tokens, paths[i % 3])
        assert largest_difference(request, logits) < CLOSE


def test_a_batch_of_one_adapter_needs_no_rows(
    tiny_model: Callable[..., Path],
    tiny_adapter: Callable[..., Path],
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    reference: Callable[..., torch.Tensor],
) -> None:
    """The usual case of training, all requests on one version, is right too."""
    engine = make_engine()
    path = tiny_adapter(seed=1)
    adapter = loaded(engine, path, 1)
    requests = [make_request(prompt, adapter=adapter, max_new_tokens=8) for prompt in prompts(3)]
    finish(engine, requests)
    for request in requests:
        assert largest_difference(request, reference(tiny_model(), request.tokens, path)) < CLOSE


def test_reused_prefixes_do_not_change_logprobs(
    tiny_model: Callable[..., Path],
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    reference: Callable[..., torch.Tensor],
) -> None:
    """A second turn computes only what is new, and gets the values of a full forward pass."""
    engine = make_engine()
    firsts = [make_request(prompt, max_new_tokens=6) for prompt in prompts(4)]
    finish(engine, firsts)
    seconds = [make_request([*first.tokens, 9, 10, 11], max_new_tokens=6) for first in firsts]
    finish(engine, seconds)
    for first, second in zip(firsts, seconds, strict=True):
        # The last sampled token was never fed to the model.
        assert second.cached_tokens == len(first.tokens) - 1
        assert largest_difference(second, reference(tiny_model(), second.tokens)) < CLOSE


@pytest.mark.parametrize("start", [0, 3, 19])
def test_prompt_logprobs_are_not_tempered(
    start: int,
    tiny_model: Callable[..., Path],
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    reference: Callable[..., torch.Tensor],
) -> None:
    """They begin with a null at ``logprob_start_len``, and a cached prefix does not shorten them."""
    import torch

    engine = make_engine()
    prompt = [*range(10, 30)]
    finish(engine, [make_request(prompt, max_new_tokens=1)])
    request = make_request(prompt, max_new_tokens=1, temperature=0.5, logprob_start_len=start)
    finish(engine, [request])
    assert [token for _, token in request.prompt_logprobs] == prompt[start:]
    assert request.prompt_logprobs[0][0] is None
    expected = torch.log_softmax(reference(tiny_model(), prompt), dim=-1)[start:-1]
    expected = expected.gather(-1, torch.tensor(prompt[start + 1 :])[:, None]).squeeze(-1)
    scores = torch.tensor([score for score, _ in request.prompt_logprobs[1:]])
    assert torch.allclose(scores, expected, atol=CLOSE, rtol=0)


def test_a_prompt_can_be_scored_without_sampling(
    make_engine: Callable[..., Engine], make_request: Callable[..., Request]
) -> None:
    """``max_new_tokens`` 0 ends after the prefill, beside requests that go on."""
    engine = make_engine()
    scoring = make_request([5, 6, 7], max_new_tokens=0, logprob_start_len=0)
    sampling = make_request([8, 9], max_new_tokens=2)
    finish(engine, [scoring, sampling])
    assert len(scoring.prompt_logprobs) == 3
    assert scoring.output_tokens == 0 and scoring.finish_reason == {"type": "length", "length": 0}
    assert sampling.output_tokens == 2


def test_new_weights_are_used_from_the_next_step_on(
    tiny_model: Callable[..., Path],
    make_engine: Callable[..., Engine],
    make_request: Callable[..., Request],
    reference: Callable[..., torch.Tensor],
) -> None:
    """After a reload a fresh request has the log-probabilities of the new model."""
    engine = make_engine()
    engine.load_weights(tiny_model(seed=1), "1")
    request = make_request([4, 5, 6], max_new_tokens=5)
    finish(engine, [request])
    assert request.versions == [("1", 0)]
    assert largest_difference(request, reference(tiny_model(seed=1), request.tokens)) < CLOSE


def test_weights_of_another_model_are_refused(
    tiny_model: Callable[..., Path], make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """With other names or other shapes; nothing changes, the label included."""
    from safetensors.torch import load_file, save_file

    weights = load_file(tiny_model("qwen3") / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:5].clone()
    save_file(weights, tmp_path / "model.safetensors")
    engine = make_engine("qwen3")
    for path in (tiny_model("llama"), tmp_path):
        with pytest.raises(ValueError, match="another model"):
            engine.load_weights(path, "1")
    assert engine.label == "default"


def test_a_file_cut_short_is_refused_by_name(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    """Of weights and of an adapter; the server goes on with what it has."""
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut short")
    (tmp_path / "adapter_config.json").write_bytes(b'{"peft_type": "LORA", "r": 1, "lora_alpha": 1}')
    engine = make_engine()
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        engine.load_weights(tmp_path, "1")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors cannot be read"):
        engine.model.load_adapter(tmp_path)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_models_that_would_be_computed_wrongly_are_refused(
    change: dict[str, Any], found: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """The message names what is not known, and what is."""
    import torch

    from asyncrl.servers.embedded.model import DecoderModel

    config = orjson.loads((tiny_model("qwen3") / "config.json").read_bytes()) | change
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    with pytest.raises(ConfigError, match=found):
        DecoderModel(tmp_path, dtype=torch.float32, device=torch.device("cpu"), slots=8)


def test_a_checkpoint_with_a_weight_missing_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """At the start, and not by the first request."""
    import torch
    from safetensors.torch import load_file, save_file

    from asyncrl.servers.embedded.model import DecoderModel

    weights = load_file(tiny_model() / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny_model() / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight is missing"):
        DecoderModel(tmp_path, dtype=torch.float32, device=torch.device("cpu"), slots=8)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "not a plain LoRA"),
        ({"target_modules": ("q_proj", "lm_head")}, "lm_head"),
    ],
)
def test_adapters_that_would_be_applied_wrongly_are_refused(
    options: dict[str, Any], found: str, tiny_adapter: Callable[..., Path], make_engine: Callable[..., Engine]
) -> None:
    """What SGLang refuses or ignores is an error here."""
    with pytest.raises(ValueError, match=found):
        make_engine().model.load_adapter(tiny_adapter(**options))


def test_an_adapter_of_another_model_is_refused(
    tiny_adapter: Callable[..., Path], make_engine: Callable[..., Engine]
) -> None:
    """By its shapes."""
    with pytest.raises(ValueError, match="does not fit"):
        make_engine("qwen3").model.load_adapter(tiny_adapter("llama"))
