"""The command of a real server: a pure function of options and machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.learning.options import LoraConfig
from asyncrl.servers.sglangcommand import Command, Machine, SGLangOptions, plan_command, plan_here, split_gpus
from tests.modelfolder import write_model

OWN, INSTALLED = Path("/own/python"), Path("/installed/python")
LAPTOP = Machine(interpreter=OWN, has_sglang=False, installed=INSTALLED, gpus=())
GPU_BOX = Machine(interpreter=OWN, has_sglang=True, installed=None, gpus=("0", "1", "2", "3"))
MODEL = Path("/models/qwen")


def _plan(machine: Machine = LAPTOP, **options: Any) -> Command:
    return plan_command(SGLangOptions(**{"model": MODEL, "port": 30_000, **options}), machine)


def _after(command: Command, flag: str) -> str:
    """The value of ``flag``; each flag is given once."""
    assert command.arguments.count(flag) == 1, flag
    return command.arguments[command.arguments.index(flag) + 1]


def test_the_cpu_server_computes_in_plain_torch() -> None:
    """No compiled kernels, no graphs, float32, bounded memory, and no busy waiting."""
    command = _plan()
    assert command.arguments[:3] == (str(INSTALLED), "-m", "sglang.launch_server")
    expected = {
        "--model-path": str(MODEL),
        "--host": "127.0.0.1",
        "--port": "30000",
        "--device": "cpu",
        "--attention-backend": "torch_native",
        "--sampling-backend": "pytorch",
        "--cuda-graph-backend-decode": "disabled",
        "--cuda-graph-backend-prefill": "disabled",
        "--dtype": "float32",
        "--max-total-tokens": "32768",
        "--max-running-requests": "64",
        "--random-seed": "0",
        "--log-level-http": "warning",
    }
    assert {flag: _after(command, flag) for flag in expected} == expected
    assert {"--disable-overlap-schedule", "--sleep-on-idle"} <= {*command.arguments}
    assert "--enable-lora" not in command.arguments


def test_only_the_cpu_server_gets_the_shim() -> None:
    """The stand-in for compiled kernels is on the path of the CPU server, and GPUs are hidden from it."""
    environment = _plan(threads=3).environment
    shim = Path(environment["PYTHONPATH"])
    assert (shim / "sgl_kernel" / "__init__.py").is_file()
    assert [path.name for path in shim.iterdir() if path.name != "__pycache__"] == ["sgl_kernel"]
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert _plan(GPU_BOX).environment == {"HF_HUB_OFFLINE": "1"}


def test_nothing_is_downloaded() -> None:
    """A model that is not on the disk is an error, wherever the server runs."""
    assert _plan().environment["HF_HUB_OFFLINE"] == _plan(GPU_BOX).environment["HF_HUB_OFFLINE"] == "1"


def test_on_gpus_the_choices_are_left_to_sglang() -> None:
    """Kernels, precision and sizes are its own, unless an option says otherwise."""
    command = _plan(GPU_BOX, tensor_parallel=2, memory_fraction=0.7, lora=LoraConfig(r=8))
    assert command.arguments[0] == str(OWN)
    assert _after(command, "--device") == "cuda"
    assert _after(command, "--tp") == "2"
    assert _after(command, "--mem-fraction-static") == "0.7"
    for flag in ("--attention-backend", "--dtype", "--max-total-tokens", "--lora-backend", "--sleep-on-idle"):
        assert flag not in command.arguments


def test_adapters_are_served_up_to_the_rank_and_modules_that_are_trained() -> None:
    """Every linear layer if the learner says so, else the named ones."""
    command = _plan(lora=LoraConfig(r=4), max_loras_per_batch=6, max_loaded_loras=9)
    assert _after(command, "--max-lora-rank") == "4"
    assert _after(command, "--max-loras-per-batch") == "6"
    assert _after(command, "--max-loaded-loras") == "9"
    assert _after(command, "--lora-backend") == "torch_native"
    start = command.arguments.index("--lora-target-modules") + 1
    assert command.arguments[start : start + 7] == (
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    )
    named = _plan(lora=LoraConfig(r=4, target_modules=("q_proj", "v_proj")), lora_backend="triton").arguments
    start = named.index("--lora-target-modules") + 1
    assert named[start : start + 2] == ("q_proj", "v_proj")
    assert named[named.index("--lora-backend") + 1] == "triton"


def test_further_arguments_come_last() -> None:
    """Where SGLang takes the last of two values, the user's wins."""
    command = _plan(arguments=("--max-total-tokens", "77"), max_total_tokens=4096)
    assert command.arguments[-2:] == ("--max-total-tokens", "77")


