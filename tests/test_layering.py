"""The import table of the design, read from the source: which room may look into which."""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.unit
ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "memscale"

WORDS = {"_errors", "_units", "_json", "_progress"}
DATA = WORDS | {"_plan", "_config"}
ALLOWED = {
    "_errors": set(),
    "_units": set(),
    "_progress": set(),
    "_json": {"_errors"},
    "_plan": WORDS | {"report", "techniques"},  # asked when they are called: `Plan.explain()`, `Plan.from_json()`
    "_config": WORDS,
    "_hardware": WORDS,
    "_torch": WORDS,
    "_profile": WORDS | {"_plan", "_torch"},
    "_decide": DATA | {"_hardware", "_profile", "report", "techniques"},
    "report": DATA | {"_hardware", "__init__", "techniques"},
    "techniques": DATA | {"_hardware", "_profile", "_torch"},
    "_execute": DATA | {"_hardware", "_torch", "report", "techniques"},  # `Executor.report()`
    "_planning": DATA | {"_decide", "_execute", "_hardware", "_profile", "_torch", "report", "techniques"},
    "zoo": WORDS,
    "_measurement": WORDS | {"_torch", "report"},  # asked when it is called: what a notebook shows
    "integrations": DATA | {"_api", "_torch", "techniques"},  # what a user makes (a callback) calls the verbs
}
"""Whom each room may import, at most. `_api`, `cli`, `commands` and the package itself stand above all of them."""
ABOVE_ALL = {"__init__", "__main__", "_api", "cli", "commands"}
NO_TORCH_ON_IMPORT = {
    "__init__",
    "_config",
    "_errors",
    "_hardware",
    "_json",
    "_plan",
    "_progress",
    "_units",
    "cli",
    "zoo",
}
"""Rooms that load without torch; what they need of it they import where they need it. `_decide` never does."""
PUBLIC_BY_CUSTOM = ("torch.utils._pytree", "torch.utils._python_dispatch")
"""Underscored modules that PyTorch's own documentation tells extension authors to use."""


