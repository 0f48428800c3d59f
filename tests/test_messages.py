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
