"""The script of a Slurm job: where it puts what, what it refuses, and that one part that dies ends all."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.cli.main import main
from asyncrl.errors import ConfigError
from asyncrl.learning.options import LoraConfig
from asyncrl.learning.ranks import driverlink
from asyncrl.recipe.config import load_recipe
from asyncrl.recipe.slurm import SlurmOptions, lay_out
from asyncrl.servers.serving import add_server_flags, flags_of, read_options
from asyncrl.servers.sglangcommand import SGLangOptions

RECIPE = """
[model]
path = "my model"
ranks = 4
{model}
[env]
factory = "env.py:Talk"
[data]
train = "env.py:rows"
[trainer]
steps = 1
groups_per_step = 1
max_staleness = 0
[budget]
max_generated_tokens = 100
[optimizer]
lr = 1e-3
[sampler]
{sampler}
"""
SAMPLER = 'backend = "sglang"\nservers = 3\ntensor_parallel = 2\narguments = ["--log-level", "it\'s $HOME"]'
ADAPTER = LoraConfig(r=4, target_modules=("q_proj", "o_proj"))
PARTS = ("learner", "server-0", "server-1", "server-2", "driver")

# Stands in for Python: says what it was called with, is ready, and stays until it is told to end.
PART = r"""#!/bin/bash
case "$*" in
*asyncrl.learning.ranks*) name=learner; echo "rank 0 waits for the driver on 0.0.0.0:29400" >&2 ;;
*" serve "*) name="server-${5#3000}"; echo '{"ready": true}' ;;
*) name=driver ;;
esac
trap 'echo "$name" >> "$SAID/told"; exit 0' TERM
printf '%s\n' "$CUDA_VISIBLE_DEVICES" "$@" > "$SAID/$name.$SLURM_PROCID.new"
mv "$SAID/$name.$SLURM_PROCID.new" "$SAID/$name.$SLURM_PROCID"
until [[ $name == "$DIES" && -e $SAID/driver. ]]; do /bin/sleep 0.02; done
exit 7
"""
SRUN = r"""#!/bin/bash
while [[ $1 == --* ]]; do
    [[ $1 == --ntasks=* ]] && tasks="${1#*=}"
    shift
done
for ((i = 0; i < tasks; i++)); do SLURM_PROCID=$i "$@" & done
trap 'kill -TERM $(jobs -p)' TERM
wait -n
code=$?
kill -TERM $(jobs -p) 2> /dev/null
exit $code
"""
COMMANDS = {
    "srun": SRUN,
    "scontrol": "#!/bin/bash\nprintf 'node%s\\n' 1 2 3\n",
    "sleep": "#!/bin/bash\nexec /bin/sleep 0.02\n",
    "sbatch": '#!/bin/bash\ncat > "$SAID/submitted"\necho "12345;cluster"\n',
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An oddly named folder to work in, where the commands of Slurm and Python are stand-ins."""
    home, bin_folder, said = tmp_path / 'it\'s a "$HOME" é', tmp_path / "bin", tmp_path / "said"
    for folder in (home, bin_folder, said, home / "my model"):
        folder.mkdir()
    for name, text in {**COMMANDS, "py thon": PART}.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "executable", str(bin_folder / "py thon"))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-3]", "SAID": str(said)}
    for name, value in {"PATH": f"{bin_folder}:{os.environ['PATH']}", **job}.items():
        monkeypatch.setenv(name, value)
    return home