def name_of(path: pathlib.Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(tree: ast.AST, *, top_level_only: bool = False) -> Iterator[str]:
    """Absolute names of what is imported; type-checking blocks do not count."""
    for node in _walk(tree, top_level_only):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _walk(tree: ast.AST, top_level_only: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        yield from _walk(node, top_level_only)


@functools.cache
def internal(name: str, *, top_level_only: bool = False) -> frozenset[str]:
    """Our own modules that this one imports."""
    found = set()
    for imported in imports(tree_of(MODULES[name]), top_level_only=top_level_only):
        if imported.split(".")[0] == "memscale":
            short = imported.removeprefix("memscale").lstrip(".")
            while short and short not in MODULES:
                short = short.rpartition(".")[0]
            found.add(short or "__init__")
    return frozenset(found)


def room_of(name: str) -> str:
    return name.split(".")[0]


def loads_torch(name: str, *, top_level_only: bool) -> bool:
    return any(i.split(".")[0] == "torch" for i in imports(tree_of(MODULES[name]), top_level_only=top_level_only))


def test_nothing_lies_at_the_root_but_what_is_listed() -> None:
    assert {room_of(name) for name in MODULES} == {*ALLOWED, *ABOVE_ALL}


def test_every_room_imports_only_what_is_below_it() -> None:
    for name in MODULES:
        room = room_of(name)
        if room not in ABOVE_ALL:
            used = {room_of(other) for other in internal(name)} - {room}
            allowed = ALLOWED[room]
            assert used <= allowed, f"{name} imports {sorted(used - allowed)}"


def test_deciding_and_techniques_read_the_data_of_profiles_and_not_their_making() -> None:
    for name in MODULES:
        if room_of(name) in ("_decide", "techniques"):
            making = {used for used in internal(name) if used.startswith("_profile.")}
            assert not making, f"{name} imports {sorted(making)}"


def test_deciding_never_imports_torch() -> None:
    assert not [name for name in MODULES if room_of(name) == "_decide" and loads_torch(name, top_level_only=False)]
    assert not loads_torch("_profile", top_level_only=True), "profiles are data"


def test_what_deciding_and_reporting_load_loads_without_torch() -> None:
    """The records of techniques among it: what attaches a technique is imported when that is done."""
    loaded = {name for name in MODULES if room_of(name) in ("_decide", "_plan", "_config")} | {"report.explain"}
    loaded |= {"report.outcomes", "techniques"}
    while more := {used for name in loaded for used in internal(name, top_level_only=True)} - loaded:
        loaded |= more
    assert {"techniques.checkpointing", "techniques.tiling"} <= loaded
    assert not {name for name in loaded if loads_torch(name, top_level_only=True)}


def test_these_rooms_load_without_torch() -> None:
    heavy = {name for name in MODULES if loads_torch(name, top_level_only=True)} - {"_hardware.detect"}
    assert not {name for name in heavy if room_of(name) in NO_TORCH_ON_IMPORT}


def test_techniques_never_import_one_another() -> None:
    for name in MODULES:
        if room_of(name) == "techniques" and "." in name:
            others = {used for used in internal(name) if room_of(used) == "techniques"} - {"techniques"}
            own = name.split(".")[1]
            # Computing a block again is what checkpointing and streaming have in common, and a record what all have.
            strangers = {used for used in others if used.split(".")[1] not in (own, "recompute", "technique")}
            assert not strangers, f"{name} imports {sorted(strangers)}"


def test_nothing_imports_in_a_circle() -> None:
    graph = {name: internal(name, top_level_only=True) - {name} for name in MODULES}
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {name for name, needs in graph.items() if name not in done and needs - {"__init__"} <= done}
        assert ready, f"a circle among {sorted(set(graph) - done)}"
        done |= ready


def test_few_modules_import_each_other() -> None:
    """Not even where one of them does so inside a function, but for these."""
    pairs = {(a, b) for a in MODULES for b in internal(a) if a < b and a in internal(b)}
    assert pairs <= {
        ("_api", "integrations.huggingface"),  # `wrap(trainer)`, whose callback calls the verbs
        ("_hardware", "_hardware.detect"),  # `Hardware.detect()`
        ("_plan", "report.explain"),  # `Plan.explain()`
        ("_plan", "report.page"),  # what a notebook shows of a plan
        ("_plan", "techniques"),  # `Plan.from_json()` knows the actions of the table
        ("techniques.tiling.head.functions", "techniques.tiling.head.lazy"),  # functions of lazy logits give such
    }


def test_device_code_is_generic() -> None:
    for name, path in MODULES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) != "torch.cuda", f"{name}:{node.lineno} uses torch.cuda"
        assert not [i for i in imports(tree_of(path)) if i.startswith("torch.cuda")], name


def test_private_torch_is_in_one_place() -> None:
    for name, path in MODULES.items():
        if name != "_torch.private" and not name.startswith("_torch.private."):
            private = private_torch(tree_of(path))
            assert not private, f"{name} uses {private}: put it into _torch/private/"


def private_torch(tree: ast.Module) -> list[str]:
    found = [i for i in imports(tree) if i.startswith("torch.") and "._" in i and not i.startswith(PUBLIC_BY_CUSTOM)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text.startswith(("torch._", "torch.optim._", "torch.utils._", "torch.nn._", "torch.autograd._")):
                found.append(text)
    return found


def test_the_product_uses_nothing_made_for_tests() -> None:
    for name, path in MODULES.items():
        heads = {i.split(".")[0] for i in imports(tree_of(path))}
        assert not heads & {"unittest", "pytest", "tests", "typing_extensions"}, name


def test_wishes_and_abilities_meet_in_one_place() -> None:
    """Planning is handed what is eligible: it never asks again what a config comes to on a hardware."""
    resolving = {name for name in MODULES if calls(name, "resolve")}
    assert resolving == {"_decide.eligible", "_planning.job"}
    for part in ("budget_bytes", "full_budget", "travels", "half_type", "hindrance"):
        asking = {name for name in MODULES if calls(name, part) and room_of(name) not in ("techniques", "_profile")}
        assert asking <= {"_decide.eligible", "_decide.budget"}, part


def calls(name: str, function: str) -> bool:
    """Whether a module calls a function, or a method, of this name with arguments."""
    for node in ast.walk(tree_of(MODULES[name])):
        if isinstance(node, ast.Call) and node.args:
            called = node.func
            if function == (called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")):
                return True
    return False


def test_no_stage_takes_a_config_and_a_hardware() -> None:
    """A function that took both could make another choice of them; techniques are asked by `resolve` alone."""
    for name in MODULES:
        if room_of(name) in ("_decide", "_planning", "_execute", "report"):
            both = [function for function in functions_of(name) if {"Config", "Hardware"} <= types_of(function)]
            found = {function.name for function in both}
            allowed = {
                "_decide.eligible": {"resolve", "_may_step_on_host"},
                "_decide.budget": {"budget_bytes", "full_budget"},
                "_decide.travel": {"travels"},
                "_planning.job": {"open_job"},
                "_planning.questions.estimate": {"estimate"},  # what a user calls
                "_planning.questions.largest_batch": {"fit"},
            }.get(name, set())
            assert found <= allowed, f"{name} {sorted(found - allowed)}"


def functions_of(name: str) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree_of(MODULES[name])) if isinstance(node, ast.FunctionDef)]


def types_of(function: ast.FunctionDef) -> set[str]:
    """The names in the types of its parameters."""
    given = function.args
    annotations = [one.annotation for one in (*given.posonlyargs, *given.args, *given.kwonlyargs) if one.annotation]
    return {node.id for one in annotations for node in ast.walk(one) if isinstance(node, ast.Name)}