def test_keys_are_neither_on_the_command_line_nor_in_the_environment() -> None:
    """Everybody on the machine can read a command line; and a value that is printed hides them."""
    options = SGLangOptions(model=MODEL, port=1, api_key="hush", admin_key="quiet")
    command = plan_command(options, LAPTOP)
    assert command.secrets == {"api-key": "hush", "admin-api-key": "quiet"}
    for text in (*command.arguments, *command.environment.values(), repr(command), repr(options)):
        assert "hush" not in text
        assert "quiet" not in text


@pytest.mark.parametrize(
    ("machine", "options", "python", "device"),
    [
        (LAPTOP, {}, INSTALLED, "cpu"),
        (GPU_BOX, {}, OWN, "cuda"),
        (replace(GPU_BOX, gpus=()), {}, OWN, "cpu"),
        (replace(GPU_BOX, has_sglang=False, installed=INSTALLED), {}, INSTALLED, "cpu"),
        (GPU_BOX, {"device": "cpu"}, OWN, "cpu"),
        (replace(LAPTOP, gpus=("0",)), {"python": Path(__file__)}, Path(__file__), "cuda"),
    ],
)
def test_interpreter_and_device_go_together(
    machine: Machine, options: dict[str, Any], python: Path, device: str
) -> None:
    """Our own interpreter if it has SGLang; what was installed for the CPU never uses a GPU by itself."""
    command = _plan(machine, **options)
    assert (command.arguments[0], _after(command, "--device")) == (str(python), device)


@pytest.mark.parametrize(
    ("machine", "options", "message"),
    [
        (replace(LAPTOP, installed=None), {}, "asyncrl install-sglang"),
        (LAPTOP, {"python": Path("/no/python")}, "python is '/no/python'"),
        (LAPTOP, {"device": "cuda"}, "device is 'cuda'"),
        (LAPTOP, {"tensor_parallel": 2}, "tensor_parallel is 2, but must be at most 1, without a GPU"),
        (GPU_BOX, {"tensor_parallel": 5}, "tensor_parallel is 5, but must be at most 4"),
        (GPU_BOX, {"tensor_parallel": 2, "gpus": ("3",)}, "tensor_parallel is 2, but must be at most 1"),
    ],
)
def test_what_the_machine_lacks_is_said(machine: Machine, options: dict[str, Any], message: str) -> None:
    """Before anything is started, with what would be allowed."""
    with pytest.raises(ConfigError) as raised:
        _plan(machine, **options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, "host is '0.0.0.0', but must be one of 127.0.0.1"),
        ({"port": 70_000}, "port is 70000"),
        ({"memory_fraction": 1.5}, "memory_fraction is 1.5"),
        ({"tensor_parallel": 0}, "tensor_parallel is 0"),
        ({"max_total_tokens": 0}, "max_total_tokens is 0"),
        ({"start_timeout_s": 0.0}, "start_timeout_s is 0"),
        ({"arguments": ("--api-key=hush",)}, "they have options here"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    """Each names the option, the value and what is allowed."""
    with pytest.raises(ConfigError) as raised:
        SGLangOptions(model=MODEL, **options)
    assert message in str(raised.value)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """SGLang would take its name for one to download."""
    with pytest.raises(ConfigError, match=r"there is no config\.json"):
        plan_here(SGLangOptions(model=tmp_path))


def test_a_model_whose_adapters_would_end_the_cpu_server_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang pads the model there and not the adapter, and dies at its first use."""
    write_model(tmp_path, '{"intermediate_size": 48}')
    monkeypatch.setattr(Machine, "found", lambda: LAPTOP)
    with pytest.raises(ConfigError, match=r"multiple of 32, for adapters on a CPU: it is 48"):
        plan_here(SGLangOptions(model=tmp_path, lora=LoraConfig(r=4)))
    assert plan_here(SGLangOptions(model=tmp_path))
    monkeypatch.setattr(Machine, "found", lambda: GPU_BOX)
    assert plan_here(SGLangOptions(model=tmp_path, lora=LoraConfig(r=4)))


def test_several_servers_share_the_gpus() -> None:
    """Each gets its own, in order; on a CPU there is nothing to share; too few are refused."""
    two = SGLangOptions(model=MODEL, tensor_parallel=2)
    assert split_gpus(two, GPU_BOX, 2) == [("0", "1"), ("2", "3")]
    assert split_gpus(two, GPU_BOX, 1) == [()]
    assert split_gpus(replace(two, tensor_parallel=1), LAPTOP, 3) == [(), (), ()]
    with pytest.raises(ConfigError, match="servers is 3, but must be at most 2: 4 GPUs, 2 each"):
        split_gpus(two, GPU_BOX, 3)
    environment = plan_command(replace(two, gpus=("2", "3")), GPU_BOX).environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
