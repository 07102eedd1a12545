"""The embedded server on what it should never be sent: it refuses by name, and then serves the next one right."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.from_thread
import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.servers.embedded.calls import LONG, Call, Serving, body, post, until_running

QUICK = settings(
    max_examples=60, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CONTEXT = 96
NORMAL = body([5, 6, 7], rid="normal")


@dataclass
class Embedded:
    """One server for many examples, called from outside of its loop."""

    portal: anyio.from_thread.BlockingPortal
    client: httpx.AsyncClient
    app: Any
    folders: dict[str, str]
    normal: dict[str, Any] = field(default_factory=dict)

    def post(self, route: str, content: bytes) -> httpx.Response:
        async def send() -> httpx.Response:
            with anyio.fail_after(60):
                return await self.client.post(route, content=content)

        return self.portal.call(send)

    def outcome(self, content: dict[str, Any]) -> dict[str, Any]:
        """What matters of a reply to a request for tokens."""
        response = self.post("/generate", orjson.dumps(content))
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        return {"ids": reply["output_ids"], "logprobs": reply["meta_info"]["output_token_logprobs"]}

    def assert_right(self) -> None:
        """A normal request has the answer that it always had."""
        self.post("/continue_generation", b"")
        self.post("/flush_cache", b"")
        assert self.outcome(NORMAL) == self.normal


def _copied(source: Path, target: Path, change: Callable[[dict[str, Any]], object] | bytes) -> str:
    shutil.copytree(source, target)
    file = target / "adapter_config.json"
    if isinstance(change, bytes):
        file.write_bytes(change)
    else:
        config = orjson.loads(file.read_bytes())
        change(config)
        file.write_bytes(orjson.dumps(config))
    return str(target)


def _set(config: dict[str, Any], *, key: str, value: Any) -> None:
    config[key] = value


def _with_tensor(source: Path, target: Path, **changes: Any) -> str:
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    file = next(target.glob("*.safetensors"))
    tensors = load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, file)
    return str(target)


@pytest.fixture(scope="module")
def embedded(
    tiny_model: Callable[..., Path], tiny_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Generator[Embedded, None, None]:
    """One server, and folders of all kinds."""
    import torch

    import asyncrl.servers.embedded.loading  # noqa: F401  takes seconds, which belong to no test
    from asyncrl.servers.embedded import service
    from asyncrl.servers.embedded.app import create_app
    from asyncrl.servers.embedded.options import ServerOptions

    model, adapter = tiny_model(), tiny_adapter(seed=1)
    work = tmp_path_factory.mktemp("fuzz")
    folders = {
        "model": str(model),
        "adapter": str(adapter),
        "other model": str(tiny_model("llama")),
        "extra": _with_tensor(model, work / "extra", extra=torch.zeros(3)),
        "lacks": _with_tensor(model, work / "lacks", model__norm__weight=None),
        "shape": _with_tensor(model, work / "shape", model__norm__weight=torch.zeros(3)),
        "bias": _with_tensor(model, work / "bias", model__norm__bias=torch.zeros(3)),
        "list": _copied(adapter, work / "list", b"[1, 2]"),
        "text": _copied(adapter, work / "text", b'"text"'),
        "no json": _copied(adapter, work / "nojson", b"\xff{"),
        "deep": _copied(adapter, work / "deep", b"[" * 900 + b"]" * 900),
    }
    odd: list[tuple[str, Any]] = [("r", value) for value in (0, "8", 2.0, -1, 2**63, True, 3, None)]
    alphas: list[Any] = ["16", None, [], {}, True]
    odd += [("lora_alpha", alpha) for alpha in alphas]
    odd += [("peft_type", []), ("bias", "all"), ("use_rslora", True), ("modules_to_save", ["lm_head"])]
    for number, (key, value) in enumerate(odd):
        folders[f"{key} {value}"] = _copied(adapter, work / str(number), partial(_set, key=key, value=value))
    original: float = service._WITHIN_S
    service._WITHIN_S = 0.05
    app = create_app(ServerOptions(model=model, max_total_tokens=2000, context_length=CONTEXT))

    @asynccontextmanager
    async def client() -> AsyncGenerator[httpx.AsyncClient, None]:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://embedded") as opened,
        ):
            yield opened

    with ExitStack() as stack:
        stack.callback(setattr, service, "_WITHIN_S", original)
        portal = stack.enter_context(anyio.from_thread.start_blocking_portal())
        server = Embedded(portal, stack.enter_context(portal.wrap_async_context_manager(client())), app, folders)
        server.normal = server.outcome(NORMAL)
        yield server


NUMBERS = [0, -1, 1, 2, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1e308, -1e308, 5e-324, 1e-7, 0.5, -0.0, 1.5]
SIMPLE = st.one_of(
    st.sampled_from([*NUMBERS, None, True, False, "", "a", "\0", "é\U0001f600", "x" * 300, "/", ".", "default"]),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SIMPLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
SAMPLING = ["max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"]
SAMPLING += ["no_stop_trim", "skip_special_tokens", "sampling_seed", "n", "min_new_tokens", "frequency_penalty"]
GENERATE = ["rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "lora_path", "extra_key"]
FIELDS: dict[str, list[str]] = {
    "/abort_request": ["rid", "abort_all"],
    "/pause_generation": ["mode"],
    "/continue_generation": ["torch_empty_cache"],
    "/flush_cache": ["timeout"],
    "/update_weights_from_disk": ["model_path", "weight_version", "flush_cache", "abort_all_requests"],
    "/update_weight_version": ["new_version", "abort_all_requests"],
    "/begin_weight_update": ["selector"],
    "/end_weight_update": [],
    "/update_weights_from_tensor": ["serialized_named_tensors", "load_format"],
    "/update_weights_from_distributed": ["names", "dtypes", "shapes", "group_name", "weight_version", "load_format"],
    "/init_weights_update_group": ["master_address", "master_port", "rank_offset", "world_size", "group_name"],
    "/destroy_weights_update_group": ["group_name"],
    "/weights_checker": ["action"],
    "/load_lora_adapter": ["lora_name", "lora_path"],
    "/load_lora_adapter_from_tensors": ["lora_name", "config_dict"],
    "/unload_lora_adapter": ["lora_name"],
}
RIGHT: dict[str, Any] = {
    "mode": "retract",
    "new_version": "7",
    "lora_name": "name",
    "serialized_named_tensors": ["AA=="],
    "names": ["model.norm.weight"],
    "dtypes": ["float32"],
    "shapes": [[32]],
    "master_address": "127.0.0.1",
    "master_port": 9,
    "rank_offset": 1,
    "world_size": 2,
    "backend": "gloo",
}


def _allowed(response: httpx.Response) -> None:
    status = response.status_code
    assert status in (200, 503) or 400 <= status < 500, (status, response.text)
    assert len(response.content) < 20_000


@pytest.mark.slow
@QUICK
@given(
    key=st.sampled_from(SAMPLING), value=VALUES, others=st.dictionaries(st.sampled_from(SAMPLING), VALUES, max_size=1)
)
def test_any_sampling_parameter_is_served_or_refused(
    embedded: Embedded, key: str, value: Any, others: dict[str, Any]
) -> None:
    """Never an engine that ends."""
    params = {"max_new_tokens": 2, "sampling_seed": 1, **others, key: value}
    response = embedded.post("/generate", orjson.dumps({"input_ids": [5, 6], "sampling_params": params}))
    _allowed(response)
    if response.status_code == 400:
        assert any(name in response.text for name in [*params, "model's maximum context"])
    embedded.assert_right()


@pytest.mark.slow
@QUICK
@given(key=st.sampled_from(GENERATE), value=VALUES)
def test_any_field_of_a_request_is_served_or_refused(embedded: Embedded, key: str, value: Any) -> None:
    """By name."""
    content = body([5, 6, 7], new=2, return_logprob=True) | {key: value}
    _allowed(embedded.post("/generate", orjson.dumps(content)))
    embedded.assert_right()


@pytest.mark.slow
@QUICK
@given(data=st.data(), route=st.sampled_from(sorted(FIELDS)))
def test_any_control_call_is_done_or_refused(embedded: Embedded, data: st.DataObject, route: str) -> None:
    """One odd value in a right call, or an odd call; folders that are not what they should be among them."""
    paths = st.sampled_from(sorted(embedded.folders.values()))
    names = FIELDS[route]
    content = {name: RIGHT[name] for name in [*names, "backend"] if name in RIGHT}
    for name in names:
        if name.endswith("_path"):
            content[name] = data.draw(paths)
    if names:
        odd = data.draw(st.sampled_from(names))
        content[odd] = data.draw(VALUES | paths if odd.endswith("_path") else VALUES)
    _allowed(embedded.post(route, orjson.dumps(content)))
    embedded.post("/unload_lora_adapter", b'{"lora_name": "name"}')
    embedded.assert_right()


@pytest.mark.slow
@QUICK
@given(
    route=st.sampled_from([*FIELDS, "/generate"]),
    content=st.one_of(
        st.binary(max_size=40),
        VALUES.map(orjson.dumps),
        st.integers(0, 200).map(lambda cut: orjson.dumps(NORMAL)[:cut]),
        st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b'{"rid": 1' + b"0" * 5000 + b"}", b"[NaN]", b"\xef\xbb\xbf{}"]),
        st.integers(900, 1100).map(lambda deep: b'{"rid": ' + b"[" * deep + b"]" * deep + b"}"),
    ),
)
def test_any_body_is_read_or_refused(embedded: Embedded, route: str, content: bytes) -> None:
    """Cut off, deep, or no JSON at all."""
    _allowed(embedded.post(route, content))
    embedded.assert_right()


@pytest.mark.parametrize("value", [18446744073709551615, 2**63, 1e308, 5e-324, 1e38, 1e-7])
def test_extreme_temperatures_are_only_numbers(embedded: Embedded, value: float) -> None:
    """Beside others in one batch too."""

    async def send() -> list[httpx.Response]:
        async with anyio.create_task_group() as tasks:
            found: list[httpx.Response] = []

            async def one(temperature: float) -> None:
                params = {"max_new_tokens": 3, "temperature": temperature}
                content = orjson.dumps({"input_ids": [5], "sampling_params": params})
                found.append(await embedded.client.post("/generate", content=content))

            for temperature in (1.0, value, 0.7):
                tasks.start_soon(one, temperature)
        return found

    assert [response.status_code for response in embedded.portal.call(send)] == [200] * 3
    embedded.assert_right()


def _bad_adapters(folders: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, path in folders.items():
        if name.split(" ")[0] in ("list", "text", "no", "deep", "r", "lora_alpha", "peft_type", "bias"):
            yield name, path


def test_an_adapter_that_is_none_is_refused_by_the_field(embedded: Embedded) -> None:
    """And its name is not taken by that."""
    for name, path in [
        *_bad_adapters(embedded.folders),
        ("none", "/does/not/exist"),
        ("nul", "a\0b"),
        ("file", __file__),
    ]:
        content = orjson.dumps({"lora_name": "new", "lora_path": path})
        response = embedded.post("/load_lora_adapter", content)
        assert response.status_code == 400, name
        field_name = name.split(" ")[0]
        if field_name in ("r", "lora_alpha"):
            assert f": {field_name} is " in response.json()["error_message"] or "does not fit" in response.text
    good = {"lora_name": "new", "lora_path": embedded.folders["adapter"]}
    assert embedded.post("/load_lora_adapter", orjson.dumps(good)).status_code == 200
    assert embedded.post("/unload_lora_adapter", b'{"lora_name": "new"}').status_code == 200


@pytest.mark.parametrize("folder", ["extra", "lacks", "shape", "bias", "adapter", "other model"])
def test_an_update_is_all_or_nothing(embedded: Embedded, folder: str) -> None:
    """A folder with one weight too much or too few changes nothing, and the right one is taken after it."""
    path = embedded.folders[folder]
    response = embedded.post("/update_weights_from_disk", orjson.dumps({"model_path": path, "weight_version": "9"}))
    assert response.status_code == 400 and response.json()["success"] is False
    embedded.assert_right()
    content = {"model_path": embedded.folders["model"], "weight_version": "10"}
    assert embedded.post("/update_weights_from_disk", orjson.dumps(content)).status_code == 200
    embedded.assert_right()


ODD_GROUPS: dict[str, list[Any]] = {
    "master_port": [0, -1, 65_536, 2**63, "80", 1.5, True, None, []],
    "world_size": [0, 1, -3, 2**40, "2"],
    "rank_offset": [0, 2, -1, 2**63, "1"],
    "master_address": ["", "a b", "\0", 5, None],
    "group_name": ["", "\0", "a b", 7, "x" * 256],
    "backend": ["nccl", "", 3],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ODD_GROUPS.items() for value in values])
def test_a_group_that_cannot_be_is_refused_by_the_field(embedded: Embedded, key: str, value: Any) -> None:
    """Before anything is connected."""
    content = {name: RIGHT[name] for name in ("master_address", "master_port", "rank_offset", "world_size", "backend")}
    response = embedded.post("/init_weights_update_group", orjson.dumps(content | {key: value}))
    assert response.status_code == 400
    assert key in response.json()["message"]


async def test_a_pass_that_fails_costs_the_request_that_it_is_about(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of the batch have the answer that they would have had, and the server goes on."""
    from asyncrl.servers.embedded.engine import Engine

    draw = Engine._draw

    def fail(self: Engine, requests: Any, hidden: Any) -> Any:
        if any(request.wire.rid == "bad" and request.output_tokens == 2 for request in requests):
            raise RuntimeError("no such number")
        return draw(self, requests, hidden)

    async with serving() as client:
        contents = [body([5 + number, 6], new=6, rid=str(number)) for number in range(5)]
        alone = [await post(client, "/generate", **content) for content in contents]
        await post(client, "/flush_cache")
        monkeypatch.setattr(Engine, "_draw", fail)
        calls = [Call(client, content | {"rid": f"again{content['rid']}"}) for content in contents]
        statuses: list[int] = []

        async def bad() -> None:
            response = await client.post("/generate", json=body([9, 9], new=6, rid="bad"))
            statuses.append(response.status_code)
            assert "no such number" in response.json()["error"]["message"]

        async with anyio.create_task_group() as tasks:
            for call in calls[:3]:
                tasks.start_soon(call)
            tasks.start_soon(bad)
            for call in calls[3:]:
                tasks.start_soon(call)
        assert statuses == [500]
        assert [call.reply["output_ids"] for call in calls] == [reply["output_ids"] for reply in alone]
        found = (await client.get("/v1/loads")).json()["loads"][0]
        assert (found["num_running_reqs"], found["num_waiting_reqs"]) == (0, 0)
        await post(client, "/generate", **body([5]))


