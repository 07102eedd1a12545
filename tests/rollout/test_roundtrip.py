from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncrl.rollout.controltokens import CUT
from asyncrl.rollout.renderer import ChatRenderer
from asyncrl.rollout.roundtrip import Problem
from asyncrl.rollout.tools import tool
from asyncrl.types import IntArray, Message
from tests.rollout.families import FAMILIES, KINDS, make_family_tokenizer

RIGHT = [name for name, family in FAMILIES.items() if not family.problems]
USER: Message = {"role": "user", "content": "2 + x y?"}


@tool
async def add(a: int, b: str) -> str:
    """Add."""
    return f"{a}{b}"


@tool
async def end() -> str:
    """Say that this is all."""
    return ""


def make(name: str, kind: str) -> tuple[Any, ChatRenderer]:
    """The family's tokenizer and our renderer of it."""
    tokenizer = make_family_tokenizer(name, kind)
    return tokenizer, ChatRenderer(tokenizer, ends=tokenizer.convert_tokens_to_ids(list(FAMILIES[name].ends)))


def ids(tokenizer: Any, text: str) -> IntArray:
    """The text's tokens, special ones included."""
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_template_does_not_carry_through_is_named(name: str, kind: str) -> None:
    """Announced, called, answered, gone on with: nothing is reported of a family that does all of it."""
    _, renderer = make(name, kind)
    problems = renderer.check((add, end))
    assert tuple(problem.name for problem in problems) == FAMILIES[name].problems
    assert [problem.fatal for problem in problems] == [FAMILIES[name].fatal] * len(problems)
    assert all(set(problem.tools) <= {"add", "end"} and problem.reason for problem in problems)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RIGHT)
async def test_the_result_of_a_call_arrives_as_in_the_whole_conversation(name: str, kind: str) -> None:
    """Prompt, the sampled call and framing are what the template writes for all of it at once, token by token."""
    tokenizer, renderer = make(name, kind)
    # Behind the mark, as a model samples it: some tokenizers put a space in front of a text.
    turn = np.asarray(renderer.control.encode(CUT + FAMILIES[name].turn), dtype=np.int32)
    prompt = await renderer.prompt([USER], (add, end))
    parsed = await renderer.parse(turn, (add, end))
    (call,) = parsed.tool_calls
    assert (call.name, call.arguments, call.error) == ("add", {"a": 2, "b": "x y"}, "")
    result: Message = {"role": "tool", "name": "add", "tool_call_id": call.id, "content": "42"}
    framing = await renderer.continuation([USER, parsed.message], [result], turn, (add, end))
    shown = parsed.message | {"content": ""}
    if name == "fenced":
        shown["tool_calls"][0]["function"]["arguments"] = '{"a": 2, "b": "x y"}'
    whole = tokenizer.apply_chat_template(
        [USER, shown, result], tools=[add.schema, end.schema], tokenize=False, add_generation_prompt=True
    )
    thought = "<think>\nHm </think>" if "reasoning" in name else ""
    whole = whole.replace("assistant\n<tool_call>", f"assistant\n{thought}<tool_call>")
    assert tokenizer.decode(np.concatenate([prompt, turn, framing]).tolist()) == tokenizer.decode(ids(tokenizer, whole))
    assert np.concatenate([prompt, turn, framing]).tolist() == ids(tokenizer, whole).tolist()


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.fatal])
async def test_every_kind_of_answer_is_followed_by_the_next_message(name: str, missing: bool) -> None:
    """After text, and after calls of which one could not be read, with and without the end token."""
    tokenizer, renderer = make(name, "characters")
    end_token = renderer.stop_token_ids[0]
    answer = ids(tokenizer, "It is 42.")
    turn = answer if missing else np.append(answer, np.int32(end_token))
    question: Message = {"role": "user", "content": "sure?"}
    framing = await renderer.continuation([USER, {"role": "assistant", "content": "x"}], [question], turn, (add,))
    text = tokenizer.decode(framing.tolist())
    assert text.count("sure?") == 1
    assert (framing[0] == end_token) == missing
    assert "It is" not in text and "2 + x y" not in text

    results: list[Message] = [
        {"role": "tool", "name": "add", "tool_call_id": f"call{index:05}", "content": f"result {index}"}
        for index in range(2)
    ]
    called: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    for before in ([USER, called], [USER, {"role": "assistant", "content": "x"}], []):
        framing = await renderer.continuation(before, results, ids(tokenizer, "x"), (add,))
        text = tokenizer.decode(framing.tolist())
        assert text.index("result 0") < text.index("result 1")


def test_a_template_that_writes_no_calls_is_read_in_the_notation_of_its_tokens() -> None:
    """Only models that call in Python have such a token."""
    from transformers import PreTrainedTokenizerFast

    made = make_family_tokenizer("python", "characters")
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(tokenizer_object=made.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = FAMILIES["no calls"].template
    renderer = ChatRenderer(tokenizer)
    assert renderer.template.notation is not None
    assert renderer.template.notation.name == "pythonic"
    problems = renderer.check((add,))
    assert [problem.name for problem in problems] == ["calls_not_written"]
    assert isinstance(problems[0], Problem)


async def test_terminators_of_the_last_turn_and_of_others_may_differ() -> None:
    """What ended the turn stands for what the template writes in the middle of a conversation."""
    tokenizer, renderer = make("channels", "characters")
    question: Message = {"role": "user", "content": "sure?"}
    turn = ids(tokenizer, "<|channel|>final<|message|>42<|return|>")
    parsed = await renderer.parse(turn)
    assert parsed.message == {"role": "assistant", "content": "42"}
    framing = await renderer.continuation([USER, parsed.message], [question], turn, ())
    assert tokenizer.decode(framing.tolist()) == "<|start|>user<|message|>sure?<|end|><|start|>assistant"
