"""What holds for the package as a whole: layers, quick import, file sizes, no bare tasks."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import asyncrl
from tests.importgraph import LAZY, read

ROOT = Path(asyncrl.__file__).parent
# The shim is a package for SGLang's interpreter, on whose path it is put; it needs torch like the one it stands for.
SHIM = ROOT / "servers" / "cpu_shim"
FILES = sorted(file for file in ROOT.rglob("*.py") if not file.is_relative_to(SHIM))
TREES = {
    ".".join(("asyncrl", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): ast.parse(
        file.read_text(encoding="utf-8")
    )
    for file in FILES
}
# A room is a module or package at the top level. It imports only rooms of lower layers, and none beside it.
LAYERS = [
    ["plain", "flags", "modules"],
    ["errors"],
    ["types", "files", "concurrency"],
    ["events"],
    ["scheduling", "learning", "sampling"],
    ["servers", "publishing"],
    ["rollout"],
    ["checkpoint", "observe", "testing"],
    ["training"],
    ["recipe", "simulation"],
    ["cli"],
    ["__main__"],
]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
MOST_ROOMS, MOST_FLOORS = 22, 12
PURE = ("types", "errors", "events", "plain", "scheduling.rules", "sampling.base", "learning.base", "publishing.base")
# Values and rules.
HEAVY = {"torch", "transformers", "peft"}
TORCH_MODULES = (
    "asyncrl.learning.torch_",
    "asyncrl.learning.losshead",
    "asyncrl.learning.losstiles",
    "asyncrl.learning.masters",
    "asyncrl.learning.modelexport",
    "asyncrl.learning.modelloading",
    "asyncrl.learning.policymodule",
    "asyncrl.learning.ranks.sharding",
    "asyncrl.learning.sharing",
    "asyncrl.learning.tokendata",
    "asyncrl.learning.treeattention",
    "asyncrl.publishing.torch_",
    "asyncrl.servers.embedded.",
)
BANNED = {"create_task", "ensure_future", "gather", "wait", "wait_for", "shield", "Queue"}
# iteration.py holds the one task that no task group starts, and says why.
TASK_STARTERS = {"asyncrl.concurrency.iteration"}


def room(module: str) -> str:
    """The room at the top level that ``module`` is in."""
    return module.split(".")[1]


def imports(tree: ast.AST) -> Iterator[str]:
    """Names of all modules that are imported anywhere in ``tree``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def imported_at_once(tree: ast.Module) -> Iterator[str]:
    """Names of the modules that importing the module imports: not those in functions or for type checkers."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports(node)


def defined(tree: ast.Module) -> set[str]:
    """Names that the module binds at its top level."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def exported(tree: ast.Module) -> list[str] | None:
    """The value of ``__all__``, None if the module has none."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                return [str(name) for name in ast.literal_eval(node.value)]
    return None


def modules_after(code: str) -> set[str]:
    """Names of the modules that a new interpreter has loaded after running ``code``."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("module", [name for name in TREES if name != "asyncrl"])
def test_a_module_imports_only_rooms_below_its_own(module: str) -> None:
    """Dependencies point downwards, also those of functions: there is no circle, and no arrow between neighbours."""
    inside = module.removeprefix("asyncrl.")
    for name in imports(TREES[module]):
        if name.startswith("asyncrl.") and room(name) != room(module) and (inside, room(name)) not in LAZY:
            assert LAYER[room(name)] < LAYER[room(module)], f"{module} imports {name}, which is not in a lower layer"


def test_every_room_has_a_layer() -> None:
    """A new one is put somewhere."""
    assert {room(module) for module in TREES if module != "asyncrl"} == set(LAYER)


def test_the_house_is_small_enough_to_walk_through() -> None:
    """Few rooms, on few floors, without a circle; ``python tests/importgraph.py`` draws them."""
    graph = read(ROOT)
    assert graph.circle == ()
    assert len(graph.rooms) <= MOST_ROOMS
    assert len(graph.floors) <= MOST_FLOORS


