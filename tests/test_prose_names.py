"""Prose names what exists: files, modules, attributes of our classes and notes that documents, docstrings and comments
refer to. A name that was moved or renamed fails here, where a reader would search for it in vain."""

from __future__ import annotations

import ast
import functools
import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.unit
ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("src", "simgpu/src", "emucuda/src", "benchmarks", "tools", "examples", "tests", "emucuda/tests", "docs")
EXAMPLES = {"program.py", "file.py", "path/to/file.py", "PATH.py", "train.py", "serve.py", "model.py"}
"""Names that stand for a file of the reader's own, or of another project."""
OTHERS = ("aten/", "c10/", "torch/", "transformers/", "accelerate/")
"""Where files of other projects lie."""
WRITTEN = {"CHANGELOG.md"}
"""Documents that speak of the past."""


@functools.cache
def files() -> frozenset[str]:
    """Every file that is ours, from the root."""
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*") if path.is_file()]
    return frozenset(path.relative_to(ROOT).as_posix() for path in [*below, *ROOT.glob("*.*")])


def sources(*folders: str) -> list[pathlib.Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def documents() -> list[pathlib.Path]:
    return sorted(path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if path.name not in WRITTEN)


def prose(path: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Lines for people, each with where it stands: documents without their blocks of code; docstrings and comments."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text()
    if path.suffix == ".md":
        text = re.sub(r"```.*?```", lambda block: "\n" * block.group().count("\n"), text, flags=re.DOTALL)
        yield from ((f"{name}:{number}", line) for number, line in enumerate(text.split("\n"), start=1))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and '"""' in token.string[:5]):
            for offset, line in enumerate(token.string.split("\n")):
                yield f"{name}:{token.start[0] + offset}", line


@functools.cache
def all_prose() -> tuple[tuple[str, str], ...]:
    ours = [*documents(), *sources("src", "simgpu/src", "emucuda/src", "benchmarks", "tools", "examples")]
    return tuple(found for path in ours for found in prose(path))


@functools.cache
def attributes() -> dict[str, frozenset[str]]:
    """By class of the package: every name that its file uses. Coarse, and enough to find what was renamed."""
    found: dict[str, set[str]] = {}
    for path in sources("src"):
        text = path.read_text()
        names = set(re.findall(r"\w+", "".join(re.split(r'"""(?:.|\n)*?"""', text))))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(names)
    return {name: frozenset(names) for name, names in found.items()}


def test_files_exist() -> None:
    wrong = []
    for where, line in all_prose():
        for name in re.findall(r"(?<![\w./*{<-])[\w./-]*\w\.(?:py|md)\b(?!\.)", line):
            short = name.lstrip("./")
            is_example = short in EXAMPLES or short.startswith(OTHERS) or "://" in line
            if not is_example and not any(f"/{known}".endswith(f"/{short}") for known in files()):
                wrong.append(f"{where}: {name}")
    assert not wrong, "\n".join(wrong)


def test_modules_exist() -> None:
    """`memscale._decide.search`, and `_decide.search` for short: as far as a dotted name goes into the package."""
    rooms = {path.stem for path in (ROOT / "src" / "memscale").iterdir() if path.stem.startswith("_")} | {"techniques"}
    wrong = []
    for where, line in all_prose():
        for name in re.findall(r"`(?:memscale\.)?(\w+(?:\.\w+)+)`", line):
            if name.split(".")[0] in rooms and not name.endswith(".py") and not _exists(name):
                wrong.append(f"{where}: {name}")
    assert not wrong, "\n".join(wrong)


def _exists(name: str) -> bool:
    """A module, or a name that stands in the module which the rest of it names."""
    path = ROOT / "src" / "memscale"
    for part in name.split("."):
        if (path / part).is_dir():
            path = path / part
        elif (path / f"{part}.py").is_file():
            path = path / f"{part}.py"
        else:
            text = (path / "__init__.py" if path.is_dir() else path).read_text()
            return re.search(rf"\b{part}\b", text) is not None
    return True


def test_maps_of_rooms_name_their_modules() -> None:
    """Lines of two columns in the docstring of a room, the first of which are its modules and folders."""
    wrong, num_named = [], 0
    for path in sources("src"):
        text = ast.get_docstring(ast.parse(path.read_text())) or "" if path.name == "__init__.py" else ""
        lines = re.findall(r"^ *(\w+/?(?:, \w+/?)*)  +\S", text, re.MULTILINE)
        named = [name.rstrip("/") for line in lines for name in line.split(", ")]
        there = [name for name in named if (path.parent / name).is_dir() or (path.parent / f"{name}.py").is_file()]
        num_named += len(there)
        if there:
            wrong += [f"{path.relative_to(ROOT)}: {name}" for name in named if name not in there]
    assert num_named > 50
    assert not wrong, "\n".join(wrong)


def test_attributes_of_our_classes_exist() -> None:
    wrong = []
    for where, line in all_prose():
        for name, attribute in re.findall(r"`([A-Z]\w+)\.(\w+)[`(\[]", line):
            if name in attributes() and attribute not in attributes()[name]:
                wrong.append(f"{where}: {name}.{attribute}")
    assert not wrong, "\n".join(wrong)


def test_notes_exist_where_they_are_said_to_be() -> None:
    headers = [*(ROOT / "emucuda" / "src").rglob("*.h"), *(ROOT / "emucuda" / "src").rglob("*.cpp")]
    read = [*sources("src", "simgpu/src", "emucuda/src", "benchmarks", "tests"), *headers]
    texts = {path: path.read_text() for path in read}
    defined = {path: set(re.findall(r"NOTE (\[[^\]]+\]):", text)) for path, text in texts.items()}
    wrong = []
    for path, text in texts.items():
        flat = re.sub(r"\s+(?:(?:#|//) )?", " ", text)
        for note, file in re.findall(r"[Ss]ee NOTE (\[[^\]]+\])(?: in `?([\w/]+\.\w+))?", flat):
            homes = {home for home, notes in defined.items() if note in notes}
            if not any(f"/{home.as_posix()}".endswith(f"/{file}" if file else "") for home in homes):
                wrong.append(f"{path.relative_to(ROOT)}: {note} in {file or 'no file'}")
    assert not wrong, "\n".join(wrong)
