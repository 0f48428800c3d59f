"""Messages show bytes as a person reads them: "3.1 MB", not 3145728. Read from the source, whoever prints it."""

from __future__ import annotations

import ast
import itertools
import pathlib
import re
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.unit
PACKAGE = pathlib.Path(__file__).parent.parent / "src" / "memscale"
IN_BYTES = {
    "Block.__repr__",  # for those who debug the allocator model, whose addresses are bytes, too
    "CachingAllocator.allocate",  # an argument that is refused: zero, or less
}
COUNT = re.compile(r"(^|_)(n?bytes)$")


def raw_counts(tree: ast.AST, where: str = "") -> Iterator[tuple[str, int]]:
    """Where an f-string or a log record has bytes in it as a bare number."""
    for node in ast.iter_child_nodes(tree):
        inside = where
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            inside = f"{where}.{node.name}".lstrip(".")
        if isinstance(node, ast.JoinedStr) and _has_raw_count(node):
            yield inside, node.lineno
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"%d bytes", node.value):
            yield inside, node.lineno
        yield from raw_counts(node, inside)


def _has_raw_count(text: ast.JoinedStr) -> bool:
    for part, after in itertools.zip_longest(text.values, text.values[1:]):
        if isinstance(part, ast.FormattedValue):
            says_bytes = isinstance(after, ast.Constant) and str(after.value).startswith(" bytes")
            if says_bytes or _is_count(part.value):
                return True
    return False


def _is_count(value: ast.expr) -> bool:
    name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
    return bool(COUNT.search(name))


def test_no_message_has_a_bare_number_of_bytes() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{line} in {where}"
        for path in PACKAGE.rglob("*.py")
        for where, line in raw_counts(ast.parse(path.read_text()))
        if where not in IN_BYTES
    }
    assert not found, f"show_bytes() is for these: {sorted(found)}"


@pytest.mark.parametrize(
    "source", ['f"{num_bytes} are left"', 'f"of {size} bytes"', 'log("%d bytes", n)', 'f"{self.peak_bytes}"']
)
def test_bare_numbers_are_found(source: str) -> None:
    assert list(raw_counts(ast.parse(source)))


@pytest.mark.parametrize("source", ['f"{show_bytes(num_bytes)} are left"', 'f"{peak_bytes / 1e9:.3f} GB"'])
def test_what_a_person_can_read_is_let_by(source: str) -> None:
    assert not list(raw_counts(ast.parse(source)))


def _logged_errors(tree: ast.AST) -> Iterator[int]:
    """Where an error itself is given to a logger, and not its text."""
    for handler in ast.walk(tree):
        if isinstance(handler, ast.ExceptHandler) and handler.name:
            for call in ast.walk(handler):
                if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("logger."):
                    named = [arg for arg in call.args if isinstance(arg, ast.Name) and arg.id == handler.name]
                    yield from (arg.lineno for arg in named)


def test_no_log_record_holds_an_error() -> None:
    """Its traceback holds the frames of a step, and so its tensors, for as long as somebody keeps the record."""
    found = [
        f"{path.name}:{line}" for path in PACKAGE.rglob("*.py") for line in _logged_errors(ast.parse(path.read_text()))
    ]
    assert not found, f"log str(error) there: {found}"
    assert list(_logged_errors(ast.parse("try:\n  f()\nexcept E as e:\n  logger.info('%s', e)"))) == [4]