def test_a_circle_is_found(tmp_path: Path) -> None:
    """Also one that is hidden in functions; and floors are counted from the ground up."""
    package = tmp_path / "asyncrl"
    (package / "two").mkdir(parents=True)
    (package / "one.py").write_text("import os\n")
    (package / "two" / "__init__.py").write_text("")
    (package / "two" / "part.py").write_text("from asyncrl import one\n")
    (package / "three.py").write_text("from asyncrl.two.part import one\nimport asyncrl.one\n")
    assert read(package).floors == [["one"], ["two"], ["three"]]
    (package / "one.py").write_text("def late():\n    from asyncrl.three import one\n")
    assert set(read(package, without=frozenset()).circle) == {"one", "three"}
    assert read(package, without=frozenset({("one", "three")})).circle == ()


def test_rules_and_values_do_no_io() -> None:
    """They can be read and tested without an event loop, a socket or torch."""
    for module in PURE:
        roots = {name.partition(".")[0] for name in imports(TREES[f"asyncrl.{module}"])}
        assert not roots & {*HEAVY, "anyio", "asyncio", "httpx", "subprocess", "socket", "threading"}, module


def test_checkpoints_know_values_only() -> None:
    """What a run directory holds can be read without a policy, an engine or an event loop."""
    below = {"plain", "errors", "files", "types", "checkpoint"}
    values = {"learning.base", "rollout.progress", "scheduling.ledger", "scheduling.staleness"}
    for module, tree in TREES.items():
        if module.startswith("asyncrl.checkpoint."):
            for name in imports(tree):
                if name.startswith("asyncrl."):
                    assert room(name) in below or name.removeprefix("asyncrl.") in values, f"{module} imports {name}"
                assert name.partition(".")[0] not in {*HEAVY, "anyio", "asyncio"}, module


def test_torch_is_imported_at_once_only_where_it_computes() -> None:
    """Everything but the learner's core and the embedded server can be imported without torch."""
    for module, tree in TREES.items():
        if not module.startswith(TORCH_MODULES):
            found = {name.partition(".")[0] for name in imported_at_once(tree)} & HEAVY
            assert not found, f"{module} imports {found} at its top"


def test_importing_asyncrl_imports_next_to_nothing() -> None:
    """``import asyncrl`` is quick because names are loaded when they are used."""
    loaded = modules_after("import asyncrl")
    assert not loaded & {*HEAVY, "pydantic", "httpx", "numpy", "anyio", "structlog", "rich"}
    assert not {name for name in loaded if name.startswith("asyncrl.")}


@pytest.mark.slow
def test_no_public_name_needs_torch_to_be_imported() -> None:
    """A program can build its whole run before torch is loaded."""
    loaded = modules_after("import asyncrl\nfor name in asyncrl.__all__: getattr(asyncrl, name)")
    assert not loaded & HEAVY


def test_public_names_are_defined_where_the_stub_says() -> None:
    """No name has moved away, none is missing in ``__all__``, and each is found by its name."""
    stub = ast.parse((ROOT / "__init__.pyi").read_text(encoding="utf-8"))
    homes = {
        alias.name: str(node.module) for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(homes) == sorted(asyncrl.__all__) == sorted(exported(stub) or ())
    assert set(asyncrl.__all__) <= set(dir(asyncrl))
    for name, module in homes.items():
        assert name in defined(TREES[f"asyncrl.{module}"]), f"{module} defines no {name}"


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    """The lazy table refuses names like any module does."""
    with pytest.raises(AttributeError, match="attribute AsyncTrianer"):
        asyncrl.AsyncTrianer  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_are_small_and_say_what_they_own(file: Path) -> None:
    """A file has at most 400 lines, a docstring, and ``__all__`` naming things that it has."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    if not tree.body:
        return  # a package's own empty file
    names = exported(tree)
    assert text.count("\n") <= 400
    assert ast.get_docstring(tree)
    if file.name == "__init__.py":
        return  # it only hands on what its modules define
    assert names is not None, "no __all__"
    assert set(names) <= defined(tree)


def test_no_task_is_started_outside_a_task_group() -> None:
    """asyncio's own tasks, waits and queues are not used: structured concurrency has them all in anyio."""
    for module, tree in TREES.items():
        if module in TASK_STARTERS:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
                assert not BANNED & {alias.name for alias in node.names}, module
            if isinstance(node, ast.Attribute) and node.attr in BANNED:
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                assert owner != "asyncio", f"{module} uses asyncio.{node.attr}"
                assert node.attr not in {"create_task", "ensure_future"}, f"{module} uses {node.attr}"
