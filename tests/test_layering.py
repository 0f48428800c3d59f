"""The import table of the design, read from the source."""

from __future__ import annotations

import ast
import functools
import pathlib
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.unit
PACKAGE = pathlib.Path(__file__).parent.parent / "src" / "memscale"
FILES = sorted(PACKAGE.rglob("*.py"))

TORCH_FREE = (
    "__init__",
    "_calls",
    "_cards",
    "_choice",
    "_config",
    "_decide",
    "_errors",
    "_front",
    "_hardware",
    "_host",
    "_json",
    "_lowest",
    "_measure",
    "_optimizer_model",
    "_pace",
    "_peak",
    "_plan",
    "_policy",
    "_profile",
    "_scaling",
    "_search",
    "_stretch",
    "_units",
    "_ways",
    "_writing",
)

ALLOWED = {
    "_errors": set(),
    "_units": set(),
    "_json": {"_errors"},
    "_measure": {"_errors", "_json", "_units"},
    "_config": {"_errors"},
    "_plan": {"_errors", "_json", "_units"},
    "_cards": set(),
    "_host": set(),
    "_hardware": {"_cards", "_errors", "_host", "_measure"},
    "_profile": {"_json", "_plan"},
    "_choice": {"_plan"},
    "_calls": {"_choice"},
    "_stretch": set(),
    "_pace": {"_calls", "_choice", "_hardware", "_profile"},
    "_optimizer_model": {"_calls", "_choice", "_pace", "_profile"},
    "_peak": {"_choice", "_hardware", "_optimizer_model", "_pace", "_profile", "_stretch"},
    "_scaling": {"_choice", "_plan", "_profile"},
    "_ways": {"_choice", "_peak", "_stretch"},
    "_lowest": {"_choice", "_peak", "_ways"},
    "_search": {"_choice", "_lowest", "_peak", "_stretch", "_ways"},
    "_front": {"_choice", "_plan", "_search"},
    "_decide": {
        "_choice",
        "_config",
        "_errors",
        "_front",
        "_hardware",
        "_lowest",
        "_peak",
        "_plan",
        "_profile",
        "_search",
        "_writing",
    },
    "_writing": {"_choice", "_config", "_front", "_hardware", "_peak", "_plan", "_profile", "_search", "_units"},
}
"""Whom each of the pure modules may import, at most."""

MEETING_PLACES = {"_api", "_planner", "_observed", "_pipeline", "_study", "_estimate", "_fit", "_advice"}


def name_of(path: pathlib.Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


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


MODULES = {name_of(path): path for path in FILES}


def internal(name: str, *, top_level_only: bool = False) -> set[str]:
    """Our own modules that this one imports."""
    found = set()
    for imported in imports(tree_of(MODULES[name]), top_level_only=top_level_only):
        if imported.startswith("memscale."):
            short = imported.removeprefix("memscale.")
            while short and short not in MODULES:
                short = short.rpartition(".")[0]
            if short:
                found.add(short)
    return found


def test_these_need_no_torch() -> None:
    for name in TORCH_FREE:
        loaded = [i for i in imports(tree_of(MODULES[name]), top_level_only=True) if i.split(".")[0] == "torch"]
        assert not loaded, f"{name} imports {loaded}"


def test_pure_modules_import_only_what_is_below_them() -> None:
    for name, below in ALLOWED.items():
        assert internal(name) <= below, f"{name} imports {internal(name) - below}"


def test_profile_decide_and_execute_meet_only_in_the_api() -> None:
    def stages(name: str) -> set[str]:
        return {
            stage
            for stage in ("_profile", "_decide", "_execute")
            for used in internal(name)
            if used == stage or (used.startswith(f"{stage}.") and stage == "_profile")
        }

    for name in MODULES:
        if name in MEETING_PLACES or name.split(".")[0] in ("cli", "benchmarks", "integrations", "zoo", "_profile"):
            continue
        # The pure peak model and the decision read the profile's data, not its making.
        used = (
            {u for u in internal(name) if u.startswith("_profile.")} if name in ("_decide", "_peak") else stages(name)
        )
        assert len(used) <= (0 if name in ("_decide", "_peak") else 1), f"{name} imports {used}"


def test_techniques_never_import_one_another() -> None:
    for name in MODULES:
        parts = name.split(".")
        if parts[0] != "techniques" or len(parts) < 2:
            continue
        others = {used for used in internal(name) if used.split(".")[0] == "techniques"}
        strangers = {used for used in others if used.split(".")[:2] != parts[:2] and used != "techniques"}
        assert not strangers, f"{name} imports {strangers}"


def test_techniques_know_nothing_of_profiles_and_decisions() -> None:
    for name in MODULES:
        if name.split(".")[0] == "techniques":
            used = {u.split(".")[0] for u in internal(name)}
            assert not used & {"_api", "_decide", "_execute", "_profile", "_peak", "_policy"}, name


def test_nothing_imports_in_a_circle() -> None:
    graph = {name: internal(name, top_level_only=True) - {name} for name in MODULES}
    done: set[str] = set()
    while len(done) < len(graph):
        ready = {name for name, needs in graph.items() if name not in done and needs - {"__init__"} <= done}
        assert ready, f"a circle among {sorted(set(graph) - done)}"
        done |= ready


def test_device_code_is_generic() -> None:
    for name, path in MODULES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) != "torch.cuda", f"{name}:{node.lineno} uses torch.cuda"
        assert not [i for i in imports(tree_of(path)) if i.startswith("torch.cuda")], f"{name} imports torch.cuda"


PUBLIC_BY_CUSTOM = ("torch.utils._pytree", "torch.utils._python_dispatch")
"""Underscored modules that PyTorch's own documentation tells extension authors to use."""


def test_private_torch_is_in_one_place() -> None:
    used = {name: private for name, path in MODULES.items() if (private := private_torch(tree_of(path)))}
    assert used.keys() <= {"_torch_private"}, f"put these into _torch_private.py: {used}"


def private_torch(tree: ast.Module) -> list[str]:
    private = [i for i in imports(tree) if i.startswith("torch.") and "._" in i and not i.startswith(PUBLIC_BY_CUSTOM)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text.startswith(("torch._", "torch.optim._", "torch.utils._", "torch.nn._", "torch.autograd._")):
                private.append(text)
    return private