async def test_an_engine_that_computes_nothing_refuses_every_request(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason, instead of letting them wait for ever."""
    from asyncrl.servers.embedded.engine import Engine

    def fail(self: Engine) -> None:
        raise RuntimeError("out of memory")

    async with serving() as client:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", fail)
            for _ in range(3):
                assert "out of memory" in str(await post(client, "/generate", 500, **body([5])))
        await post(client, "/generate", **body([5]))


async def test_a_client_that_leaves_within_its_body_is_nobodys_error(
    serving: Serving, tiny_model: Callable[..., Path]
) -> None:
    """Whichever route it was about to call."""
    from asyncrl.servers.embedded.app import create_app
    from asyncrl.servers.embedded.options import ServerOptions

    app = create_app(ServerOptions(model=tiny_model(), max_total_tokens=2000))
    async with app.router.lifespan_context(app):
        for route in [*FIELDS, "/generate"]:
            parts = iter([{"type": "http.request", "body": b'{"rid"', "more_body": True}, {"type": "http.disconnect"}])
            sent: list[Any] = []

            async def receive(parts: Iterator[Any] = parts) -> Any:
                return next(parts, {"type": "http.disconnect"})

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            scope = {"type": "http", "method": "POST", "path": route, "headers": [], "query_string": b""}
            await app(scope, receive, send)
            assert sent[0]["status"] in (200, 400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_updates_at_the_same_time_leave_a_server_that_is_right(
    serving: Serving, tiny_model: Callable[..., Path], tiny_adapter: Callable[..., Path], seed: int
) -> None:
    """Weights, labels, adapters, pauses and aborts in any order, right and wrong ones, chunked bodies among them."""
    import random

    chance = random.Random(seed)
    model, adapter = str(tiny_model()), str(tiny_adapter(seed=1))
    acts: list[tuple[str, dict[str, Any]]] = [
        ("/update_weights_from_disk", {"model_path": model, "weight_version": "1", "abort_all_requests": True}),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}),
        ("/update_weights_from_disk", {"model_path": str(tiny_model("llama"))}),
        ("/update_weight_version", {"new_version": "2"}),
        ("/begin_weight_update", {}),
        ("/end_weight_update", {}),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": adapter}),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": model}),
        ("/unload_lora_adapter", {"lora_name": "a"}),
        ("/pause_generation", {"mode": "retract"}),
        ("/pause_generation", {"mode": "abort"}),
        ("/continue_generation", {}),
        ("/flush_cache", {}),
        ("/abort_request", {"abort_all": True}),
        ("/generate", body([5, 6], new=3)),
        ("/generate", body([5, 6], new=3, lora_path="a")),
        ("/generate", {"input_ids": [5], "sampling_params": {"temperature": 2**64 - 1}}),
    ]
    async with serving() as client:
        normal = await post(client, "/generate", **body([5, 6, 7]))

        async def act(route: str, content: dict[str, Any]) -> None:
            data = orjson.dumps(content)

            async def pieces() -> AsyncGenerator[bytes, None]:
                for place in range(0, len(data), 7):
                    yield data[place : place + 7]

            # What waits for ever, such as a request in a pause, is given up by its client.
            with anyio.move_on_after(chance.uniform(0.05, 0.3)):
                _allowed(await client.post(route, content=pieces() if chance.random() < 0.3 else data))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(long := Call(client, body([8], new=LONG, rid="long")))
            await until_running(client)
            for _ in range(80):
                tasks.start_soon(act, *chance.choice(acts))
            long.scope.cancel()
        with anyio.fail_after(30):
            await client.post("/continue_generation")
            await client.post("/abort_request", json={"abort_all": True})
            await client.post("/flush_cache")
            again = await post(client, "/generate", **body([5, 6, 7]))
        assert again["output_ids"] == normal["output_ids"]
        assert again["meta_info"]["output_token_logprobs"] == normal["meta_info"]["output_token_logprobs"]