@pytest.fixture
def script(home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``asyncrl slurm --dry-run`` of a recipe; if it is refused, what it says."""

    def run(*arguments: str, model: str = "", sampler: str = SAMPLER, code: int = 0) -> str:
        (home / "recipe.toml").write_text(RECIPE.format(model=model, sampler=sampler))
        assert main(["slurm", "recipe.toml", "--dry-run", "--gpus-per-node=4", *arguments]) == code
        captured = capsys.readouterr()
        return captured.out if code == 0 else captured.err

    return run


def test_the_script_asks_for_what_the_recipe_needs(script: Callable[..., str]) -> None:
    """It is sound for the shell; options of the cluster are its first lines, the user's own the last of these."""
    text = script("--partition=gpu", "--account=me", "--time=1-12:00:00", "--sbatch=--constraint=h100 a")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=3", "--gpus-per-node=4", "--partition=gpu", "--account=me", "--time=1-12:00:00"} <= {*asked}
    assert asked[-1] == "--constraint=h100 a"
    assert text.count("\npart ") == 4


def test_what_is_waited_for_is_what_ranks_say(script: Callable[..., str]) -> None:
    """The script looks for it in their log."""
    said = "waits for the driver"
    assert f"until_said learner '{said}'" in script()
    assert said in inspect.getsource(driverlink)


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "code"), [("learner", 1), ("server-2", 1), ("driver", 7)])
def test_a_part_that_dies_ends_all(
    home: Path, script: Callable[..., str], monkeypatch: pytest.MonkeyPatch, dies: str, code: int
) -> None:
    """No process is left; the driver is told first, so that it can save the run; the secrets are for nobody else."""
    monkeypatch.setenv("DIES", dies)
    text = script("--set", "env.word=it's $HOME", "--set", "trainer.steps=2")
    # Whatever runs holds the pipe open.
    read, write = os.pipe()
    with subprocess.Popen(
        ["bash", "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=[write]
    ) as job:
        os.close(write)
        _, said = job.communicate(timeout=120)
        with os.fdopen(read, "rb") as pipe:
            assert pipe.read() == b""
    assert job.returncode == code, said
    assert dies == "driver" or f"{dies} has ended, with code 7" in said
    told = (home.parent / "said" / "told").read_text().split()
    assert {*told} == {*PARTS} - {dies}
    assert dies == "driver" or told[0] == "driver"

    folder = home / "slurm-7"
    assert (folder / "token").stat().st_mode & 0o077 == 0
    assert (folder / "servers").read_text().split() == [
        "http://node2:30000",
        "http://node3:30001",
        "http://node2:30002",
    ]
    calls = {path.name: path.read_text().splitlines() for path in (home.parent / "said").iterdir() if "." in path.name}
    assert {name: words[0] for name, words in calls.items() if "driver" not in name} == {
        "learner.0": "0,1,2,3",
        "server-0.0": "0,1",
        "server-1.0": "0,1",
        "server-2.0": "2,3",
    }
    assert calls["driver."][1:5] == ["-m", "asyncrl", "train", str(home / "recipe.toml")]
    settings = [value for flag, value in pairwise(calls["driver."]) if flag == "--set"]
    recipe = load_recipe(home / "recipe.toml", settings)
    assert (recipe.env.options, recipe.steps) == ({"word": "it's $HOME"}, 2)
    assert (recipe.learner["address"], str(recipe.learner["token_file"])) == ("node1:29400", str(folder / "token"))
    assert (recipe.learner["ranks"], recipe.sampler.urls_file) == (1, str(folder / "servers"))
    assert {"--log-level", "it's $HOME", f"--model={home / 'my model'}", "--host=0.0.0.0"} <= {*calls["server-0.0"]}


@pytest.mark.slow
def test_the_end_of_the_time_is_an_end_in_order(
    home: Path, script: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is told as by Ctrl-C, and ends with 0; so does the job."""
    monkeypatch.setenv("DIES", "nobody")
    with subprocess.Popen(["bash", "-c", script()], stderr=subprocess.PIPE, text=True) as job:
        while not (home.parent / "said" / "driver.").exists():
            assert job.poll() is None
            os.sched_yield()
        job.terminate()
        job.communicate(timeout=120)
    assert job.returncode == 0
    assert (home.parent / "said" / "told").read_text().split()[0] == "driver"


@pytest.mark.parametrize(
    ("recipe", "arguments", "said"),
    [
        ({"sampler": ""}, (), "sampler.backend is 'embedded'"),
        ({"sampler": 'backend = "sglang"\nurls = ["http://a:1"]'}, (), "sampler.urls"),
        ({"sampler": 'backend = "sglang"\nurls_file = "urls"'}, (), "sampler.urls_file is 'urls'"),
        ({"sampler": 'backend = "sglang"\ngpus = ["1"]'}, (), "sampler.gpus"),
        ({"sampler": 'backend = "sglang"\ntensor_parallel = 8'}, (), "sampler.tensor_parallel is 8"),
        ({}, ("--nodes=1",), "--nodes is 1"),
        ({}, ("--nodes=5",), "between 3 and 4"),
        ({}, ("--gpus-per-node=0",), "--gpus-per-node is 0"),
        ({}, ("--partition=a b",), "--partition"),
        ({}, ("--sbatch=--x\nrm",), "--sbatch"),
        ({}, ("--set", "model.path=", "--set", "model.source=env.py:make"), "model.source"),
    ],
)
def test_what_cannot_be_a_job_is_refused(
    script: Callable[..., str], recipe: dict[str, str], arguments: tuple[str, ...], said: str
) -> None:
    """By the key or the flag, with what is allowed."""
    assert said in script(*arguments, **recipe, code=2)


def test_a_job_is_submitted(home: Path, script: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """The script that ``--dry-run`` prints goes to sbatch, and the number of the job is the result."""
    text = script()
    assert main(["slurm", "recipe.toml", "--gpus-per-node=4"]) == 0
    assert json.loads(capsys.readouterr().out) == {"job": "12345"}
    assert (home.parent / "said" / "submitted").read_text() == text


def test_without_sbatch_the_way_out_is_named(
    script: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine that is no cluster."""
    script()
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["slurm", "recipe.toml", "--gpus-per-node=4"]) == 2
    assert "--dry-run" in capsys.readouterr().err


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 4), st.integers(1, 8), st.none() | st.integers(1, 20))
def test_no_gpu_is_used_twice(ranks: int, servers: int, each: int, gpus: int, nodes: int | None) -> None:
    """Every rank and server has its own, on a node of the job; what does not fit is refused."""
    try:
        layout = lay_out(
            SlurmOptions(gpus_per_node=gpus, nodes=nodes), ranks=ranks, servers=servers, tensor_parallel=each
        )
    except ConfigError:
        assert nodes is not None or each > gpus
        return
    used = Counter((node, gpu) for node in range(layout.learner_nodes) for gpu in range(layout.ranks_per_node))
    used.update((server.node, gpu) for server in layout.servers for gpu in server.gpus)
    assert set(used.values()) == {1}
    assert used.total() == ranks + servers * each
    assert all(node < layout.nodes and gpu < gpus for node, gpu in used)
    assert {node for node, _ in used} == set(range(layout.nodes))


@pytest.mark.parametrize(
    "options",
    [
        SGLangOptions(model=Path("m")),
        SGLangOptions(
            model=Path("-m"), max_loras_per_batch=12, lora=LoraConfig(r=4, target_modules=("q_proj", "v_proj"))
        ),
        SGLangOptions(model=Path("m"), tensor_parallel=2, dtype="bfloat16", memory_fraction=0.5, allow_version=True),
        SGLangOptions(model=Path("m"), gpus=("0", "1"), arguments=("--log-level", "debug")),
    ],
)
def test_flags_of_a_server_are_read_as_its_options(options: SGLangOptions) -> None:
    """What one machine writes, the other one reads."""
    parser = argparse.ArgumentParser()
    add_server_flags(parser)
    found = {name: value for name, value in vars(parser.parse_args(flags_of(options))).items() if name != "backend"}
    read = read_options({name: value for name, value in found.items() if value != []} | {"port": 0})
    assert (read.lora is None) == (options.lora is None)
    if read.lora is not None and options.lora is not None:
        assert (read.lora.r, [*read.lora.target_modules]) == (options.lora.r, [*options.lora.target_modules])
    assert replace(read, lora=None) == replace(options, lora=None)
