"""Where a server is known to behave otherwise than the cases say, why, and what it does instead.

``sglang`` is the real server, which the cases describe; it stands here only where a case would end it. A case of this
table checks the behaviour that is named here in place of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import anyio

from tests.conformance.subject import LONG, Kind, Subject

__all__ = ["DIFFERENCES", "Difference"]

Check: TypeAlias = Callable[[Subject], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One server in one case."""

    kind: Kind
    case: str
    reason: str
    check: Check


async def _nothing(subject: Subject) -> None:
    """There is nothing to be seen."""


async def _refuses_batches(subject: Subject) -> None:
    reply = await subject.generate([[5, 6], [7, 8]], status=400)  # type: ignore[list-item]
    assert "batches" in reply["error"]["message"]


async def _refuses_copies(subject: Subject) -> None:
    assert "n is 2" in (await subject.generate(sampling={"n": 2}, status=400))["error"]["message"]


async def _refuses_streams(subject: Subject) -> None:
    assert "stream" in (await subject.generate(stream=True, status=400))["error"]["message"]


async def _refuses_text(subject: Subject) -> None:
    reply = await subject.post("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": 1}}, status=400)
    assert "input_ids" in reply["error"]["message"]


async def _refuses_empty_stops(subject: Subject) -> None:
    assert "stop" in (await subject.generate(sampling={"stop": [""]}, status=400))["error"]["message"]


async def _refuses_tensors(subject: Subject) -> None:
    await subject.post("/begin_weight_update")
    reply = await subject.post("/update_weights_from_tensor", {"serialized_named_tensors": ["AAAA"]}, status=400)
    assert reply["success"] is False and "unpickles" in reply["message"]


async def _refuses_adapter_tensors(subject: Subject) -> None:
    content = {"lora_name": "t", "config_dict": {}, "serialized_named_tensors": ["AAAA"]}
    reply = await subject.post("/load_lora_adapter_from_tensors", content, status=400)
    assert reply["success"] is False and "unpickles" in reply["error_message"]


async def _takes_theta_from_names(subject: Subject) -> None:
    """Whoever broadcasts to it needs no group, for it joins none."""
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g"}
    names = list(subject.served.tensors(subject.served.weights[1]))
    content = {"names": names, "dtypes": ["float32"], "shapes": [[1]], "group_name": "g", "weight_version": "b1"}
    await subject.post("/init_weights_update_group", group | {"backend": "gloo"})
    await subject.post("/begin_weight_update")
    await subject.post("/update_weights_from_distributed", content)
    await subject.post("/end_weight_update")
    await subject.post("/destroy_weights_update_group", {"group_name": "g"})
    reply = await subject.generate()
    assert reply["meta_info"]["weight_version"] == "b1"


async def _aborts_at_the_gate(subject: Subject) -> None:
    async with subject.paused("retract"), anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call(rid="gate"))
        await subject.until_running(0, waiting=1)
        await subject.post("/abort_request", {"rid": "gate"})
        await call.done.wait()
    assert call.meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}


async def _aborts_what_is_frozen(subject: Subject) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call := subject.call(rid="frozen", new=LONG))
        await subject.until_tokens()
        async with subject.paused("in_place"):
            await subject.post("/abort_request", {"rid": "frozen"})
            await call.done.wait()
    assert call.meta["finish_reason"]["message"] == "Aborted"


_OURS: tuple[Kind, ...] = ("scripted", "embedded")
_ONE = "Our own servers take one prompt and give one sample, which is all that a trainer sends."

DIFFERENCES: tuple[Difference, ...] = (
    *(
        Difference(kind=kind, case=case, reason=_ONE, check=check)
        for case, check in (
            ("test_a_batch_is_answered_in_order", _refuses_batches),
            ("test_one_prompt_can_have_two_samples", _refuses_copies),
            ("test_a_stream_ends_with_done", _refuses_streams),
            ("test_a_text_can_be_the_prompt", _refuses_text),
        )
        for kind in _OURS
    ),
    *(
        Difference(
            kind=kind,
            case="test_an_empty_stop_string_stops_at_once",
            reason="It can only be a mistake, so that our own servers refuse it.",
            check=_refuses_empty_stops,
        )
        for kind in _OURS
    ),
    Difference(
        kind="embedded",
        case="test_weights_come_as_tensors_in_the_body",
        reason="Reading them would mean unpickling what came over the network; it takes broadcasts and folders.",
        check=_refuses_tensors,
    ),
    Difference(
        kind="embedded",
        case="test_an_adapter_comes_as_tensors_in_the_body",
        reason="Reading them would mean unpickling what came over the network; it takes folders.",
        check=_refuses_adapter_tensors,
    ),
    Difference(
        kind="scripted",
        case="test_weights_come_by_broadcast",
        reason="It has no torch, joins no group and takes theta from the name of the tensor that is announced.",
        check=_takes_theta_from_names,
    ),
    Difference(
        kind="embedded",
        case="test_a_request_at_the_gate_cannot_be_aborted",
        reason="SGLang forgets such an abort, and later ones of the same request; the embedded server does it at once.",
        check=_aborts_at_the_gate,
    ),
    Difference(
        kind="embedded",
        case="test_a_frozen_request_is_aborted_after_the_pause",
        reason="SGLang answers when it goes on; the embedded server, which computes nothing then, answers at once.",
        check=_aborts_what_is_frozen,
    ),
    Difference(
        kind="sglang",
        case="test_an_id_outside_of_the_vocabulary_is_refused",
        reason="It ends a real server on a CPU, so that none is sent; the client refuses such ids before they leave.",
        check=_nothing,
    ),
)
