from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.learning.losshead import OutputHead

IDS = torch.arange(1, 13)[None]


def _model(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.3, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _adapted(**options: Any) -> Any:
    """With an adapter whose tensors are all random, on the output layer and on others."""
    model = peft.get_peft_model(_model(), peft.LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(std=0.4)
    return model.eval()


def _assert_same(model: Any) -> None:
    """Log-probabilities and all gradients equal those of the model's own logits."""
    causal: Any = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    head = OutputHead.of(model)
    head.check(model)
    temperature = torch.linspace(0.7, 1.3, 12)
    gradients = []
    for tiled in (True, False):
        if tiled:
            hidden = causal.base_model(input_ids=IDS, use_cache=False).last_hidden_state[0]
            logprobs, _ = head.logprobs(hidden, IDS[0], temperature=temperature, tile=(5, 7))
        else:
            logits = model(input_ids=IDS, use_cache=False).logits[0] / temperature[:, None]
            logprobs = logits.log_softmax(-1).gather(-1, IDS.T)[:, 0]
        parameters = [one for one in model.parameters() if one.requires_grad]
        gradients.append([logprobs, *torch.autograd.grad(logprobs.sum(), parameters)])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_output_layer(tied: bool) -> None:
    """Its weight is found, also where it is the embedding's."""
    _assert_same(_model(tie_word_embeddings=tied))


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"]},
    ],
    ids=["adapted", "trained", "frozen"],
)
def test_an_output_layer_inside_peft(options: dict[str, Any]) -> None:
    """Adapted, trained as a whole, or left alone."""
    model = _adapted(**options)
    _assert_same(model)
    with model.disable_adapter():
        head = OutputHead.of(model)
        head.check(model)
    head.check(model)


def test_a_merged_adapter_counts_once() -> None:
    """After PEFT has added it to the weight."""
    model = _adapted(target_modules=["lm_head"])
    model.merge_adapter()
    OutputHead.of(model).check(model)


def test_a_model_that_changes_its_logits_is_refused_by_name() -> None:
    """In a way that no field of its config tells."""

    class Shifted(LlamaForCausalLM):
        def forward(self, *args: Any, **options: Any) -> Any:
            output = super().forward(*args, **options)
            output.logits = output.logits * 1.5
            return output

    kind: Any = Shifted
    model = kind(_model().config).eval()
    with pytest.raises(ConfigError, match="Shifted computes its logits in a way"):
        OutputHead.of(model).check(model)


def test_a_model_without_an_output_layer_is_refused() -> None:
    """It has no log-probabilities."""
    with pytest.raises(ConfigError, match="LlamaModel has no output layer"):
        OutputHead.of(_model().base_model)
